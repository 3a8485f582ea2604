"""The operator rows of the check of a GPU, which `tools/gpu_check.py` adds to the detectors.

``cases_mmcv`` and ``cases_torch`` are the catalogue of cases, made with ``operator_cases``; the
benchmarks take theirs from it too. ``checking`` checks one case, disturbed by ``disturbance``, and
``groups`` has the rows.
"""
from __future__ import annotations

from .groups import GROUPS

__all__ = ['GROUPS']
