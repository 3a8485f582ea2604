"""State of a run that lives in Python attributes, where no ``state_dict`` finds it.

One row per class: the attributes to keep, and why they matter. Rows of all classes in the method
resolution order of an object count, whether it is a part of the model, of averages, hooks, data
loading, optimizers or schedules.
"""
from __future__ import annotations

import copy
import dataclasses
import enum
import re
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.runner import BaseLoop
from torch import nn

from ..data import dataset_tree, position_of_loader
from ..distributed.unwrap import (
    held_averages,
    named_hooks,
    nested_items,
    optim_wrappers,
    param_schedulers,
    unwrap,
)
from ..errors import CheckpointError, ConfigError, ResumeError
from ..objects.walks import (
    GENERATORS,
    attributes,
    has_attribute,
    is_stateful,
    read_state,
    restore_state,
)
from ..util.libraries import belongs_to_user
from ..util.text import qualified_name


class KeptAttributes(NamedTuple):
    """The attributes of a class that checkpoints keep."""
    attributes: tuple[str, ...]  # names, dotted where an attribute belongs to a part
    why: str  # what goes wrong in a resumed run without them


# by name of the class: of MMDetection and forks of it; by its path: of the user
KEPT: dict[str, KeptAttributes] = {
    'DynamicRoIHead': KeptAttributes(
        ('iou_history', 'beta_history', 'bbox_assigner.pos_iou_thr', 'bbox_assigner.neg_iou_thr',
         'bbox_assigner.min_pos_iou', 'bbox_head.loss_bbox.beta'),
        'thresholds and beta follow the last iterations'),
    'DropBlock': KeptAttributes(('iter_cnt', ), 'the drop probability warms up with a counter'),
    'BatchSyncRandomResize': KeptAttributes(
        ('_input_size', ), 'the size of the images holds for several iterations'),
    'IoUBalancedNegSampler': KeptAttributes(
        ('floor_thr', ), 'the first call changes the lower threshold for all others'),
    'DDODHead': KeptAttributes(
        ('cls_num_pos_samples_per_level', ),
        'losses of levels are weighted by the positive samples of the whole training'),
    'EarlyStoppingHook': KeptAttributes(
        ('wait_count', 'best_score'), 'patience starts again'),
}

Owners = dict[str, Any]  # objects that may have attributes to keep, by name
State = dict[str, dict[str, Any]]  # values by name of their owner and path of the attribute

MAX_DEPTH = 3  # of parts within parts of an object
_NAME = re.compile(r'[^\W\d]\w*(\.[^\W\d]\w*)*')
_MACHINERY = {*vars(nn.Module())}
# in a path, after the name of an attribute that the class has, not the object
OF_CLASS = ' of the class'
# the only key of a dict that stands for an object with a state of its own
STATE = 'state of the object'
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def keep_attributes(cls: type, *names: str, why: str = '') -> None:
    """Keep attributes of every object of a class, and of classes derived from it, in checkpoints.

    They are kept of a model and its parts, of averages, hooks, training datasets, their transforms,
    samplers, optimizers and schedules, in the main process, on each rank; and restored when a
    training resumes, after the ``before_train`` of all hooks. A value may be a number, text, tensor
    or array, an enum member, a dataclass, lists, tuples and dicts of these, a set of numbers or
    text, a module, or a random generator. Where it is or has an object, the resumed run needs one
    in the same place: a list that grows cannot have enum members.

    Args:
        names: of the attributes, dotted where they belong to a part: ``'assigner.threshold'``.
            Names of another call for the class are kept as well.
        why: what goes wrong in a resumed run without them.

    Raises:
        ConfigError: ``cls`` is no class, or ``names`` are no names of attributes.

    >>> class Warmup(nn.Module):
    ...     seen = 0
    >>> keep_attributes(Warmup, 'seen', why='counts its own iterations')
    """
    if not isinstance(cls, type):
        raise ConfigError(f'keep_attributes({cls!r}, ...): the first argument has to be a class, '
                          'such as MyHook')
    for name in names or ('', ):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError(f'keep_attributes({cls.__qualname__}, {name!r}): expected names of '
                              "attributes, such as 'count' or 'assigner.threshold'")
    key = qualified_name(cls)
    before = KEPT.get(key, KeptAttributes((), ''))
    attributes = dict.fromkeys([*before.attributes, *names])
    KEPT[key] = KeptAttributes((*attributes, ), why or before.why)


def names_class(name: str) -> bool:
    """Whether a row of the table is for classes with this bare name."""
    return any(key.rpartition('.')[2] == name for key in KEPT)


class _Attribute(NamedTuple):
    """An attribute to keep; ``owner`` None: a part on the path to it does not exist."""
    key: str  # of the object that has it
    path: str  # path of the attribute in the row
    owner: Any
    name: str
    row: str  # key of :data:`KEPT`

    @property
    def described(self) -> str:
        return f'{self.row.rpartition(".")[2]}.{self.path}'

    @property
    def by_user(self) -> bool:
        return '.' in self.row

    def exists(self) -> bool:
        return self.owner is not None and hasattr(self.owner, self.name)

    def of_class(self) -> type | None:
        """Return the class that has the attribute, if the object itself does not have it."""
        if self.name in attributes(self.owner):
            return None
        return next((cls for cls in type(self.owner).__mro__ if self.name in vars(cls)
                     and not hasattr(vars(cls)[self.name], '__get__')), None)


# ------------------------------------------------------------------------------- the objects


def _parts(owner: Any, prefix: str = '', depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield objects that an object holds without being its submodules: samplers, assigners, ...

    Parts of them too: the sampler of Libra R-CNN has samplers for positives and for negatives.
    """
    for name, value in attributes(owner).items():
        if name in _MACHINERY or name.startswith('_mmrepro_'):
            continue
        for place, item in nested_items(f'{prefix}{name}', value):
            if isinstance(item, (nn.Module, torch.Tensor)):
                continue
            yield place, item
            if depth < MAX_DEPTH and not isinstance(item, dict) and is_stateful(item):
                yield from _parts(item, f'{place}.', depth + 1)


def _with_parts(things: Mapping[str, Any]) -> Owners:
    """Return objects and their parts; of modules, all submodules and the parts of these."""
    owners: Owners = {}
    for name, thing in things.items():
        if isinstance(thing, nn.Module):
            owners.update((f'{name}:{path}', module) for path, module in thing.named_modules())
        else:
            owners[name] = thing
    parts = {f'{name}:{path}': part for name, thing in owners.items()
             for path, part in _parts(thing)}
    return {**owners, **parts}


def _of_data(loader: Any) -> Owners:
    """Return sampler, collate function, datasets and transforms of an adopted loader, by name."""
    if position_of_loader(loader) is None:
        return {}
    things = {'data:sampler': loader.batch_sampler.sampler,
              'data:batch sampler': loader.batch_sampler,
              'data:collate': getattr(loader.collate_fn, 'function', loader.collate_fn)}
    for number, dataset in enumerate(dataset_tree.datasets(loader.dataset)):
        name = f'data:dataset {number}'
        things[name] = dataset
        things.update((f'{name}:{path}', transform) for path, transform in
                      dataset_tree.transforms(getattr(dataset, 'pipeline', None)))
    return things


def model_owners(model: nn.Module) -> Owners:
    """Return the modules of a model, and their parts."""
    return _with_parts({'model': model})


def owners_of(runner: Any) -> Owners:
    """Return all objects of a training whose attributes may be kept."""
    things: Owners = {'model': unwrap(runner.model), 'runner': runner}
    if isinstance(runner._train_loop, BaseLoop):  # runner.train_loop would build it
        things.update({'loop': runner.train_loop, **_of_data(runner.train_dataloader)})
    for name, wrapper in optim_wrappers(runner.optim_wrapper).items():
        things[f'wrapper:{name}'], things[f'optimizer:{name}'] = wrapper, wrapper.optimizer
    for name, schedules in param_schedulers(runner).items():
        things.update((f'schedule:{name}:{number}', schedule)
                      for number, schedule in enumerate(schedules))
    things.update((f'average:{path}', average)
                  for path, average in held_averages(runner.hooks).items())
    for name, hook in named_hooks(runner.hooks):
        things[name] = hook
        things.update((f'{name}:{path}', module) for attribute, value in vars(hook).items()
                      for path, module in nested_items(attribute, value)
                      if isinstance(module, nn.Module))
    return _with_parts(things)


def _rows(cls: type) -> dict[str, str]:
    """Return the attributes to keep of a class, each with the key of its row in the table."""
    rows = {}
    for base in reversed(cls.__mro__):
        for key in (base.__name__, qualified_name(base)):
            if key in KEPT:
                rows.update(dict.fromkeys(KEPT[key].attributes, key))
    return rows


def _kept(owners: Owners, again: bool = False) -> Iterator[_Attribute]:
    """Yield the attributes to keep, those of an object with several names once; or ``again``."""
    seen = set()
    for key, obj in owners.items():
        if id(obj) in seen and not again:
            continue
        seen.add(id(obj))
        for path, row in _rows(type(obj)).items():
            *parents, name = path.split('.')
            owner = obj
            for parent in parents:
                owner = getattr(owner, parent, None)
            yield _Attribute(key, path, owner, name, row)


def kept_attributes(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Return owner and name of every attribute of a model that checkpoints keep."""
    return ((found.owner, found.name) for found in _kept(model_owners(model))
            if found.owner is not None)


# -------------------------------------------------------------------------------- the values


def _saved(value: Any, where: str) -> Any:
    """Return a copy that a checkpoint can hold.

    Raises:
        CheckpointError: the value is no data; names it.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, GENERATORS):
        return {STATE: copy.deepcopy(read_state(value))}
    if has_attribute(value, 'state_dict') and has_attribute(value, 'load_state_dict'):
        return {STATE: _saved(dict(value.state_dict()), where)}
    if isinstance(value, enum.Enum):
        return {STATE: _saved(value.value, where)}
    if isinstance(value, np.ndarray) and value.dtype.names:  # a file of plain data has no such type
        return {STATE: {name: _saved(value[name], where) for name in value.dtype.names}}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {STATE: {field.name: _saved(getattr(value, field.name), where)
                        for field in dataclasses.fields(value)}}
    if isinstance(value, Mapping):
        return {key: _saved(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        items = [_saved(item, where) for item in value]
        if isinstance(value, tuple):
            return tuple(items)  # a named tuple as well
        if isinstance(value, (list, deque)):
            return items
        try:
            return set(items)
        except TypeError as error:
            raise CheckpointError(
                f'{where} is a set of objects, which checkpoints cannot keep: keep names or '
                'numbers in their place') from error
    if not isinstance(value, _PLAIN) and (
            has_attribute(value, '__dict__') or belongs_to_user(type(value).__module__)):
        raise CheckpointError(
            f'{where} is a {qualified_name(type(value))}, which checkpoints cannot keep as it is: '
            "name its attributes instead, as in keep_attributes(MyHook, 'part.count'), or give it "
            'state_dict and load_state_dict')
    return copy.deepcopy(value)


def _restored(before: Any, value: Any, where: str) -> Any:
    """Return a saved value in the form of the attribute's present value, ``before``.

    Raises:
        ResumeError: the value is the state of an object, and the run has none that takes it.
    """
    if isinstance(value, dict) and [*value] == [STATE]:
        state = value[STATE]
        if isinstance(before, GENERATORS):
            restore_state(before, state)
        elif dataclasses.is_dataclass(before):
            cls: Any = type(before)
            if cls.__dataclass_params__.frozen:  # may be the default of other objects, too
                before = copy.copy(before)
            for name, item in state.items():
                object.__setattr__(before, name, _restored(
                    getattr(before, name, None), item, f'{where}.{name}'))
        elif isinstance(before, np.ndarray) and before.dtype.names == (*state, ):
            columns = {name: _restored(before[name], item, where) for name, item in state.items()}
            restored = np.zeros(next(iter(columns.values())).shape[:before.ndim], before.dtype)
            for name, column in columns.items():
                restored[name] = column
            return restored
        elif isinstance(before, enum.Enum) or hasattr(before, 'load_state_dict'):
            try:
                if isinstance(before, enum.Enum):
                    return type(before)(state)
                before.load_state_dict(state)
            except (RuntimeError, ValueError, KeyError) as error:
                raise ResumeError(f'the state of {where} in the checkpoint does not fit: {error}'
                                  ) from error
        else:
            raise ResumeError(
                f'the checkpoint has the state of an object in {where}, which is {before!r} when '
                'the resumed training begins: create the object in __init__, before_run or '
                'before_train; or, in a list that grows, let numbers or names stand for objects')
        return before
    if isinstance(before, nn.Parameter) and isinstance(value, torch.Tensor):
        return nn.Parameter(value.to(before.device), before.requires_grad)
    if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
        return value.to(before.device)
    if isinstance(value, dict):
        known = before if isinstance(before, Mapping) else {}
        content = {key: _restored(known.get(key), item, where) for key, item in value.items()}
        if not isinstance(before, dict):
            return content
        mapping = copy.copy(before)  # a Counter, a defaultdict
        mapping.clear()
        mapping.update(content)
        return mapping
    if isinstance(value, (list, tuple)):
        several = list(before) if isinstance(before, (list, tuple, deque)) else []
        several += [None] * (len(value) - len(several))
        items = [_restored(*pair, where) for pair in zip(several, value)]
        if isinstance(before, deque):
            return deque(items, before.maxlen)
        if isinstance(before, tuple) and hasattr(before, '_fields'):
            return type(before)(*items)
        return type(value)(items)
    if isinstance(value, set) and isinstance(before, frozenset):
        return type(before)(value)
    return copy.deepcopy(value)


def collect(owners: Owners, missing: list[str] | None = None) -> State:
    """Return the values of all attributes to keep, by the name of their owner.

    Args:
        missing: gets the attributes that objects of a user's class do not have.

    Raises:
        CheckpointError: a value is no data; names class and attribute.
    """
    state: State = {}
    for found in _kept(owners):
        values = state.setdefault(found.key, {})
        if found.exists():
            path = f'{found.path}{OF_CLASS}' if found.of_class() else found.path
            values[path] = _saved(getattr(found.owner, found.name), found.described)
        elif missing is not None and found.by_user:
            missing.append(found.described)
    return state


def restore(owners: Owners, state: State) -> list[str]:
    """Put collected values back; return the names in ``state`` that this run does not have.

    Raises:
        ResumeError: the state of an object, such as a module, has no object that takes it.
    """
    known = {f'{found.key}.{found.path}': found for found in _kept(owners, again=True)
             if found.owner is not None}
    lost = []
    for key, values in state.items():
        for path, value in values.items():
            found = known.get(f'{key}.{path.removesuffix(OF_CLASS)}')
            if found is None:
                lost.append(f'{key}.{path}')
                continue
            restored = _restored(getattr(found.owner, found.name, None), value, found.described)
            # an attribute of the object would hide the one of the class, which counts on
            target = found.of_class() if path.endswith(OF_CLASS) else None
            setattr(found.owner if target is None else target, found.name, restored)
    return lost


def _set(values: list[tuple[Any, str, Any]]) -> None:
    for owner, name, value in values:
        setattr(owner, name, value)


class KeptData:
    """The kept attributes of a loader's samplers and datasets, from which orders are drawn."""

    def __init__(self, loader: Any) -> None:
        owners = _with_parts(_of_data(loader))
        self._owners = {name: obj for name, obj in owners.items() if _rows(type(obj))}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def read(self) -> State:
        return collect(self._owners)

    @contextmanager
    def replaced(self, state: State) -> Iterator[None]:
        """Give the attributes the values of ``state`` in this block, and put the objects back."""
        kept = [found for found in _kept(self._owners) if found.owner is not None]
        present = [(found.of_class() or found.owner, found.name,
                    getattr(found.owner, found.name)) for found in kept if found.exists()]
        absent = [found for found in kept if found.name not in attributes(found.owner)]
        saved = self.read()
        try:
            restore(self._owners, state)
            yield
        finally:
            for found in absent:
                if found.name in attributes(found.owner):
                    delattr(found.owner, found.name)
            _set(present)
            restore(self._owners, saved)  # into the objects, some of which `restore` changes
            _set(present)


def keep_orders(loader: Any) -> None:
    """Let checkpoints keep the attributes from which the order of a loader's data is drawn."""
    loader_position = position_of_loader(loader)
    if loader_position is not None:
        loader_position.kept = KeptData(loader) or None
