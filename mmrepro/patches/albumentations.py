"""Albumentations pipelines: every call starts from generators derived from the sample's."""
from __future__ import annotations

import random

import numpy as np

from .wrapping import around

__all__ = ['reseed', 'seeded_from_sample']


@around
def seeded_from_sample(stock, self, *args, **kwargs):
    """Reseed an unseeded pipeline, then run it. One that the user seeded keeps its own stream."""
    if getattr(self, 'seed', None) is None:
        reseed(self)
    return stock(self, *args, **kwargs)


def reseed(pipeline) -> None:
    """Give ``pipeline`` fresh generators, drawn from the global NumPy generator.

    Before 1.4.21 pipelines draw from Python's global generator, so there is nothing to do.
    ``set_random_seed`` would not serve: it gives every transform the *same* seed, so that all of
    them would be applied together or not at all, and newer versions mix the worker's seed into it.
    """
    if hasattr(pipeline, 'set_random_state'):
        words = np.random.randint(0, 2**32, size=8, dtype=np.uint64).tolist()
        numpy_generator = np.random.Generator(np.random.PCG64(words[:4]))
        python_generator = random.Random(sum(word << 32 * i for i, word in enumerate(words[4:])))
        pipeline.set_random_state(numpy_generator, python_generator)
