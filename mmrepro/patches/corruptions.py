"""The ``imagecorruptions`` package: two corruptions draw from unseeded generators."""
from __future__ import annotations

import functools
import inspect
import sys
from contextlib import contextmanager, nullcontext
from typing import Callable, Iterator

import numpy as np

from .wrapping import around

__all__ = ['seeded_from_sample']


@contextmanager
def _seeded_random_noise() -> Iterator[None]:
    # scikit-image calls the argument `rng` since 0.21, `seed` before
    import skimage.util
    stock = skimage.util.random_noise
    name = 'rng' if 'rng' in inspect.signature(stock).parameters else 'seed'
    skimage.util.random_noise = functools.partial(stock, **{name: _draw_seed()})
    try:
        yield
    finally:
        skimage.util.random_noise = stock


@contextmanager
def _seeded_numba() -> Iterator[None]:
    # The released package shuffles with NumPy, its development version with compiled code.
    if 'numba' in sys.modules:
        _numba_seeder()(_draw_seed())
    yield


# corruption: what makes its foreign generator a function of the global NumPy generator
_FOREIGN = {
    'impulse_noise': _seeded_random_noise,  # skimage.util.random_noise: default_rng(None)
    'glass_blur': _seeded_numba,  # np.random inside njit is a generator of Numba's own
}


@around
def seeded_from_sample(stock, self, results: dict) -> dict:
    """Corrupt with foreign generators seeded from the global NumPy generator."""
    with _FOREIGN.get(self.corruption, nullcontext)():
        return stock(self, results)


def _draw_seed() -> int:
    return int(np.random.randint(0, 2**32, dtype=np.uint64))


@functools.cache
def _numba_seeder() -> Callable[[int], None]:
    import numba

    @numba.njit
    def seed(value):
        np.random.seed(value)

    return seed
