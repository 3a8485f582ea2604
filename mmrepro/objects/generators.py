"""The classes of random generators: how to seed one, and how to read and restore its state."""
from __future__ import annotations

import random
from typing import Any, Callable, NamedTuple

import numpy as np
import torch


class GeneratorKind(NamedTuple):
    """How to change one class of generators in place."""
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
