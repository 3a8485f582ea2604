"""Names that old scripts call."""
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mmrepro
from mmrepro import dropin


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
    def draws():
        assert mmrepro.set_random_seed(3) == 3
        return random.random(), np.random.rand(), torch.rand(2).tolist()

    assert draws() == draws()
    assert not torch.are_deterministic_algorithms_enabled()
    mmrepro.set_random_seed(3, deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()


def test_worker_init_fn_is_the_classic_formula():
    mmrepro.worker_init_fn(worker_id=1, num_workers=4, rank=2, seed=10)
    found = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(19), np.random.seed(19), torch.manual_seed(19)
    assert found == (random.random(), np.random.rand(), torch.rand(()).item())


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
