"""Walks over nested data, over registries, and over the objects that an object reaches.

Nested data are tensors in tuples, lists, dicts, MMEngine's data elements and MMDetection's boxes,
and dicts in configs. An object reaches others by attributes, items, closures and the globals that
its functions name; a walk that looks for random generators finds how to seed and restore each class
of them here. Paths are the same in all processes of a run: those of generators are part of their
streams' keys.
"""
from __future__ import annotations

import functools
import itertools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Callable, NamedTuple

import mmengine.registry
import numpy as np
import torch
from mmengine.registry import Registry

from ..util.libraries import belongs_to_user, holds_process_state


def named_tensors(value: Any, name: str = '') -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor, in the order of the data; other leaves are left out.

    >>> [path for path, _ in named_tensors({'a': [torch.ones(1), 2], 'b': torch.ones(1)})]
    ['a.0', 'b']
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(getattr(value, 'tensor', None), torch.Tensor):  # MMDetection's boxes
        yield name, value.tensor
    else:
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, dict):
            items = value.items()
        elif has_attribute(value, 'all_items'):  # mmengine.structures.BaseDataElement
            items = sorted(value.all_items())  # the names are in a set
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            return
        for key, item in items:
            yield from named_tensors(item, f'{name}.{key}' if name else str(key))


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, in order."""
    return [tensor for _, tensor in named_tensors(value)]


def named_dicts(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the path and the dict of every dict in ``value``, outermost first.

    >>> [path for path, _ in named_dicts({'a': [{}, {'b': {}}]})]
    ['', 'a[0]', 'a[1]', 'a[1].b']
    """
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        yield name, value  # may be changed before the walk goes on
        items = [(f'{name}.{key}' if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f'{name}[{index}]', item) for index, item in enumerate(value)]
    for path, item in items:
        yield from named_dicts(item, path)


def dicts(value: Any) -> Iterator[Any]:
    """Yield the dicts in ``value``, as :func:`named_dicts` does."""
    return (content for _, content in named_dicts(value))


def registries(root: Registry) -> Iterator[Registry]:
    """Yield a registry of MMEngine, and those of other packages below it."""
    yield root
    for child in root.children.values():
        yield from registries(child)


def root_registries() -> dict[str, Registry]:
    """Return MMEngine's own registries, by their names in ``mmengine.registry``."""
    return {name: value for name, value in vars(mmengine.registry).items()
            if isinstance(value, Registry)}


class GeneratorKind(NamedTuple):
    """The functions that change one class of generators in place."""
    cls: type
    seed: Callable[[Any, Any], Any]  # takes the :class:`mmrepro.seeds.Seeds` of a stream
    read: Callable[[Any], Any]
    restore: Callable[[Any, Any], Any]  # takes a state that ``read`` returned


def _seed_bits(generator: Any, seeds: Any) -> None:
    bits = getattr(generator, 'bit_generator', generator)
    bits.state = type(bits)(list(seeds.numpy)).state


def _restore_bits(generator: Any, state: Any) -> None:
    getattr(generator, 'bit_generator', generator).state = state


KINDS = (
    GeneratorKind(random.SystemRandom, lambda g, seeds: None, lambda g: None,
                  lambda g, state: None),
    GeneratorKind(torch.Generator, lambda g, seeds: g.manual_seed(seeds.torch),
                  lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    GeneratorKind(np.random.Generator, _seed_bits, lambda g: g.bit_generator.state, _restore_bits),
    GeneratorKind(np.random.BitGenerator, _seed_bits, lambda g: g.state, _restore_bits),
    GeneratorKind(np.random.RandomState, lambda g, seeds: g.seed(list(seeds.numpy)),
                  lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)),
    GeneratorKind(random.Random, lambda g, seeds: g.seed(seeds.python),
                  lambda g: g.getstate(), lambda g, state: g.setstate(state)),
)
GENERATORS = tuple(kind.cls for kind in KINDS)


def kind_of(generator: Any) -> GeneratorKind:
    """Return the row of :data:`KINDS` for a generator."""
    return next(kind for kind in KINDS if isinstance(generator, kind.cls))


def read_state(generator: Any) -> Any:
    """Return the state of a generator, for :func:`restore_state`."""
    return kind_of(generator).read(generator)


def restore_state(generator: Any, state: Any) -> None:
    """Put a generator back into a state that :func:`read_state` returned."""
    kind_of(generator).restore(generator, state)


MAX_ITEMS = 64  # of a list or dict: longer ones are annotations
CONTAINERS = (dict, list, tuple, deque)
PLAIN = (bool, int, float, complex, str, bytes, type(None))  # values that hold nothing
Named = tuple[str, Any]  # path, object


class Walk:
    """A walk over objects, breadth first, each by the first path that leads to it.

    Args:
        start: tuples of path, object, and whatever else the visitor needs.
        limit: visit so many objects; None: all.
        known: objects that are not visited.
    """

    def __init__(self, start: Iterable[tuple[Any, ...]] = (), limit: int | None = None,
                 known: Iterable[Any] = ()) -> None:
        # the objects are kept: a freed one would lend its id to another
        self._seen = {id(obj): obj for obj in known}
        self.queue: list[tuple[Any, ...]] = []  # visited objects stay in the queue
        self._limit = limit
        self.add(start)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Visit the whole queue, and what is added to it meanwhile."""
        return itertools.islice(self.queue, self._limit)

    def is_new(self, obj: Any) -> bool:
        """Whether this is the first time that the object is met."""
        if id(obj) in self._seen:
            return False
        self._seen[id(obj)] = obj
        return True

    def add(self, things: Iterable[tuple[Any, ...]]) -> None:
        """Visit new objects later."""
        self.queue.extend(thing for thing in things if self.is_new(thing[1]))


def items(content: Any, path: str, attributes: bool = False) -> list[Named]:
    """Name the items of a container, or the attributes of an object in a mapping.

    >>> items({'a': 1}, 'x'), items([2], 'x'), items({'a': 1}, 'x', attributes=True)
    ([("x['a']", 1)], [('x[0]', 2)], [('x.a', 1)])

    A key that is an object, such as a parameter in the state of an optimizer, is named by its
    class and place: its text may be long, and reads a GPU.

    >>> items({torch.zeros(9): 1}, 'x')
    [('x[Tensor 0]', 1)]
    """
    parts = enumerate(keys_and_values(content))
    if not isinstance(content, Mapping):
        named = [(f'{path}[{i}]', value) for i, (_, value) in parts]
    elif attributes:
        named = [(f'{path}.{key}', value) for _, (key, value) in parts]
    else:
        named = [(f'{path}[{_key_text(key, i)}]', value) for i, (key, value) in parts]
    return [(name, value) for name, value in named if has_class(value)]


def keys_and_values(content: Any) -> Iterable[tuple[Any, Any]]:
    """Return the items of a mapping, or the numbered ones of another container.

    Methods of a subclass are not called: they may load files, as those of a lazy cache.
    """
    mappings: tuple[Any, ...] = (OrderedDict, dict)  # the first has an order of its own
    for base in mappings:
        if isinstance(content, base):
            items: Iterable[tuple[Any, Any]] = base.items(content)
            return items
    sequences: tuple[Any, ...] = (list, tuple, deque, set)
    for base in sequences:
        if isinstance(content, base):
            return enumerate(base.__iter__(content))
    return content.items() if isinstance(content, Mapping) else enumerate(content)


def has_class(value: Any) -> bool:
    """Whether isinstance() can ask for a value's class: not of a proxy whose object is gone."""
    try:
        return value.__class__ is not None
    except Exception:  # whatever a proxy of the user's raises
        return False


def _key_text(key: Any, number: int) -> str:
    plain = isinstance(key, PLAIN) or isinstance(key, tuple) and all(
        isinstance(part, PLAIN) for part in key)
    return repr(key) if plain else f'{type(key).__name__} {number}'


@functools.lru_cache(maxsize=1 << 14)
def _slots(cls: Any) -> tuple[str, ...]:
    slots = (vars(base).get('__slots__', ()) for base in cls.__mro__)
    names = (name for given in slots for name in ((given, ) if isinstance(given, str) else given))
    return tuple(name for name in names if name not in ('__dict__', '__weakref__'))


def slot_names(obj: Any) -> tuple[str, ...]:
    """Return the names of the attributes that objects of this class keep in slots."""
    cls: Any = type(obj)
    return _slots(cls)


def in_slots(obj: Any) -> dict[str, Any]:
    """Return the attributes that an object has in slots."""
    return {name: getattr(obj, name) for name in slot_names(obj) if has_attribute(obj, name)}


def attributes(obj: Any) -> dict[str, Any]:
    """Return the attributes of an object, in slots or not."""
    return {**in_slots(obj), **(obj.__dict__ if has_attribute(obj, '__dict__') else {})}


def has_attribute(obj: Any, name: str) -> bool:
    """Whether an object has an attribute; a proxy of the user's may raise any error when asked."""
    try:
        return hasattr(obj, name)
    except Exception:
        return False


def is_stateful(obj: Any) -> bool:
    """Whether an object may hold state of the training in its attributes.

    Modules and classes do not count: they are looked at by themselves.
    """
    return (has_attribute(obj, '__dict__') or bool(slot_names(obj))) and not (
        isinstance(obj, (type, torch.nn.Module)) or has_attribute(type(obj), '__get__')
        or holds_process_state(type(obj).__module__))


def _module(name: Any) -> str:
    # the script that was started: a spawned worker imports it by the second name
    return '__main__' if name == '__mp_main__' else str(name)


@functools.lru_cache(maxsize=1 << 14)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names in the code of a function and of those defined in it."""
    codes = [code]
    names: dict[str, None] = {}
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        names.update(dict.fromkeys(code.co_names))
    return tuple(names)


@functools.lru_cache(maxsize=1 << 14)
def _is_class_of_generators(cls: Any) -> bool:
    # isinstance() runs Python code of torch.Generator, and most values are no generators
    return issubclass(cls, GENERATORS)


def _is_generator(value: Any) -> bool:
    cls: Any = type(value)
    return _is_class_of_generators(cls)


def _used_globals(function: types.FunctionType) -> Iterator[Named]:
    """Yield the generators, and functions of the same module, that a function names."""
    for name in names_in(function.__code__):
        value = function.__globals__.get(name)
        if _is_generator(value) or (
                isinstance(value, types.FunctionType)
                and value.__globals__ is function.__globals__):
            yield f'{_module(function.__module__)}:{name}', value


def named_globals(function: types.FunctionType) -> dict[str, Any]:
    """Return all globals that a function names, and what it names in modules of the user."""
    names = names_in(function.__code__)
    values: dict[str, Any] = {}
    waiting = deque([(_module(function.__module__), function.__globals__)])
    looked_at = {id(function.__globals__)}
    while waiting:
        module, namespace = waiting.popleft()
        for name in names:
            value = namespace.get(name)
            if isinstance(value, types.ModuleType):
                if belongs_to_user(value.__name__) and id(vars(value)) not in looked_at:
                    looked_at.add(id(vars(value)))
                    waiting.append((_module(value.__name__), vars(value)))
            elif name in namespace:
                values[f'{module}:{name}'] = value
    return values


def _inside_function(function: types.FunctionType, path: str) -> Iterator[Named]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # a name that is not bound
            yield f'{path}.{name}', cell.cell_contents
    yield from ((f'{path}.default{i}', value)
                for i, value in enumerate(function.__defaults__ or ()))
    yield from _used_globals(function)


def _inside_object(thing: Any, path: str) -> Iterator[Named]:
    yield from _named(thing, path)
    for cls in type(thing).__mro__[:-1]:
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType):
                # by its namespace: functools.wraps copies the name of another module
                if belongs_to_user(value.__globals__.get('__name__', '')):
                    yield from _used_globals(value)
            elif _is_generator(value):
                yield f'{path}.{name}', value


def direct_references(thing: Any, path: str) -> Iterable[Named]:
    """Return the values that a thing holds, each with its path."""
    if isinstance(thing, types.FunctionType):
        return _inside_function(thing, path)
    if isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        return [(path, thing.__self__), (path, getattr(thing, '__func__', None))]
    if isinstance(thing, functools.partial):
        return [(path, thing.func), (f'{path}.args', thing.args),
                (f'{path}.keywords', thing.keywords)]
    if isinstance(thing, CONTAINERS):
        return items(thing, path) if len(thing) <= MAX_ITEMS else ()
    return _inside_object(thing, path) if has_attribute(thing, '__dict__') else ()


def indirect_references(thing: Any, path: str) -> Iterator[Named]:
    """Yield values that a thing reaches beside those that it holds: through decorators, methods of
    any kind, slots, class attributes, and names of its functions in other modules of the user.
    """
    if isinstance(thing, types.FunctionType):
        yield from items(vars(thing), path, attributes=True)
        yield from items(thing.__kwdefaults__ or {}, path, attributes=True)
        yield from (named for named in named_globals(thing).items() if _can_hold(named[1]))
    elif isinstance(thing, (staticmethod, classmethod)):
        yield path, thing.__func__
    elif isinstance(thing, property):
        yield from ((path, method) for method in (thing.fget, thing.fset, thing.fdel) if method)
    elif isinstance(thing, type):
        yield from _class_attributes(thing, path)
    elif not isinstance(thing, CONTAINERS):
        yield from items(in_slots(thing), path, attributes=True)
        for cls in type(thing).__mro__[:-1]:
            yield from _class_attributes(cls, path)


def _class_attributes(cls: type, path: str) -> list[Named]:
    return _named(cls, path) if belongs_to_user(cls.__module__) else []


def _named(owner: Any, path: str) -> list[Named]:
    """Return the attributes of an object or class, without those that mmrepro has attached."""
    return [(f'{path}.{name}', value) for name, value in vars(owner).items()
            if name not in ('__dict__', '__weakref__') and not name.startswith('_mmrepro_')
            and has_class(value)]


def _can_hold(value: Any) -> bool:
    """Whether a global is, or may hold, a generator of the user."""
    if isinstance(value, (*GENERATORS, *CONTAINERS)) or has_attribute(value, '__wrapped__'):
        return True
    if isinstance(value, (type, types.FunctionType)):
        return belongs_to_user(value.__module__)
    return belongs_to_user(type(value).__module__)
