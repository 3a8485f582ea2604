"""Detect changes of a dataset, or of another object.

Workers load from the dataset as it was when they started; the main process would load from the
dataset as it is. So a change has to end the workers, or the number of workers would matter.

Python's garbage collector lists everything that an object holds: attributes, slots, items,
closures, arguments of a partial. The list needs no user code, so the walk cannot fail. Also
compared are the memory of arrays and tensors, and the globals that functions of the user name.
"""
from __future__ import annotations

import collections.abc
import gc
import logging
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copyreg import _slotnames  # type: ignore[attr-defined]
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ..objects.digests import as_bytes, shared_array, state_digest
from ..objects.walks import GENERATORS, PLAIN, in_slots, names_in, read_state
from ..util.libraries import belongs_to_user


class _Limits(NamedTuple):
    """Limits of the comparison; larger containers and arrays are annotations."""
    references: int
    bytes: int  # of an array
    all_bytes: int


# about 0.5 ms before a batch, 20 ms before a pass
BATCH = _Limits(20_000, 1 << 18, 1 << 20)
PASS = _Limits(200_000, 1 << 26, 1 << 26)
MANY = 256  # a container with more items is looked into after everything else
MAX_COPIED = 1 << 18  # bytes; of larger arrays a checksum is kept

# Objects that hold nothing of a dataset, or the state of the process. The last one is the cache of
# isinstance().
_PROCESS = (types.ModuleType, types.CodeType, types.FrameType, logging.Filterer, weakref.ref,
            np.generic, torch.device, torch.dtype, type(vars(collections.abc.Sized)['_abc_impl']))
_SEQUENCES = (list, tuple, deque)
_KINDS = (dict, type, torch.Tensor, np.ndarray, *GENERATORS)  # classes with special ways to read


class State(NamedTuple):
    """A text on the state of memory or of a generator."""
    text: str


class Change(NamedTuple):
    """The path of something that has changed, what it was and what it is; None is no value, too."""
    path: str
    before: Any
    now: Any


class _Part(NamedTuple):
    """An object that can change in place, the number of the part that led to it, and the number of
    objects that it refers to.
    """
    thing: Any
    holder: int | None
    size: int


class _Reading(NamedTuple):
    """The values of a part that are no objects to visit, and the number of the part."""
    number: int | None
    read: Callable[[], Any]
    value: Any


class DatasetSnapshot:
    """The content of a dataset, or of another object, at this moment.

    Args:
        thing: the object.
        name: of the object, with which paths begin.
        limits: :data:`BATCH` or :data:`PASS`.
        apart: objects that are not looked into.
        generators: compare generators as well; those of a dataset are seeded for each sample.
    """

    def __init__(self, thing: Any, name: str = 'dataset', limits: _Limits = BATCH,
                 apart: Sequence[Any] = (), generators: bool = False) -> None:
        self._name, self._limits, self._generators = name, limits, generators
        self._seen = {id(other): other for other in apart}  # kept alive: ids are used again
        self._room = limits.all_bytes
        self._parts: list[_Part] = []
        self._readings: list[_Reading] = []
        self._walk(thing)
        dicts = [issubclass(type(part.thing), dict) for part in self._parts]
        self._dict_numbers = [number for number, is_dict in enumerate(dicts) if is_dict]
        self._numbers = [number for number, is_dict in enumerate(dicts) if not is_dict]
        self._dicts = [self._parts[number].thing for number in self._dict_numbers]
        self._objects = [self._parts[number].thing for number in self._numbers]
        self._copies = [*map(dict.copy, self._dicts)]
        self._held = gc.get_referents(*self._objects)

    # --------------------------------------------------------------------- what it holds

    def _walk(self, thing: Any) -> None:
        """Visit the objects that an object holds, breadth first, items of large containers last."""
        waiting: deque[tuple[Any, int | None]] = deque([(thing, None)])
        large: list[tuple[int, Any, int | None]] = []
        room = self._limits.references
        names: dict[int, tuple[int, Any, set[str]]] = {}
        while waiting or large:
            if not waiting:
                large.sort(key=lambda entry: -entry[0])
                size, thing, holder = large.pop()
            else:
                thing, holder = waiting.popleft()
                if id(thing) in self._seen or self._is_left_out(thing):
                    continue
                self._seen[id(thing)] = thing
                _attributes(thing)  # CPython makes the dict of an object when it is asked for it
                cls: Any = type(thing)
                if _kind(cls) is type:
                    _slotnames(thing)  # the first pickle of an object caches them in its class
                size = len(thing) if _kind(cls) is dict else len(gc.get_referents(thing))
                if size > MANY:
                    large.append((size, thing, holder))
                    continue
            if size > room:  # annotations
                with suppress(TypeError):
                    self._readings.append(_Reading(holder, partial(len, thing), len(thing)))
                continue
            room -= size
            number = len(self._parts)
            self._parts.append(_Part(thing, holder, size))
            self._read(number, thing, names)
            held = _held(thing)
            if size <= MANY or len(gc.get_referents(*held)) <= room:
                waiting.extend((value, number) for value in held)
        for number, function, used in names.values():
            read = partial(_globals, function, sorted(used))
            self._readings.append(_Reading(number, read, read()))

    def _is_left_out(self, thing: Any) -> bool:
        cls: Any = type(thing)
        if _is_process(cls):
            return True
        kind = _kind(cls)
        if kind is type:
            return not belongs_to_user(thing.__module__)
        return kind in GENERATORS and not self._generators

    def _read(self, number: int, thing: Any, names: dict[int, Any]) -> None:
        """Read the values of a part that are no objects to visit."""
        cls: Any = type(thing)
        kind = _kind(cls)
        if _is_users_function(thing):
            _, _, used = names.setdefault(id(thing.__globals__), (number, thing, set()))
            used.update(names_in(thing.__code__))
        elif kind in GENERATORS:
            self._readings.append(_Reading(number, partial(_state, thing), _state(thing)))
        elif kind is torch.Tensor:
            read = partial(_tensor, thing, self._fits(_size(thing)))
            with suppress(RuntimeError):  # tensors of inference have no version
                self._readings.append(_Reading(number, read, read()))
        elif kind in (None, np.ndarray):
            size, read_memory = _memory(thing)
            if read_memory is not None and self._fits(size):
                self._readings.append(_Reading(number, read_memory, read_memory()))

    def _fits(self, size: int | None) -> bool:
        """Whether memory of this size is compared."""
        if size is None or size > min(self._limits.bytes, self._room):
            return False
        self._room -= size
        return True

    # ------------------------------------------------------------------ what has changed

    def change(self) -> str | None:
        """Return the path of something that has changed, or None."""
        try:
            same = (gc.get_referents(*self._objects) == self._held
                    and all(map(dict.__eq__, self._dicts, self._copies))
                    and all(reading.read() == reading.value for reading in self._readings))
        except Exception:  # objects of the user were replaced, and compare as they like
            same = False
        return None if same else next((change.path for change in self.changes()), None)

    def changes(self) -> Iterator[Change]:
        """Yield the changes."""
        for number, thing, before in zip(self._dict_numbers, self._dicts, self._copies):
            if not _equal(before, thing):
                yield from self._changes_in_dict(number, before, thing)
        end = 0
        for number, thing in zip(self._numbers, self._objects):
            begin, end = end, end + self._parts[number].size
            held, now_held = self._held[begin:end], gc.get_referents(thing)
            if not _equal(held, now_held):
                yield from self._changes_in_object(number, thing, held, now_held)
        for reading in self._readings:
            value, now_read = reading.value, reading.read()
            if isinstance(value, dict):  # globals, by their paths
                yield from (Change(*found) for found in _differing(value, now_read))
            elif not _equal(value, now_read):
                yield Change(self._path(reading.number), *map(_described, (value, now_read)))

    def _changes_in_dict(self, number: int, before: dict[Any, Any], now: dict[Any, Any]
                         ) -> Iterator[Change]:
        path, is_namespace = self._path(number), self._is_namespace(number)
        if not is_namespace and len(before) != len(now):
            yield Change(path, before, now)
            return
        for key, *values in _differing(before, now):
            yield Change(f'{path}.{key}' if is_namespace else f'{path}[{key!r}]', *values)

    def _changes_in_object(self, number: int, thing: Any, before: list[Any], now: list[Any]
                           ) -> Iterator[Change]:
        path = self._path(number)
        if len(before) != len(now) and type(thing) is not types.CellType:
            sizes = (State(f'{type(thing).__name__} of {len(held)}') for held in (before, now))
            yield Change(path, *sizes)
            return
        names = {id(value): f'.{name}' for name, value in _items(thing)}
        if type(thing) in (list, tuple):  # their last item is visited first
            before, now = before[::-1], now[::-1]
        for index, *values in _differing(dict(enumerate(before)), dict(enumerate(now))):
            part = f'[{index}]' if type(thing) in _SEQUENCES else names.get(id(values[1]), '')
            yield Change(f'{path}{part}', *values)

    # ------------------------------------------------------------------------------ paths

    def _is_namespace(self, number: int) -> bool:
        thing, holder, _ = self._parts[number]
        if holder is None or type(thing) is not dict:
            return False
        owner = self._parts[holder].thing
        return issubclass(type(owner), type) or thing is _attributes(owner)

    def _path(self, number: int | None) -> str:
        if number is None:
            return self._name
        thing, holder, _ = self._parts[number]
        if holder is None:
            return self._name
        if issubclass(type(thing), type):
            return str(thing.__qualname__)
        owner = self._parts[holder].thing
        if type(owner) is types.FunctionType:
            for path, value in _globals(owner, names_in(owner.__code__)).items():
                if value is thing:
                    return path
        path = self._path(holder)
        if self._is_namespace(number):
            return path
        if type(thing) is types.CellType:
            return f'{path.rpartition(".")[0]}.{self._variable(thing, holder)}'
        is_namespace = self._is_namespace(holder)
        for key, value in _items(owner):
            if value is thing:
                return f'{path}.{key}' if is_namespace or not issubclass(
                    type(owner), (dict, *_SEQUENCES)) else f'{path}[{key!r}]'
        return path

    def _variable(self, cell: Any, holder: int) -> str:
        """Return the name of the variable of an enclosing function that a cell holds."""
        function = self._parts[self._parts[holder].holder or 0].thing
        names = getattr(getattr(function, '__code__', None), 'co_freevars', ())
        return next((name for name, other in zip(names, self._parts[holder].thing)
                     if other is cell), 'cell')


# ----------------------------------------------------------------------------------------- objects


@lru_cache(maxsize=1 << 14)
def _is_process(cls: Any) -> bool:
    return cls in PLAIN or issubclass(cls, _PROCESS)


@lru_cache(maxsize=1 << 14)
def _kind(cls: Any) -> Any:
    """Return the class among :data:`_KINDS` that a class is derived from, or None."""
    return next((kind for kind in _KINDS if issubclass(cls, kind)), None)


def _is_users_function(thing: Any) -> bool:
    return type(thing) is types.FunctionType and belongs_to_user(
        thing.__globals__.get('__name__') or '')


def _attributes(thing: Any) -> Any:
    """Return the dict of an object's attributes, or None."""
    if issubclass(type(thing), type):
        return None
    try:
        return object.__getattribute__(thing, '__dict__')
    except Exception:  # a proxy may compute it
        return None


def _held(thing: Any) -> list[Any]:
    """Return the objects that an object holds and that can change in place."""
    held = gc.get_referents(thing)
    if type(thing) is types.FunctionType:
        others = (thing.__globals__, getattr(thing, '__builtins__', None))
        held = [value for value in held if not any(value is other for other in others)]
        if _is_users_function(thing):
            held += _globals(thing, names_in(thing.__code__)).values()
    elif issubclass(type(thing), np.ndarray) and thing.dtype.hasobject:
        held += thing.ravel().tolist()
    else:
        held.append(_attributes(thing))
    classes: list[Any] = [*map(type, held)]
    return [value for value, cls in zip(held, classes) if not _is_process(cls)]


def _globals(function: types.FunctionType, names: Sequence[str]) -> dict[str, Any]:
    """Return the values of names in the module of a function, and in user modules that it names."""
    namespace = function.__globals__
    found: dict[str, Any] = {}
    for name in names:
        value = namespace.get(name, _globals)
        if type(value) is types.ModuleType:
            if belongs_to_user(value.__name__):
                found.update((f'{value.__name__}:{inner}', vars(value)[inner]) for inner in names
                             if inner in vars(value))
        elif value is not _globals:
            found[f'{function.__module__}:{name}'] = value
    return found


def _items(thing: Any) -> list[tuple[Any, Any]]:
    """Return key or name and value of what an object holds, for a path."""
    cls: Any = type(thing)
    if issubclass(cls, dict):
        return [*dict.items(thing)]
    if issubclass(cls, _SEQUENCES):
        return [*enumerate(thing)]
    if cls is types.FunctionType:
        return [('__defaults__', thing.__defaults__), ('__kwdefaults__', thing.__kwdefaults__),
                ('__closure__', thing.__closure__)]
    return [*(_attributes(thing) or {}).items(), *in_slots(thing).items()]


def _equal(before: Any, now: Any) -> bool:
    try:
        return bool(before == now)
    except Exception:  # arrays have no single truth; objects of the user compare as they like
        return False


def _differing(before: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[Any, Any, Any]]:
    """Yield keys whose values differ, with both values; None stands for no value."""
    for key in (*now, *(key for key in before if key not in now)):
        # in lists, which compare their items by identity first
        if (key in before) != (key in now) or not _equal([before[key]], [now[key]]):
            yield key, before.get(key), now.get(key)


# ------------------------------------------------------------------------------------------ memory


def _size(tensor: torch.Tensor) -> int | None:
    """Return how many bytes a tensor has, or None if they cannot be read."""
    if tensor.device.type != 'cpu' or tensor.layout != torch.strided or tensor.is_quantized:
        return None
    return tensor.numel() * tensor.element_size()


def _tensor(tensor: torch.Tensor, content: bool) -> tuple[int, Any]:
    # NumPy may write to the memory without a new version
    return tensor._version, _kept(shared_array(as_bytes(tensor)).data) if content else None


def _memory(thing: Any) -> tuple[int, Callable[[], Any] | None]:
    """Return how many bytes of memory an object gives access to, and a function that reads them."""
    if issubclass(type(thing), np.ndarray):
        return thing.nbytes, lambda: _kept(thing.tobytes())
    try:
        with memoryview(thing) as view:
            return view.nbytes, partial(_buffer, thing)
    except (TypeError, ValueError, BufferError):
        return 0, None


def _buffer(thing: Any) -> Any:
    with memoryview(thing) as view:
        return _kept(view.tobytes())


def _kept(content: Any) -> Any:
    return zlib.crc32(content) if len(content) > MAX_COPIED else bytes(content)


def _state(generator: Any) -> str:
    return f'a generator in state {state_digest(read_state(generator))[:8]}'


def _described(value: Any) -> State:
    return State(value if isinstance(value, str) else f'memory {state_digest(value)[:8]}')
