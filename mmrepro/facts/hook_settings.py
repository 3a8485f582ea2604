"""Hooks and schedules in a config: which only watch, which count from the end of the training."""
from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..util.text import class_name
from .known_hooks import WATCHES, is_known, plays

LOOPS = ('EpochBasedTrainLoop', 'IterBasedTrainLoop')  # they do not count from the end
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
    """Return what may depend on where the training ends because of a setting; ''."""
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
