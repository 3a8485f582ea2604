"""What counts as a read of entropy: a generator that is given a seed asks for it and drops it."""
import random
import secrets
import time

import numpy as np
import pytest
from numpy.random import RandomState

from mmrepro.fingerprint.generator_states import Watch

seed = 5
UNSEEDED = None
ENTROPY, SEEDED, CLOCK = 'entropy of the operating system', 'a generator is seeded', 'clock'
READS = {
    'a seed': (lambda: np.random.RandomState(5), []),
    'a name': (lambda: RandomState(seed=seed), []),
    'the clock': (lambda: RandomState(int(time.time() * 1000) % 2 ** 32), [CLOCK]),
    'no seed': (lambda: RandomState(), [ENTROPY]),
    'None': (lambda: RandomState(UNSEEDED), [ENTROPY]),
    'a generator without a seed': (lambda: RandomState(np.random.default_rng().integers(9)),
                                   [ENTROPY]),
    'secrets': (lambda: RandomState(secrets.randbits(128) % 9), [ENTROPY]),
    'default_rng': (lambda: np.random.default_rng(), [ENTROPY]),
    'default_rng with a seed': (lambda: np.random.default_rng(5), []),
    'Random': (lambda: random.Random(), [ENTROPY]),
    'Random with a seed': (lambda: random.Random(5), [SEEDED]),
}


@pytest.mark.parametrize('name', READS)
def test_a_seed_is_no_entropy(name):
    function, expected = READS[name]
    watch = Watch()
    with watch:
        function()
    assert [call.split(': ')[0] for call in watch.take()] == expected
