"""A table of the effects of MMEngine's, MMDetection's and mmrepro's hooks that other code has to
know.

A hook of the user may do anything. What the settings of a config mean follows from the table: hooks
that only watch can be left out, and what is not known may count from the end of the training.
"""
from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
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


LOOPS = ('EpochBasedTrainLoop', 'IterBasedTrainLoop')  # loops that do not count from the end
_HOOK = re.compile(r'config\.(?:custom_hooks\[(\d+)\]|default_hooks\.\w+)')


def _hook(name: str, facts: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name of the hook that a fact is about, and its type; ('', None) for others."""
    match = _HOOK.match(name)
    return (match[0], facts.get(f'{match[0]}.type')) if match else ('', None)


def without_watchers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts without custom hooks that only watch; the others move up."""
    hooks = {_hook(name, facts) for name in facts if name.startswith('config.custom_hooks[')}
    kept = sorted((hook for hook, kind in hooks if not plays(kind, WATCHES)),
                  key=lambda hook: int(hook.partition('[')[2][:-1]))
    moved = {hook: f'config.custom_hooks[{index}]' for index, hook in enumerate(kept)}
    result = {}
    for name, value in facts.items():
        hook = _hook(name, facts)[0]
        if not name.startswith('config.custom_hooks['):
            result[name] = value
        elif hook in moved:
            result[f'{moved[hook]}{name[len(hook):]}'] = value
    return result


def is_watching(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether a fact is about a hook that only watches."""
    return plays(_hook(name, facts)[1], WATCHES)


def _ends_with_the_training(name: str, facts: Mapping[str, Any]) -> str:
    """Return the part that a setting may make depend on the end of the training, or ''."""
    value, (hook, kind) = facts[name], _hook(name, facts)
    setting = name.removeprefix('config.')
    if hook and kind is not None:
        return '' if is_known(kind) else class_name(kind)
    if name in (hook, 'config.custom_hooks'):
        return '' if value is None else setting  # an object
    if name.startswith('config.param_scheduler') and name.endswith('.type'):
        return '' if f'{name[:-len(".type")]}.end' in facts else str(value)
    if name == 'config.param_scheduler':
        return '' if value in (None, '[]', '{}') else setting
    if name.startswith('config.optim_wrapper') and name.endswith('.accumulative_counts'):
        return '' if value == 1 else setting  # the last cycle is shorter
    if name == 'config.train_cfg.type':
        return '' if class_name(value) in LOOPS else str(value)
    return ''


def counting_from_the_end(facts: Mapping[str, Any]) -> list[str]:
    """Return schedules without an ``end``, hooks that may count back from the end, and the like."""
    return list(dict.fromkeys(filter(None, (
        _ends_with_the_training(name, facts) for name in facts))))
