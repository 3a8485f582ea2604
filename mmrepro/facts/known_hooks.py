"""What the hooks of MMEngine, MMDetection and mmrepro do that other parts have to know: a table.

A hook of the user may do anything.
"""
from __future__ import annotations

import fnmatch
from typing import Any

from ..util.text import class_name

WATCHES = 'writes down, watches or tidies up, and changes nothing'
STATELESS = 'keeps nothing that the training depends on'
WRITES_WEIGHTS = 'changes weights outside of the optimizer'
AVERAGES_AT_VALIDATION = 'averages statistics over the ranks before a validation'
AVERAGES_AT_EPOCH_END = 'averages statistics over the ranks after an epoch'

# name of the class, with * for any text -> roles. None of them counts back from the end of the
# training.
HOOKS: dict[str, tuple[str, ...]] = {
    'CheckInvalidLossHook': (WATCHES, ),
    'CheckpointHook': (WATCHES, ),
    'DistSamplerSeedHook': (STATELESS, ),
    'EMAHook': (WRITES_WEIGHTS, ),
    'EarlyStoppingHook': (),
    'EmptyCacheHook': (WATCHES, ),
    'FingerprintHook': (WATCHES, ),
    'IterTimerHook': (WATCHES, ),
    'LoggerHook': (WATCHES, ),
    'MeanTeacherHook': (WRITES_WEIGHTS, ),
    'MemoryProfilerHook': (WATCHES, ),
    'NPUProfilerHook': (WATCHES, ),
    'NumClassCheckHook': (WATCHES, ),
    'OperatorGuardHook': (WATCHES, ),
    'ParamSchedulerHook': (STATELESS, ),
    'PipelineSwitchHook': (),
    'PreemptHook': (WATCHES, ),
    'ProfilerHook': (WATCHES, ),
    'RuntimeInfoHook': (WATCHES, ),
    'SelfCheckHook': (WATCHES, ),
    'SetEpochInfoHook': (),
    'SyncBuffersHook': (AVERAGES_AT_EPOCH_END, ),
    'SyncNormHook': (AVERAGES_AT_VALIDATION, WRITES_WEIGHTS),
    '*VisualizationHook': (WATCHES, ),
    'WitnessRecords': (WATCHES, ),
}


def _roles(kind: Any) -> tuple[str, ...] | None:
    name = class_name(kind)
    return next((roles for pattern, roles in HOOKS.items()
                 if fnmatch.fnmatchcase(name, pattern)), None)


def is_known(kind: Any) -> bool:
    """Whether a class, or the ``type`` in a config, is one of the table."""
    return _roles(kind) is not None


def plays(kind: Any, *roles: str) -> bool:
    """Whether a class, or the ``type`` in a config, has one of these roles."""
    return not set(roles).isdisjoint(_roles(kind) or ())
