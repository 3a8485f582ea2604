"""Generators that datasets, transforms and samplers keep for themselves.

They are found through attributes, and start a stream wherever the global generators start one.
"""
from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

from .. import seeds
from ..errors import RandomnessError
from ..objects.generators import GENERATORS, kind_of, read_state, restore_state
from ..objects.walks import PLAIN, Named, Walk, direct_references, indirect_references
from ..util.libraries import belongs_to_user

Generators = dict[str, Any]  # path -> generator

MAX_OBJECTS = 10000  # visited; the nearest ones first
# values that hold nothing; modules and classes hold what belongs to others
_LEAVES = (*PLAIN, np.ndarray, torch.Tensor, type, types.ModuleType, torch.device, torch.dtype)


def _is_global(generator: Any) -> bool:
    """Whether a generator is a global one, which every stream seeds anyway."""
    numpy_generator = np.random.mtrand._rand
    return any(generator is known for known in (
        random._inst, torch.default_generator, numpy_generator, numpy_generator._bit_generator))


def _is_data(thing: Any) -> bool:
    return not isinstance(thing, (list, tuple, dict, deque)) and \
        hasattr(type(thing), '__getitem__') and hasattr(type(thing), '__len__')


def find(thing: Any, name: str, data: bool = True) -> Generators:
    """Return the generators that ``thing`` reaches through attributes, containers, closures and the
    globals that its methods use.

    Args:
        name: of the thing, where a path begins.
        data: look into datasets that the thing holds.

    Raises:
        RandomnessError: a generator cannot be seeded.
    """
    if isinstance(thing, _LEAVES):
        return {}
    generators: Generators = {}
    walk = Walk([(name, thing)], MAX_OBJECTS)

    def look(things: Iterable[Named], late: bool = False) -> None:
        """Keep generators, and queue objects that may hold some.

        If ``late``, classes count too, and a generator that cannot be seeded is passed over. Code
        that no sample runs may name it; where a sample draws from it, the check of samples says so.
        """
        for path, value in things:
            if isinstance(value, _LEAVES) and not (
                    late and isinstance(value, type) and belongs_to_user(value.__module__)):
                continue
            if not isinstance(value, GENERATORS):
                if data or not _is_data(value):
                    walk.add([(path, value)])
            elif walk.is_new(value) and not _is_global(value):
                with suppress(RandomnessError) if late else nullcontext():
                    _check_seedable(path, value)
                    while path in generators:  # an attribute of a class and of its base
                        path += "'"
                    generators[path] = value

    for path, obj in walk:
        look(direct_references(obj, path))
    # Paths are part of the keys of streams, so the order of the two is fixed: a generator has the
    # path by which `direct_references` reaches it, and `indirect_references` adds others.
    del walk.queue[MAX_OBJECTS:]
    already_inside = len(walk.queue)
    for number, (path, obj) in enumerate(walk):
        look(indirect_references(obj, path), late=True)
        if number >= already_inside:
            look(direct_references(obj, path), late=True)
    return generators


def _check_seedable(path: str, generator: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        raise RandomnessError(
            f'{path} is a random.SystemRandom, whose numbers come from the operating system and '
            'cannot be repeated; use random.Random')
    kind = kind_of(generator)
    state = kind.read(generator)
    try:
        kind.seed(generator, seeds.derive(0, 'sample'))
    except (TypeError, ValueError, AttributeError) as error:
        raise RandomnessError(f'{path} is a {type(generator).__name__} that cannot be seeded '
                              f'({error}); use numpy.random.default_rng(), or the global '
                              'generators, which mmrepro seeds for every sample') from error
    kind.restore(generator, state)


def begin_stream(generators: Generators, root: seeds.Root, stream: str, *key: seeds.Key) -> None:
    """Put the global generators at the start of a stream, and each of ``generators`` too."""
    seeds.seed_all(root, stream, *key)
    for path, generator in generators.items():
        kind_of(generator).seed(generator, seeds.derive(root, stream, *key, 'generator', path))


@contextmanager
def isolated(generators: Generators) -> Iterator[None]:
    """Leave the generators as they were, whatever the block draws or raises."""
    before = [(generator, read_state(generator)) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in before:
            restore_state(generator, state)
