"""State in attributes that no adapter keeps: a run is compared with its own resume."""
from __future__ import annotations

import collections
import random
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..digests import state_digest
from ..distributed.unwrap import unwrap
from .adapters import named_hooks

MAX_DEPTH = 5  # of objects within objects
MAX_ITEMS = 2000  # of a container; a longer one counts as a whole by its length
_TEXT = 60  # characters of a value that are shown
_ABSENT = '(not set)'

# Hooks of MMEngine and mmrepro whose attributes say what the process did, not what training does
WITHOUT_STATE = {
    'RuntimeInfoHook': 'writes to the message hub, which a checkpoint holds',
    'IterTimerHook': 'times',
    'LoggerHook': 'paths of files',
    'CheckpointHook': 'paths; its best score is in the message hub',
    'DistSamplerSeedHook': 'has none',
    'ParamSchedulerHook': 'has none',
    'PreemptHook': 'signals',
    'FingerprintHook': 'files',
    'OperatorGuardHook': 'operators that it has seen',
    'SelfCheckHook': 'counts of this process',
    'DetVisualizationHook': 'draws',
}
# attributes of modules that torch and MMEngine keep for themselves
_MACHINERY = {'_parameters', '_buffers', '_modules', '_non_persistent_buffers_set', 'init_cfg',
              '_is_full_backward_hook', '_version', 'training', '_is_init', '_params_init_info'}
_FOREIGN = ('torch', 'builtins', 'logging', 'threading', 'multiprocessing', 'queue', 'mmengine',
            'matplotlib')


class Lost(NamedTuple):
    """An attribute that is other in the resumed run. ``cls`` owns it."""
    place: str
    cls: str
    attribute: str
    then: str
    now: str


def snapshot(runner: Any) -> dict[str, dict[str, str]]:
    """Values of all attributes of the model's modules, of objects that they hold, and of hooks.

    Returns:
        dict: ``{place: {'<class>': name, attribute path: value as text or digest}}``.
    """
    found: dict[str, dict[str, str]] = {}
    # parts that belong to somebody else are seen there
    seen = {id(module) for module in unwrap(runner.model).modules()}
    seen.update(map(id, [runner, runner.model, runner.cfg, *runner.hooks]))
    for path, module in unwrap(runner.model).named_modules():
        own = {name: value for name, value in vars(module).items()
               if name not in _MACHINERY and not name.endswith(('_hooks', '_hooks_with_kwargs',
                                                                '_hooks_always_called'))}
        found[f'model:{path}'] = {'<class>': type(module).__name__, **dict(_values(own, '', seen))}
    for place, hook in named_hooks(runner.hooks):
        if type(hook).__name__ not in WITHOUT_STATE:
            found[place] = {
                '<class>': type(hook).__name__, **dict(_values(vars(hook), '', seen))}
    return found


def _values(attributes: Mapping[str, Any], prefix: str, seen: set[int],
            depth: int = 0) -> Iterator[tuple[str, str]]:
    for name, value in sorted(attributes.items()):
        yield from _value(f'{prefix}{name}', value, seen, depth)


def _value(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        yield path, repr(value)
    elif isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield path, f'tensor {tuple(value.shape)} {state_digest(value)[:16]}'
    elif isinstance(value, np.ndarray):
        yield path, f'array {value.shape} {state_digest(value.tolist())[:16]}'
    elif isinstance(value, torch.Generator):
        yield path, f'generator {state_digest(value.get_state())[:16]}'
    elif isinstance(value, random.Random):
        yield path, f'generator {state_digest(value.getstate())[:16]}'
    elif isinstance(value, (np.random.Generator, np.random.RandomState)):
        state = getattr(value, 'bit_generator', value)
        state = state.state if hasattr(state, 'state') else state.get_state()
        yield path, f'generator {state_digest(repr(state))[:16]}'
    elif id(value) in seen or depth >= MAX_DEPTH:
        return
    elif isinstance(value, (dict, list, tuple, collections.deque, set, frozenset)):
        yield from _container(path, value, seen | {id(value)}, depth)
    elif hasattr(value, '__dict__') and not isinstance(value, (type, nn.Module)) and \
            not callable(getattr(value, '__get__', None)) and \
            type(value).__module__.split('.')[0] not in _FOREIGN:
        yield from _values(vars(value), f'{path}.', seen | {id(value)}, depth + 1)


def _container(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    yield f'len({path})', str(len(value))
    if len(value) > MAX_ITEMS:
        return
    if isinstance(value, dict):
        for key in value:
            yield from _value(f'{path}[{key!r}]', value[key], seen, depth + 1)
    elif isinstance(value, (set, frozenset)):
        yield path, state_digest(sorted(map(repr, value)))[:16]
    else:
        for number, item in enumerate(value):
            yield from _value(f'{path}[{number}]', item, seen, depth + 1)


def lost_state(runs: list[dict[str, dict[str, str]]],
               resumed: dict[str, dict[str, str]]) -> list[Lost]:
    """Attributes that agree in all ``runs`` and are other in the resumed one.

    Args:
        runs: snapshots of uninterrupted runs at one iteration. What differs among them, such as
            times, is not state that a resume loses.
        resumed: snapshot at the same iteration of a run that resumed there.
    """
    found: list[Lost] = []
    first = runs[0]
    for place, then in first.items():
        now = resumed.get(place, {})
        for name in [*then, *(name for name in now if name not in then)]:
            values = {run.get(place, {}).get(name, _ABSENT) for run in runs}
            if len(values) > 1 or now.get(name, _ABSENT) in values:
                continue
            found.append(Lost(place, then.get('<class>', ''), name,
                              _short(then.get(name, _ABSENT)), _short(now.get(name, _ABSENT))))
    return _without_items(found)


def _without_items(lost: list[Lost]) -> list[Lost]:
    """One row for a container, not one for each of its items."""
    rows: dict[tuple[str, str], Lost] = {}
    for row in lost:
        attribute = row.attribute[4:-1] if row.attribute.startswith('len(') else row.attribute
        attribute = attribute.split('[')[0]
        rows.setdefault((row.place, attribute), row._replace(attribute=attribute))
    return list(rows.values())


def _short(text: str) -> str:
    return text if len(text) <= _TEXT else f'{text[:_TEXT]}...'

