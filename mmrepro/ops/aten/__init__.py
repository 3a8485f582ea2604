"""torch's own operators, where they raise, drift or take detours under the deterministic flag.

``table`` says what torch does and what we do, operator by operator and release by release;
``dispatch`` installs it. The families: ``separable`` (resize, average pooling, padding), ``grids``
(grid_sample), ``scatters`` (max pooling and whatever adds at an index), ``scans`` (cumsum),
``orders`` (topk, sort and their kin, where ties go by index), ``losses``, ``seams``.

Every function runs on any device and is tested on a CPU; the dispatcher calls it for CUDA, and
those of ``orders`` for a CPU too.
"""
from __future__ import annotations

from .dispatch import active, install, installed, installing, uninstall
from .kernel_table import TABLE, Row

__all__ = ['TABLE', 'Row', 'active', 'install', 'installed', 'installing', 'uninstall']
