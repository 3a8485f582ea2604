"""Generators that datasets, transforms and samplers keep for themselves.

They are found through attributes, and start a stream wherever the global generators start one.
"""
from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from .. import seeds
from ..errors import RandomnessError
from .reachable import GENERATORS, Named, belongs_to_user, hidden, inside

Generators = dict[str, Any]  # where it is -> generator

MAX_OBJECTS = 10000  # looked at; the nearest ones first


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
    skipped = (*_LEAVES, *but)
    if isinstance(thing, skipped):
        return {}
    search = _Search(name, thing, skipped, data)
    for path, one in search.pop():
        search.see(inside(one, path))
    # The paths of those are part of the streams of older versions. What is reached in other ways
    # comes after, so that it does not take another path to them.
    held = search.reached
    search.waiting, search.reached = deque(held), []
    for number, (path, one) in enumerate(search.pop()):
        search.see(hidden(one, path), late=True)
        if number >= len(held):
            search.see(inside(one, path), late=True)
    return search.found


class _Search:
    """The nearest things first, :data:`MAX_OBJECTS` of them."""

    def __init__(self, name: str, thing: Any, skipped: tuple, data: bool) -> None:
        self.found: Generators = {}
        self.waiting: deque[Named] = deque([(name, thing)])
        self.reached: list[Named] = []
        self._skipped, self._data = skipped, data
        self._seen = {id(thing): thing}  # kept: a freed object would lend its id to another

    def pop(self) -> Iterator[Named]:
        while self.waiting and len(self.reached) < MAX_OBJECTS:
            self.reached.append(self.waiting.popleft())
            yield self.reached[-1]

    def see(self, things: Iterable[Named], late: bool = False) -> None:
        """``late``: classes count too, and a generator that cannot be seeded is passed over. Code
        that no sample runs may name it; where a sample draws from it, the check of samples says so.
        """
        for path, value in things:
            if id(value) in self._seen or (isinstance(value, self._skipped) and not (
                    late and isinstance(value, type) and belongs_to_user(value.__module__))):
                continue
            self._seen[id(value)] = value
            if not isinstance(value, GENERATORS):
                if self._data or not _is_data(value):
                    self.waiting.append((path, value))
            elif not _is_global(value):
                with suppress(RandomnessError) if late else nullcontext():
                    self._keep(path, _seedable(path, value))

    def _keep(self, path: str, generator: Any) -> None:
        while path in self.found:  # an attribute of a class and of its base
            path += "'"
        self.found[path] = generator


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
    before: list[tuple[Any, GeneratorKind, Any]] = []
    for generator in generators.values():
        kind = _kind(generator)
        before.append((generator, kind, kind.get(generator)))
    try:
        yield
    finally:
        for generator, kind, state in before:
            kind.put(generator, state)
