"""Generators of other packages follow the global ones; drawing pictures leaves those alone."""
from __future__ import annotations

import functools
import inspect
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any, Callable

import numpy as np

from ..seeds import isolate_rng
from ..util.scoped import replaced
from .replacements import around


@around
def keep_generators(stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the stock function and put the global CPU generators back."""
    with isolate_rng(accelerators=False):
        return stock(*args, **kwargs)


@around
def seeded_pipeline(stock: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a pipeline of albumentations with generators seeded from the global NumPy generator.

    A pipeline that the user seeded keeps its own stream. Before 1.4.21, pipelines draw from
    Python's global generator. ``set_random_seed`` gives all transforms the *same* seed, so that
    they would be applied together or not at all, and newer versions mix the worker's seed in.
    """
    if getattr(self, 'seed', None) is None and hasattr(self, 'set_random_state'):
        words = np.random.randint(0, 2**32, size=8, dtype=np.uint64).tolist()
        numpy_generator = np.random.Generator(np.random.PCG64(words[:4]))
        python_generator = random.Random(sum(word << 32 * i for i, word in enumerate(words[4:])))
        self.set_random_state(numpy_generator, python_generator)
    return stock(self, *args, **kwargs)


def seeded_mixture(stock: ModuleType | None) -> SimpleNamespace | None:
    """Return ``sklearn.mixture`` with a ``GaussianMixture`` that leaves the global generator alone.

    PAA and LAD give the initial means, weights and precisions, so the fit does not depend on the
    seed; older versions of scikit-learn run k-means first all the same, and discard the result.
    MMDetection has None in place of the module where scikit-learn is missing.
    """
    if stock is None:
        return None
    mixture = functools.partial(stock.GaussianMixture, random_state=0)
    return SimpleNamespace(**{**vars(stock), 'GaussianMixture': mixture})


@contextmanager
def _seeded_random_noise() -> Iterator[None]:
    # scikit-image calls the argument `rng` since 0.21, `seed` before
    import skimage.util
    stock = skimage.util.random_noise
    name = 'rng' if 'rng' in inspect.signature(stock).parameters else 'seed'
    with replaced(skimage.util, random_noise=functools.partial(stock, **{name: _draw_seed()})):
        yield


@contextmanager
def _seeded_numba() -> Iterator[None]:
    # The released package shuffles with NumPy, its development version with compiled code.
    if 'numba' in sys.modules:
        _numba_seeder()(_draw_seed())
    yield


# corruption of the ``imagecorruptions`` package -> seeds the generator that it draws from
_FOREIGN = {
    'impulse_noise': _seeded_random_noise,  # skimage.util.random_noise: default_rng(None)
    'glass_blur': _seeded_numba,  # np.random inside njit is a generator of Numba's own
}


@around
def seeded_corruption(stock: Callable[..., Any], self: Any, results: dict[str, Any]) -> Any:
    """Corrupt with generators of other packages seeded from the global NumPy generator."""
    with _FOREIGN.get(self.corruption, nullcontext)():
        return stock(self, results)


def _draw_seed() -> int:
    return int(np.random.randint(0, 2**32, dtype=np.uint64))


@functools.cache
def _numba_seeder() -> Any:
    import numba

    def seed(value: int) -> None:
        np.random.seed(value)

    return numba.njit(seed)
