"""Loaders that users bring: any sampler, any collate function, objects as well as dicts."""
import random
from collections import deque

import numpy as np
import pytest
import torch
from harness import Child
from loaders import BATCH, LOOPS, SIZE, InOrder, Noisy, adopted, check_training, loader, train
from mmengine.dataset import DefaultSampler, InfiniteSampler, pseudo_collate
from mmengine.registry import DATASETS
from torch.utils import data as of_torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from mmrepro import seeds


class OwnGenerator(InOrder):
    """As ``RandomSampler(generator=...)``; drawn from across epochs."""

    def __init__(self, dataset):
        super().__init__(dataset)
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self):
        return iter(torch.randperm(len(self), generator=self.generator).tolist())


class GlobalGenerators(InOrder):
    """Draws from the main process, one index at a time."""

    def __iter__(self):
        for i in np.random.permutation(len(self)).tolist():
            yield (i + random.randrange(SIZE) + int(torch.randint(SIZE, ()))) % SIZE


class NumPySeed(InOrder):
    """NumPy takes 32 bits."""

    def __init__(self, dataset):
        super().__init__(dataset)
        self.seed, self.epoch = 5, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.RandomState(self.seed + self.epoch).permutation(len(self)).tolist())


class CountsItself(InOrder):
    """Knows its epoch, and is told of none."""

    def __init__(self, dataset):
        super().__init__(dataset)
        self.epoch = 0

    def __iter__(self):
        first, self.epoch = self.epoch, self.epoch + 1
        return iter([(first + i) % SIZE for i in range(SIZE)])


SAMPLERS = {
    'in order': InOrder,
    'sequential': of_torch.SequentialSampler,
    'random': RandomSampler,
    'random, with a generator': lambda data: RandomSampler(
        data, True, 15, torch.Generator().manual_seed(7)),
    'weighted': lambda data: WeightedRandomSampler([1. + i % 3 for i in range(SIZE)], SIZE),
    'weighted, each once': lambda data: WeightedRandomSampler([1.] * SIZE, SIZE, False),
    'subset': lambda data: of_torch.SubsetRandomSampler(range(SIZE)),
    'own generator': OwnGenerator,
    'global generators': GlobalGenerators,
    'seed for NumPy': NumPySeed,
    'counts itself': CountsItself,
}


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('name', SAMPLERS)
def test_any_finite_sampler_has_epochs(name, loop, tmp_path):
    """Epochs draw other numbers, validation moves nothing, a resumed run goes on where it was."""
    def make(workers=0):
        return loader(SAMPLERS[name], workers)

    seen, _ = check_training(make, tmp_path, loop, (2, 4, 9) if loop == 'epochs' else (5, ))
    assert len(seen) == 12


@pytest.mark.parametrize('name', ['random', 'own generator', 'global generators'])
def test_an_order_is_shuffled_anew_each_epoch(name):
    made = adopted(loader(SAMPLERS[name]))
    seeds.seed_all(0, 'step', 0)
    before, orders = repr(seeds.capture_rng()), []
    for epoch in range(3):
        made.batch_sampler.sampler.set_epoch(epoch)
        orders.append([int(i) for batch in made.batch_sampler for i in batch])
    assert repr(seeds.capture_rng()) == before, 'the generators of the main process have moved'
    assert len({tuple(order) for order in orders}) == 3
    assert name == 'global generators' or all(sorted(o) == list(range(SIZE)) for o in orders)


def test_a_weighted_order_keeps_its_weights():
    weights = [0., 1., 3.] + [0.] * (SIZE - 3)
    made = adopted(loader(lambda data: WeightedRandomSampler(weights, 4000)))
    counts = np.bincount([int(i) for i in made.batch_sampler.sampler], minlength=SIZE)
    assert counts[0] == 0 and counts[3:].sum() == 0 and 2900 < counts[2] < 3100


class Picky(BatchSampler):
    def __iter__(self):
        rest = list(self.sampler)
        while rest:
            count = random.randint(1, 4)
            yield rest[:count]
            rest = rest[count:]


def test_a_batch_sampler_that_draws_has_a_stream_of_its_own(tmp_path):
    def make():
        dataset = Noisy()
        return DataLoader(dataset, collate_fn=pseudo_collate, batch_sampler=Picky(
            DefaultSampler(dataset), BATCH, False))

    check_training(make, tmp_path, points=(3, ))


def test_a_sampler_that_cannot_be_adopted_is_named():
    with pytest.raises(TypeError, match=r'the sampler deque\(\[3, 1\]\) of type deque cannot'):
        adopted(DataLoader(Noisy(), sampler=deque([3, 1])))


@pytest.mark.parametrize('workers', [0, 2])
def test_a_loader_object_goes_on_where_it_was(workers, tmp_path):
    """An iteration-based loop forks its workers, which load at once, while it is built."""
    def make(workers=0):
        return loader(lambda data: InfiniteSampler(data, seed=1), workers)

    def resumed():  # workers of endless loaders end with the process that started them
        return train(lambda: make(workers), tmp_path, 'iterations', 5)

    whole = train(make, tmp_path, 'iterations')
    seen, weights = Child(resumed).result()
    assert (seen, weights) == (whole[0][5:], whole[1])


@DATASETS.register_module(force=True)
class DrawsAtOnce(Noisy):
    def __init__(self):
        self.shift = random.random() + np.random.rand() + float(torch.rand(()))

    def __getitem__(self, i):
        return dict(x=super().__getitem__(i)['x'] + self.shift)


def test_what_a_data_set_draws_at_once_depends_on_the_seed_only(tmp_path):
    def make():
        return dict(batch_size=BATCH, num_workers=0, dataset=dict(type='DrawsAtOnce'),
                    sampler=dict(type='DefaultSampler', shuffle=True))

    whole = check_training(make, tmp_path)
    for prepare in (lambda runner: runner.val(),
                    lambda runner: (random.random(), np.random.rand(), torch.rand(1))):
        assert train(make, tmp_path / 'other', prepare=prepare) == whole
