"""State in attributes that no adapter keeps: a run is compared with its own resume."""
from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..digests import state_digest
from ..distributed.unwrap import optim_wrappers, unwrap
from ..facts.hook_settings import WATCHERS, is_a
from ..generator_kinds import GENERATORS, read_state
from ..reachable import CONTAINERS, attributes, belongs_to_user, is_stateful, items
from ..text import shorten
from ..variables import outside_of_libraries
from .adapters import named_hooks

MAX_DEPTH = 5  # of objects within objects
MAX_ITEMS = 2000  # of a container; of longer ones, the length counts
_ABSENT = '(not set)'

# hooks without state of the training: attributes of watchers (times, paths, counts of this process)
# say what the process did, and the best score of CheckpointHook is in the message hub
WITHOUT_STATE = (*WATCHERS, 'DistSamplerSeedHook', 'ParamSchedulerHook')
# attributes of modules that torch and MMEngine keep for themselves
_MACHINERY = {'_parameters', '_buffers', '_modules', '_non_persistent_buffers_set', 'init_cfg',
              '_is_full_backward_hook', '_version', 'training', '_is_init', '_params_init_info'}


class Lost(NamedTuple):
    """An attribute that differs in the resumed run."""
    owner: str  # module or hook
    cls: str  # class of the owner
    attribute: str
    then: str
    now: str


def snapshot(runner: Any) -> dict[str, dict[str, str]]:
    """Return the values of attributes of the model's modules, objects that they hold, and hooks.

    Returns:
        dict: ``{owner: {'<class>': name, attribute path: value as text or digest}}``.
    """
    model = unwrap(runner.model)
    owners = [(f'model:{path}', module, _without_machinery(_with_class(module)))
              for path, module in model.named_modules()]
    owners += [(name, hook, attributes(hook)) for name, hook in named_hooks(runner.hooks)
               if not is_a(WITHOUT_STATE, type(hook).__name__)]
    return _described(runner, owners)


def code_state(runner: Any) -> dict[str, dict[str, str]]:
    """Return, as :func:`snapshot`, state of optimizers, samplers, and modules of the user."""
    batches = runner.train_dataloader.batch_sampler
    things = [('optimizer', wrapper.optimizer)
              for wrapper in optim_wrappers(runner.optim_wrapper).values()]
    things += [('sampler', batches), ('sampler', getattr(batches, 'sampler', None))]
    owners = [(f'{kind}:{stock_class(thing).__name__}', thing, {
        name: value for name, value in _without_machinery(attributes(thing)).items()
        if name not in ('param_groups', 'state', 'defaults', 'sampler')}) for kind, thing in things]
    for name, module in list(sys.modules.items()):
        file = getattr(module, '__file__', None)
        if file and outside_of_libraries(name, file):
            content = dict(vars(module))
            for cls in [value for value in content.values() if isinstance(value, type)]:
                if cls.__module__ == name:
                    content.update((f'{cls.__name__}.{key}', value)
                                   for key, value in vars(cls).items())
            owners.append((f'global:{name}', module, _without_machinery(content)))
    return _described(runner, owners)


def stock_class(thing: Any) -> type:
    """Return the class that an object had before a loader was adopted."""
    return getattr(thing, '_mmrepro_stock', type(thing))


def _described(runner: Any, owners: list[tuple[str, Any, dict[str, Any]]]
               ) -> dict[str, dict[str, str]]:
    # owners that other owners refer to
    seen = {id(obj) for obj in (*unwrap(runner.model).modules(), runner, runner.model, runner.cfg,
                                *runner.hooks)}
    described = {}
    for name, owner, content in owners:
        cls = stock_class(owner)
        module = owner if isinstance(owner, ModuleType) else sys.modules.get(cls.__module__)
        file = getattr(module, '__file__', None) or ''
        described[name] = {
            '<class>': cls.__name__, '<file>': file, **dict(_values(content, '', seen))}
    return described


def _with_class(module: nn.Module) -> dict[str, Any]:
    """Return attributes, with those that only the classes have yet."""
    classes = [vars(cls) for cls in type(module).__mro__[::-1] if belongs_to_user(cls.__module__)]
    return {name: value for content in (*classes, vars(module)) for name, value in content.items()}


def _without_machinery(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in _MACHINERY
            and not name.startswith(('__', '_mmrepro_'))
            and not name.endswith(('_hooks', '_hooks_with_kwargs', '_hooks_always_called'))}


def _values(content: Mapping[str, Any], prefix: str, seen: set[int],
            depth: int = 0) -> Iterator[tuple[str, str]]:
    for name, value in sorted(content.items()):
        yield from _value(f'{prefix}{name}', value, seen, depth)


def _value(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, str]]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        yield path, repr(value)
    elif isinstance(value, torch.Tensor):
        if not isinstance(value, nn.Parameter):
            yield path, f'tensor {tuple(value.shape)} {state_digest(value)[:16]}'
    elif isinstance(value, np.ndarray):
        yield path, f'array {value.shape} {state_digest(value.tolist())[:16]}'
    elif isinstance(value, GENERATORS):
        yield path, f'generator {state_digest(read_state(value))[:16]}'
    elif id(value) in seen or depth >= MAX_DEPTH:
        return
    elif isinstance(value, (set, frozenset)):
        yield path, f'{len(value)} items {state_digest(value)[:16]}'
    elif isinstance(value, CONTAINERS):
        yield f'len({path})', str(len(value))
        for name, item in items(value, path) if len(value) <= MAX_ITEMS else ():
            yield from _value(name, item, seen | {id(value)}, depth + 1)
    elif is_stateful(value):
        yield from _values(attributes(value), f'{path}.', seen | {id(value)}, depth + 1)


def lost_state(runs: list[dict[str, dict[str, str]]],
               resumed: dict[str, dict[str, str]]) -> list[Lost]:
    """Return attributes that agree in all ``runs`` and differ in the resumed run.

    Args:
        runs: snapshots of uninterrupted runs at one iteration. What differs among them, such as
            times, is not state that a resume loses.
        resumed: snapshot at the same iteration of a run that resumed there.
    """
    rows: dict[tuple[str, str], Lost] = {}  # a row for a container, not for each of its items
    for owner, then in runs[0].items():
        now = resumed.get(owner, {})
        for name in {**then, **now}:
            values = {run.get(owner, {}).get(name, _ABSENT) for run in runs}
            if len(values) > 1 or now.get(name, _ABSENT) in values:
                continue
            attribute = (name[4:-1] if name.startswith('len(') else name).split('[')[0]
            rows.setdefault((owner, attribute), Lost(
                owner, then.get('<class>', ''), attribute,
                shorten(then.get(name, _ABSENT)), shorten(now.get(name, _ABSENT))))
    return list(rows.values())
