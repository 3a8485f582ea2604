"""A module of the user's, with a generator that transforms of other modules name."""
import numpy as np

rng = np.random.default_rng(11)
hidden = np.random.default_rng(12)


def draw():
    return hidden.random()
