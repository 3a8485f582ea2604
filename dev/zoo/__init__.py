"""A sweep over MMDetection's model zoo: which configs build, train and infer with mmcv-lite.

``families`` lists one config or more per folder of the zoo. ``step`` runs two training steps and an
inference of a config, twice. ``sweep`` does so for all of them, each in a child process with a time
limit. ``sweep_report`` writes the results as tables.
"""
from __future__ import annotations

from .families import FAMILIES, Member
from .sweep_report import reached_by

__all__ = ['FAMILIES', 'Member', 'reached_by']
