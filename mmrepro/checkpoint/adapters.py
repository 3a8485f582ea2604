"""State of a run that lives in Python attributes, where no ``state_dict`` finds it.

One row per class: the attributes to keep, and why they matter. Rows are found by class name along
the method resolution order, in models (modules, and objects that modules hold) and among hooks.
"""
from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from ..reachable import is_stateful


class Adapter(NamedTuple):
    """The attributes of a class that checkpoints keep."""
    attributes: tuple[str, ...]  # names, dotted where an attribute belongs to a part
    why: str  # what goes wrong in a resumed run without them


ADAPTERS: dict[str, Adapter] = {
    'DynamicRoIHead': Adapter(
        ('iou_history', 'beta_history', 'bbox_assigner.pos_iou_thr', 'bbox_assigner.neg_iou_thr',
         'bbox_assigner.min_pos_iou', 'bbox_head.loss_bbox.beta'),
        'thresholds and beta follow the last iterations'),
    'DropBlock': Adapter(('iter_cnt', ), 'the drop probability warms up with a counter'),
    'BatchSyncRandomResize': Adapter(
        ('_input_size', ), 'the size of the images holds for several iterations'),
    'IoUBalancedNegSampler': Adapter(
        ('floor_thr', ), 'the first call changes the lower threshold for all others'),
    'DDODHead': Adapter(
        ('cls_num_pos_samples_per_level', ),
        'losses of levels are weighted by the positive samples of the whole training'),
    'EarlyStoppingHook': Adapter(
        ('wait_count', 'best_score'), 'patience starts again'),
}

MAX_DEPTH = 3  # of parts within parts of a module


def register(cls: type, *attributes: str, why: str = '') -> None:
    """Keep ``attributes`` of every object of ``cls`` in checkpoints.

    >>> class Warmup(nn.Module):
    ...     seen = 0
    >>> register(Warmup, 'seen', why='counts its own iterations')
    >>> ADAPTERS.pop('Warmup').attributes
    ('seen',)
    """
    ADAPTERS[cls.__name__] = Adapter(tuple(attributes), why)


def _parts(owner: Any, prefix: str = '', depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield objects that a module holds without being its submodules: samplers, assigners, ...

    Parts of them too: the sampler of Libra R-CNN has samplers for positives and for negatives.
    """
    for name, value in list(vars(owner).items()):
        if name.startswith('_') and name != '_sampler':
            continue
        items = enumerate(value) if isinstance(value, (list, tuple)) else ((None, value), )
        for index, item in items:
            path = f'{prefix}{name}' if index is None else f'{prefix}{name}.{index}'
            if isinstance(item, (nn.Module, torch.Tensor)):
                continue
            yield path, item
            if depth < MAX_DEPTH and hasattr(item, '__dict__') and not isinstance(
                    item, dict) and is_stateful(item):
                yield from _parts(item, f'{path}.', depth + 1)


def _kept(model: nn.Module, hooks: list[Any]) -> Iterator[tuple[str, str, Any, str]]:
    """Yield the attributes of a model and of hooks that have an adapter.

    Each comes as the name of the object with the adapter, the path that the adapter gives, the
    object that has the attribute, and the attribute's name.
    """
    objects: dict[str, Any] = {}
    for path, module in model.named_modules():
        objects[f'model:{path}'] = module
        objects.update((f'model:{path}:{name}', part) for name, part in _parts(module))
    for name, obj in [*objects.items(), *named_hooks(hooks)]:
        adapter = next((ADAPTERS[cls.__name__] for cls in type(obj).__mro__
                        if cls.__name__ in ADAPTERS), None)
        for path in adapter.attributes if adapter is not None else ():
            *parents, attribute = path.split('.')
            yield name, path, functools.reduce(getattr, parents, obj), attribute


def named_hooks(hooks: list[Any]) -> Iterator[tuple[str, Any]]:
    """Name hooks by class and number in it: hooks of other classes change no name."""
    numbers: Counter = Counter()
    for hook in hooks:
        name = type(hook).__name__
        yield f'hook:{name}:{numbers[name]}', hook
        numbers[name] += 1


def _plain(value: Any) -> Any:
    """Return a copy that a checkpoint can hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value)
    return copy.deepcopy(value)


def kept_attributes(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Return owner and name of every attribute of a model that checkpoints keep."""
    return ((owner, name) for _, _, owner, name in _kept(model, []))


def collect(model: nn.Module, hooks: list[Any]) -> dict[str, dict[str, Any]]:
    """Return the values of all known attributes, by the name of their owner."""
    state: dict[str, dict[str, Any]] = {}
    for key, path, owner, name in _kept(model, hooks):
        values = state.setdefault(key, {})
        if hasattr(owner, name):
            values[path] = _plain(getattr(owner, name))
    return state


def restore(model: nn.Module, hooks: list[Any], state: dict[str, dict[str, Any]]) -> list[str]:
    """Put collected values back; returns what of ``state`` this run does not have."""
    known = {f'{key}.{path}': (owner, name) for key, path, owner, name in _kept(model, hooks)}
    values = {f'{key}.{path}': value for key, of_key in state.items()
              for path, value in of_key.items()}
    for key in filter(known.__contains__, values):
        (owner, name), value = known[key], values[key]
        before = getattr(owner, name, None)
        if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
            value = value.to(before.device)
        setattr(owner, name, value)
    return [key for key in values if key not in known]
