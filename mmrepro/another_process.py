"""What user code finds in another process: other ids, and its modules as they were at the start.

A resumed run, and each worker of a loader, is another process. State that user code keeps in global
variables, attributes of classes, default arguments and cached functions is not there.
"""
from __future__ import annotations

import copy
import functools
import os
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data._utils import worker

from .digests import exact_digest
from .generator_kinds import GENERATORS
from .reachable import PLAIN, Walk, belongs_to_user, cells, inside
from .scoped import replaced
from .text import qualified_name

MAX_ITEMS = 2000  # of a container; larger ones hold annotations, which copies share
MAX_BYTES = 1 << 20  # of an array or tensor, likewise
MAX_OBJECTS = 10_000  # visited; the nearest ones first
MAX_IN_VARIABLE = 300  # objects; a variable that holds more, such as a runner, is left out
_MISSING = object()  # the value of a variable that does not exist
_CACHED = type(functools.lru_cache(print))
# of a function: defaults and the variables of enclosing functions
_CELL, _DEFAULTS = 'cell_contents', ('__defaults__', '__kwdefaults__')


@contextmanager
def other_ids() -> Iterator[None]:
    """Let ``os.getpid()`` and ``get_worker_info()`` return those of another worker."""
    process, info = os.getpid(), worker.get_worker_info()
    dataset: Any = info.dataset if info else None
    other = worker.WorkerInfo(
        id=info.id + 1 if info else 0, num_workers=info.num_workers + 1 if info else 1,
        seed=info.seed + 1 if info else 0, dataset=dataset)
    with replaced(os, getpid=lambda: process + 1), replaced(worker, _worker_info=other):
        yield


class _Variable(NamedTuple):
    """A variable of user code, and its value when it was captured."""
    path: str
    owner: Any
    name: str
    content: Any
    digest: str

    def changed(self) -> bool:
        try:
            value = _value(self.owner, self.name)
            return (_digest(value) if _is_small(value) else 'large') != self.digest
        except Exception:  # of an object of the user, whose attributes may be properties
            return True


class UserVariables:
    """The variables, with their values, of the modules that have the classes of ``things``, and of
    what these import of the user's.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self._variables: list[_Variable] = []
        self._owners: list[tuple[str, Any, set[str]]] = []  # and the names that they had
        self._walk = Walk()
        things = [getattr(thing, 'func', thing) for thing in things]
        classes = [cls for thing in things
                   for cls in (thing if isinstance(thing, type) else type(thing)).__mro__]
        # of packages that are installed, those that the run uses classes of
        self._packages = {cls.__module__.partition('.')[0] for cls in classes}
        for cls in dict.fromkeys(classes):
            if belongs_to_user(cls.__module__):
                # a decorator may have given its name in the module to another object
                self._add_class(qualified_name(cls), cls)
                self._add_module(sys.modules.get(cls.__module__))
        for thing in things:
            for value in (thing, *getattr(thing, '__dict__', {}).values()):
                function = getattr(value, 'func', value)
                if isinstance(function, FunctionType) and belongs_to_user(function.__module__):
                    self._add_module(sys.modules.get(function.__module__))
                    self._add_function(f'{type(thing).__name__}.{function.__name__}', function)

    def changed(self) -> list[str]:
        """Return the paths of variables whose values have changed."""
        return [variable.path for variable in self._changed()]

    def _changed(self) -> list[_Variable]:
        new = [_Variable(f'{path}.{name}', owner, name, _MISSING, '')
               for path, owner, names in self._owners for name, value in list(vars(owner).items())
               if name not in names and not name.startswith('__') and _may_change(value)]
        return [*(variable for variable in self._variables if variable.changed()), *new]

    @contextmanager
    def as_captured(self, paths: Collection[str] | None = None) -> Iterator[None]:
        """Give changed variables (of ``paths``) copies of the captured values inside the block."""
        before = []
        try:
            for path, owner, name, content, _ in self._changed():
                if paths is None or path in paths:
                    before.append((owner, name, _value(owner, name)))
                    _assign(owner, name, content if content is _MISSING else _copy(content))
            yield
        finally:
            for changed in before:
                _assign(*changed)

    def _add_module(self, module: ModuleType | None) -> None:
        if module is None or not self._walk.is_new(module) or not belongs_to_user(module.__name__):
            return
        if 'site-packages' in (getattr(module, '__file__', None) or '') and (
                module.__name__.partition('.')[0] not in self._packages):
            return
        self._owners.append((module.__name__, module, set(vars(module))))
        for name, value in list(vars(module).items()):
            defined_in = getattr(value, '__module__', None)
            if isinstance(value, ModuleType):
                self._add_module(value)
            elif isinstance(value, (type, FunctionType)) and defined_in != module.__name__:
                self._add_module(sys.modules.get(defined_in or ''))
            elif isinstance(value, type):
                self._add_class(f'{module.__name__}.{name}', value)
            elif isinstance(value, FunctionType):
                self._add_function(f'{module.__name__}.{name}', value)
            else:
                self._add_variable(f'{module.__name__}.{name}', module, name, value)

    def _add_class(self, path: str, cls: type) -> None:
        if not self._walk.is_new(cls):
            return
        self._owners.append((path, cls, set(vars(cls))))
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType):
                self._add_function(f'{path}.{name}', value)
            else:
                self._add_variable(f'{path}.{name}', cls, name, value)

    def _add_function(self, path: str, function: FunctionType) -> None:
        for name in _DEFAULTS:
            self._add_variable(f'{path}.{name}', function, name, getattr(function, name))
        for name, cell in cells(function):
            if self._walk.is_new(cell):
                self._add_variable(f'{path}.{name}', cell, _CELL, cell.cell_contents)

    def _add_variable(self, path: str, owner: Any, name: str, value: Any) -> None:
        plain_name = name.startswith('__') and name not in _DEFAULTS
        if plain_name or not _may_change(value):
            return
        with suppress(Exception):  # objects of the user, whose attributes may be properties
            content = _copy(value) if _is_small(value) else None
            if content is not None or value is None:
                self._variables.append(_Variable(path, owner, name, content, _digest(value)))


def _value(owner: Any, name: str) -> Any:
    """Return a variable as its owner has it, not what a descriptor makes of it."""
    if isinstance(owner, (ModuleType, type)):
        return vars(owner).get(name, _MISSING)
    try:
        return getattr(owner, name)
    except ValueError:  # a cell whose variable is not bound
        return _MISSING


def _assign(owner: Any, name: str, value: Any) -> None:
    if value is not _MISSING:
        setattr(owner, name, value)
    elif _value(owner, name) is not _MISSING:
        delattr(owner, name)


def _is_cached(value: Any) -> bool:
    return type(value) is _CACHED  # an object of the user may raise anything when it is asked


def _may_change(value: Any) -> bool:
    if isinstance(value, PLAIN) or _is_cached(value):
        return True
    if isinstance(value, (*GENERATORS, ModuleType, type)) or _is_large(value):
        return False
    if hasattr(type(value), '__get__'):  # of a class: methods of any kind, properties, slots
        return False
    # containers, arrays, tensors, and objects of the user
    module = type(value).__module__.partition('.')[0]
    return module in ('builtins', 'collections', 'numpy', 'torch', 'weakref') and (
        not callable(value)) or belongs_to_user(type(value).__module__)


def _copy(value: Any) -> Any:
    """Return a copy; of a cached function, one that has cached nothing."""
    if _is_cached(value):
        return functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
    return value if isinstance(value, PLAIN) else copied(value)


def _is_small(value: Any) -> bool:
    """Whether a value is quick to copy and to compare."""
    if isinstance(value, PLAIN) or _is_cached(value):
        return True
    walk = Walk([('', value)], MAX_IN_VARIABLE)
    for path, thing in walk:
        if not isinstance(thing, PLAIN):
            walk.add(inside(thing, path))
    return len(walk.queue) <= MAX_IN_VARIABLE


def _digest(value: Any) -> str:
    if _is_cached(value):
        return str(value.cache_info().currsize)
    return exact_digest(dict(value) if hasattr(value, 'valuerefs') else value)


def copied(dataset: Any) -> Any | None:
    """Return a copy of a dataset and its transforms; None where something cannot be copied.

    Annotations and modules are not copied.
    """
    copies: dict[int, Any] = {}  # by id of the original; a shared object is its own copy
    walk = Walk([('', dataset)], MAX_OBJECTS)
    for path, thing in walk:
        if isinstance(thing, nn.Module) or _is_large(thing):
            copies[id(thing)] = thing
        else:
            walk.add(inside(thing, path))
    try:
        duplicate = copy.deepcopy(dataset, copies)
    except Exception:  # an open file, a lock, a database: whatever a dataset holds
        return None
    for key, part in list(copies.items()):
        for name, value in list(getattr(part, '__dict__', {}).items()) if key != id(part) else ():
            if isinstance(value, weakref.ref) and id(value()) in copies:
                # mmcv's cache_randomness refers to its transform in this way
                setattr(part, name, weakref.ref(copies[id(value())]))
    return duplicate


def _is_large(thing: Any) -> bool:
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return thing.nbytes > MAX_BYTES
    return isinstance(thing, (list, dict, set)) and len(thing) > MAX_ITEMS
