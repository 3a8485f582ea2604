"""Streams are a pure function of (root, stream, key), pinned for all platforms and versions."""
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mmrepro
from mmrepro import dropin, seeds

# Computed once from the format in mmrepro/seeds.py; a change here breaks every old run.
GOLDEN = {
    (0, 'init', ()): (
        196149855039868246591655389950079083979, (3445913624, 2829004939, 587847158, 874396121),
        13426822806878144844, 5247341487060329474),
    (42, 'sample', (3, 12345)): (
        207344421997832964112905145885181515740, (2213068217, 782514123, 1857699492, 3168305434),
        13120452861776103598, 11956560213596978155),
    (2**32 - 1, 'sampler', ('DefaultSampler', 7)): (
        37336637363568998891613565611576031530, (2089905384, 277269976, 901837018, 964568809),
        15577190928514494499, 7197553316868908730),
    (7, 'worker', (-1, 'start')): (
        148950059033966092602693012451116577768, (2406733685, 1781707279, 3351835724, 3503512988),
        4967833613434744977, 5328125534445632694),
}

DRAWS = (10588886650650550936, 2080944083, 1440776509)  # Python, NumPy, torch


@pytest.mark.parametrize('address', GOLDEN, ids=str)
def test_golden_values(address):
    root, stream, key = address
    assert seeds.derive(root, stream, *key) == GOLDEN[address]


def test_golden_draws_of_every_generator():
    seeds.seed_all(42, 'step', 0)
    draws = random.getrandbits(64), int(np.random.randint(2**31)), int(torch.randint(2**31, ()))
    assert draws == DRAWS


def test_the_format_is_what_the_documentation_says():
    """Derive one stream by hand from the documented bytes."""
    import hashlib
    import struct
    message = (b'mmrepro' + struct.pack('<BQ', 1, 42) + b's' + struct.pack('<I', 6) + b'sample' +
               b'i' + struct.pack('<q', 3) + b's' + struct.pack('<I', 1) + b'x')
    digest = hashlib.blake2b(message, digest_size=48).digest()
    found = seeds.derive(42, 'sample', 3, 'x')
    assert found.python == int.from_bytes(digest[:16], 'little')
    assert found.numpy == struct.unpack('<4I', digest[16:32])
    assert (found.torch, found.accelerator) == struct.unpack('<QQ', digest[32:])


def test_a_hundred_thousand_addresses_share_no_seed():
    roots, streams = (0, 1, 2, 2**32 - 1), ('sample', 'sampler', 'step', 'worker', 'val')
    found = [seeds.derive(*address)
             for address in itertools.product(roots, streams, range(10), range(500))]
    assert [len(set(values)) for values in zip(*found)] == [100_000] * 4
    assert all(len({*one[:1], *one[1], *one[2:]}) == 7 for one in found), 'nor do generators'


def test_neighbouring_seeds_are_not_shifted_copies():
    """MMEngine: seed 0 in epoch 1 shuffles like seed 1 in epoch 0."""
    orders = {seeds.random_state(root, 'sampler', 'x', epoch).permutation(50).tobytes()
              for root in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize('left, right', [
    (('a', 'b'), ('ab',)),
    ((1, 2), (12,)),
    ((1,), ('1',)),
    ((), (0,)),
    ((258,), (2, 1)),
])
def test_keys_that_look_alike_differ(left, right):
    assert seeds.derive(0, 'step', *left) != seeds.derive(0, 'step', *right)


def test_unknown_stream_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown stream 'smaple'; known are init"):
        seeds.derive(0, 'smaple')


def draw():
    return random.random(), np.random.rand(), np.random.randn(), torch.rand(3).tolist()


def test_seed_all_seeds_all_whatever_ran_before():
    seeds.seed_all(5, 'step', 1)
    first = draw()
    np.random.randn()  # leaves half a Gaussian pair behind
    seeds.seed_all(5, 'step', 1)
    assert draw() == first


def test_isolate_rng_restores_other_accelerators(monkeypatch):
    states = [1, 2]
    monkeypatch.setattr(seeds, '_other_accelerators', lambda: ('npu', ))
    monkeypatch.setattr(torch, 'npu', SimpleNamespace(
        is_initialized=lambda: True, get_rng_state_all=lambda: list(states),
        set_rng_state_all=lambda given: states.__setitem__(slice(None), given)), raising=False)
    with seeds.isolate_rng():
        states[0] = 3
    assert states == [1, 2]


def test_isolate_rng_restores_after_an_exception():
    seeds.seed_all(5, 'step', 1)
    expected = draw()
    seeds.seed_all(5, 'step', 1)
    with pytest.raises(KeyError):
        with seeds.isolate_rng():
            random.random(), np.random.rand(7), torch.rand(7)
            raise KeyError
    assert draw() == expected


def test_a_root_with_streams_of_their_own_travels():
    """To spawned workers it is pickled; a process keeps it as its root."""
    import pickle
    root = seeds.RootSeed(42, dict(init=7))
    seeds.set_root(root)
    for one in (pickle.loads(pickle.dumps(root)), seeds.root()):
        assert seeds.derive(one, 'init', 1) == seeds.derive(7, 'init', 1)
        assert seeds.derive(one, 'step', 1) == seeds.derive(42, 'step', 1)
    seeds.set_root(None)
    assert seeds.root() is None
    with pytest.raises(ValueError, match='out of range'):
        seeds.set_root(seeds.RootSeed(-1))


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()


def test_init_random_seed_keeps_a_seed_and_draws_one():
    assert mmrepro.init_random_seed(5) == 5
    assert mmrepro.init_random_seed(5, device='cpu') == 5
    drawn = {mmrepro.init_random_seed() for _ in range(8)}
    assert len(drawn) == 8 and all(0 <= seed < 2**32 for seed in drawn)


@pytest.mark.parametrize('seed', [-1, 2**32, True, 1.5, '3'])
def test_init_random_seed_refuses_what_is_not_a_seed(seed):
    with pytest.raises((TypeError, ValueError), match='allowed is'):
        mmrepro.init_random_seed(seed)


def test_set_random_seed_repeats_and_sets_the_flags():
    drawn = []
    for _ in range(2):
        assert mmrepro.set_random_seed(3) == 3
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    assert not torch.are_deterministic_algorithms_enabled()
    mmrepro.set_random_seed(3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_worker_init_fn_is_the_classic_formula():
    dropin.worker_init_fn(worker_id=1, num_workers=4, rank=2, seed=10)
    found = draw()
    random.seed(19), np.random.seed(19), torch.manual_seed(19)
    assert found == draw()


def epochs(seed, count=2):
    loader = DataLoader(Noise(), batch_size=2, shuffle=True, num_workers=2,
                        generator=dropin.seeded_generator(seed),
                        worker_init_fn=dropin.seed_worker)
    return [[tuple(float(part) for part in column) for batch in loader for column in zip(*batch)]
            for _ in range(count)]


def test_a_plain_loader_repeats_draws_anew_each_epoch_and_knows_its_seed():
    first, again, other = epochs(1), epochs(1), epochs(2)
    assert first == again
    assert not {row[1:] for row in first[0]} & {row[1:] for row in first[1]}
    assert not {row[1:] for row in first[0]} & {row[1:] for row in other[0]}
    assert len({row[1:] for row in first[0]}) == 8
