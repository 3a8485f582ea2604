"""A walk through MMDetection's zoo: which configs build, train and infer with mmcv-lite.

``families`` lists one config or more per folder of the zoo, ``inputs`` makes what a detector
trains on, ``step`` takes one config through two training steps and an inference, twice, and
``walk`` does so for all of them, each in a child process with a limit; ``report`` puts the
results into words.
"""
from __future__ import annotations

from .families import FAMILIES, Member
from .sweep_report import reached_by

__all__ = ['FAMILIES', 'Member', 'reached_by']
