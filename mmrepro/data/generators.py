"""Generators that datasets, transforms and samplers keep for themselves.

They are found through attributes, and start a stream wherever the global generators start one.
"""
from __future__ import annotations

import functools
import random
import types
from collections import deque
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Tuple

import numpy as np
import torch

from .. import seeds
from ..config import RandomnessError

__all__ = ['GENERATORS', 'Generators', 'find', 'isolated', 'read_state', 'reseed', 'write_state']

Generators = Dict[str, Any]  # where it is -> generator

MAX_OBJECTS = 10000  # looked at; the nearest ones first
MAX_ITEMS = 64  # of a list or dict: longer ones are annotations


class GeneratorKind(NamedTuple):
    """How to seed, read and write one kind of generator in place."""
    cls: type
    seed: Callable[[Any, seeds.Seeds], Any]
    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def _seed_bits(generator: Any, given: seeds.Seeds) -> None:
    bits = getattr(generator, 'bit_generator', generator)
    bits.state = type(bits)(list(given.numpy)).state


def _put_bits(generator: Any, state: Any) -> None:
    getattr(generator, 'bit_generator', generator).state = state


_KINDS = (
    GeneratorKind(torch.Generator, lambda g, given: g.manual_seed(given.torch),
         lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    GeneratorKind(np.random.Generator, _seed_bits, lambda g: g.bit_generator.state, _put_bits),
    GeneratorKind(np.random.BitGenerator, _seed_bits, lambda g: g.state, _put_bits),
    GeneratorKind(np.random.RandomState, lambda g, given: g.seed(list(given.numpy)),
         lambda g: g.get_state(legacy=False), lambda g, state: g.set_state(state)),
    GeneratorKind(random.Random, lambda g, given: g.seed(given.python),
         lambda g: g.getstate(), lambda g, state: g.setstate(state)),
)
GENERATORS = tuple(kind.cls for kind in _KINDS)

# values that hold nothing; modules and classes hold what belongs to others
_LEAVES = (str, bytes, int, float, complex, bool, type(None), np.ndarray, torch.Tensor, type,
           types.ModuleType, torch.device, torch.dtype)


def _kind(generator: Any) -> GeneratorKind:
    return next(kind for kind in _KINDS if isinstance(generator, kind.cls))


def _is_global(generator: Any) -> bool:
    """These are seeded anyway."""
    numpy_generator = np.random.mtrand._rand
    return any(generator is one for one in (
        random._inst, torch.default_generator, numpy_generator, numpy_generator._bit_generator))


def _used_globals(function: types.FunctionType) -> Iterator[Tuple[str, Any]]:
    """Generators, and functions of the same module, that a function names."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        for name in code.co_names:
            value = function.__globals__.get(name)
            own = isinstance(value, types.FunctionType) and \
                value.__globals__ is function.__globals__
            if own or isinstance(value, GENERATORS):
                yield f'{function.__module__}:{name}', value


def _inside_function(function: types.FunctionType, path: str) -> Iterator[Tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            yield f'{path}.{name}', cell.cell_contents
        except ValueError:  # a name that was never bound
            continue
    yield from ((f'{path}.default{i}', value)
                for i, value in enumerate(function.__defaults__ or ()))
    yield from _used_globals(function)


def _inside_object(thing: Any, path: str) -> Iterator[Tuple[str, Any]]:
    for name, value in vars(thing).items():
        yield f'{path}.{name}', value
    for cls in type(thing).__mro__[:-1]:
        for name, value in vars(cls).items():
            if isinstance(value, GENERATORS):
                yield f'{path}.{name}', value
            elif isinstance(value, types.FunctionType):
                yield from _used_globals(value)


def _inside(thing: Any, path: str) -> Iterable[Tuple[str, Any]]:
    """(path, value) of what a thing holds."""
    if isinstance(thing, types.FunctionType):
        return _inside_function(thing, path)
    if isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        return [(path, thing.__self__), (path, getattr(thing, '__func__', None))]
    if isinstance(thing, functools.partial):
        return [(path, thing.func), (f'{path}.args', thing.args),
                (f'{path}.keywords', thing.keywords)]
    if isinstance(thing, dict):
        return [(f'{path}[{key!r}]', value) for key, value in thing.items()] \
            if len(thing) <= MAX_ITEMS else ()
    if isinstance(thing, (list, tuple, deque)):
        return [(f'{path}[{i}]', value) for i, value in enumerate(thing)] \
            if len(thing) <= MAX_ITEMS else ()
    return _inside_object(thing, path) if hasattr(thing, '__dict__') else ()


def _is_data(thing: Any) -> bool:
    return not isinstance(thing, (list, tuple, dict, deque)) and \
        hasattr(type(thing), '__getitem__') and hasattr(type(thing), '__len__')


def find(thing: Any, name: str, but: tuple = (), data: bool = True) -> Generators:
    """The generators that ``thing`` reaches through attributes, containers, closures and the
    globals that its methods use.

    Args:
        name: of the thing, where a path begins.
        but: classes to skip.
        data: look into datasets that the thing holds.

    Raises:
        RandomnessError: for one that cannot be seeded.
    """
    found: Generators = {}
    skipped = (*_LEAVES, *but)
    if isinstance(thing, skipped):
        return found
    queue, seen = deque([(name, thing)]), {id(thing): thing}
    for _ in range(MAX_OBJECTS):
        if not queue:
            break
        path, one = queue.popleft()
        for inner, value in _inside(one, path):
            if id(value) in seen or isinstance(value, skipped):
                continue
            seen[id(value)] = value  # kept: a freed object would lend its id to another
            if isinstance(value, GENERATORS):
                if not _is_global(value):
                    found[inner] = _seedable(inner, value)
            elif data or not _is_data(value):
                queue.append((inner, value))
    return found


def _seedable(path: str, generator: Any) -> Any:
    if isinstance(generator, random.SystemRandom):
        raise RandomnessError(
            f'{path} is a random.SystemRandom, whose numbers come from the operating system and '
            'cannot be repeated; use random.Random')
    kind = _kind(generator)
    state = kind.get(generator)
    try:
        kind.seed(generator, seeds.derive(0, 'sample'))
    except (TypeError, ValueError, AttributeError) as error:
        raise RandomnessError(f'{path} is a {type(generator).__name__} that cannot be seeded '
                              f'({error}); use numpy.random.default_rng(), or the global '
                              'generators, which mmrepro seeds for every sample') from error
    kind.put(generator, state)
    return generator


def reseed(generators: Generators, root: int, stream: str, *key: seeds.Key) -> None:
    """Put each at the start of a stream of its own, by its path."""
    for path, generator in generators.items():
        _kind(generator).seed(generator,
                              seeds.derive(root, stream, *key, 'generator', path))


def read_state(generator: Any) -> Any:
    """The state of a generator, for :func:`write_state`."""
    return _kind(generator).get(generator)


def write_state(generator: Any, state: Any) -> None:
    """Put a generator back to where :func:`read_state` saw it."""
    _kind(generator).put(generator, state)


@contextmanager
def isolated(generators: Generators) -> Iterator[None]:
    """Leave the generators as they were, whatever the block draws or raises."""
    before: List[Tuple[Any, GeneratorKind, Any]] = []
    for generator in generators.values():
        kind = _kind(generator)
        before.append((generator, kind, kind.get(generator)))
    try:
        yield
    finally:
        for generator, kind, state in before:
            kind.put(generator, state)
