"""Loaders, samplers, collate functions and datasets that users bring, as objects and as dicts."""
import random
import threading
from collections import deque
from functools import partial

import numpy as np
import pytest
import torch
from harness import Child, digest
from loaders import (
    BATCH,
    LOOPS,
    SIZE,
    InOrder,
    Noisy,
    adopted,
    check_training,
    loader,
    settings,
    train,
)
from mmengine import registry
from mmengine.dataset import DefaultSampler, InfiniteSampler, pseudo_collate
from mmengine.registry import DATASETS
from mmengine.runner import ValLoop
from small_runs import warnings_of
from torch.utils import data as of_torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    StackDataset,
    Subset,
    WeightedRandomSampler,
    random_split,
)

from mmrepro import seeds
from mmrepro.data import generators
from mmrepro.errors import ConfigError, RandomnessError
from mmrepro.run.runner import ReproRunner

pytestmark = pytest.mark.usefixtures('workers_end_soon', 'no_pause_between_passes')


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
    with pytest.raises(RandomnessError, match=r'sampler deque\(\[3, 1\]\) of type deque cannot'):
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


def digests(made):
    return [digest(batch) for batch in made]


class Slotted:
    __slots__ = ('size', )

    def __init__(self):
        self.size = SIZE

    def __len__(self):
        return self.size

    __getitem__ = Noisy.__getitem__


def test_a_dataset_needs_no_attributes():
    expected = digests(adopted(loader(dataset=Noisy)))
    assert digests(adopted(DataLoader(Slotted(), BATCH, collate_fn=pseudo_collate))) == expected
    numbers = [dict(x=i) for i in range(SIZE)]
    listed = list(adopted(DataLoader(numbers, BATCH, num_workers=1, collate_fn=pseudo_collate)))
    assert [x for batch in listed for x in batch['x']] == list(range(SIZE))


@pytest.mark.parametrize('indices', [[3, 1, 4, 1, 5, 9, 2, 6], range(0, 14, 2)], ids=str)
def test_a_sampler_may_be_a_list(indices, tmp_path):
    def make():
        return DataLoader(Noisy(), BATCH, sampler=indices, collate_fn=pseudo_collate)

    seen = [int(sample[0]) for batch in adopted(make()) for sample in batch['x']]
    assert seen == list(indices)
    whole = train(make, tmp_path, 'iterations', validation=False)
    assert len(set(whole[0])) == 12
    assert train(make, tmp_path, 'iterations', 5, validation=False) == (whole[0][5:], whole[1])


class Batches(Noisy):
    def __getitems__(self, indices):
        shift = torch.rand(())
        return [dict(x=torch.tensor([float(i), 0., 0., shift])) for i in indices]


def whole_batch(data):
    return torch.stack([sample['x'] for sample in data]).clone() * torch.rand(())


@pytest.mark.parametrize('collate', [pseudo_collate, whole_batch])
def test_a_datasets_own_batches_have_a_stream(collate):
    def batches(dataset=Batches, workers=0, mode='sample'):
        return digests(adopted(loader(dataset=dataset, workers=workers, collate=collate),
                               worker_seed=mode))

    alone = batches()
    assert batches(workers=2) == alone and len(set(alone)) == len(alone)
    assert batches(lambda: Subset(Batches(), range(SIZE))) == alone
    assert batches(Noisy) != alone
    assert batches(mode='worker') == batches(workers=1, mode='worker')


def test_torchs_own_wrappers_load_sample_by_sample():
    alone = digests(adopted(loader(dataset=Noisy)))
    assert digests(adopted(loader(dataset=lambda: Subset(Noisy(), range(SIZE))))) == alone
    stacked = adopted(loader(dataset=lambda: StackDataset(one=Noisy())))
    assert [digest(batch['one']) for batch in stacked] == alone


def test_training_and_validation_may_share_a_dataset(tmp_path):
    """The streams are those of the loader that loads."""
    shared = Noisy()
    whole = train(loader, tmp_path / 'apart')
    cfg = settings(lambda: loader(dataset=lambda: shared), tmp_path / 'shared')
    cfg['val_dataloader'] = loader(dataset=lambda: shared)
    assert train(None, None, cfg=cfg) == whole


@pytest.mark.parametrize('workers', [dict(), dict(workers=1, persistent_workers=True)], ids=str)
def test_validation_and_test_may_share_a_loader(workers, tmp_path):
    seen = {}

    def run(*names, shared=True):
        made = loader(**workers)
        cfg = settings(loader, tmp_path)
        other = made if shared else loader(**workers)
        cfg.update(val_dataloader=made, test_dataloader=other, test_cfg=dict(),
                   test_evaluator=cfg['val_evaluator'])
        runner = ReproRunner(**cfg)
        seen.clear()
        step = type(runner.model).forward

        def noted(x, mode):
            seen.setdefault(name, []).append(digest(list(x)))
            return step(runner.model, x, mode)

        runner.model.forward = noted
        for name in names:
            seen.pop(name, None)
            getattr(runner, name)()
        return dict(seen)

    apart = run('val', 'test', shared=False)
    assert apart['val'] != apart['test']
    assert run('val', 'test', 'val') == apart
    assert run('test', 'val', 'test') == apart


class Sized(Noisy):
    def __getitem__(self, index):
        size, i = index
        assert type(index) is tuple and type(i) is int
        return dict(x=super().__getitem__(i)['x'] * (1 + size))


class SizesOfBatches(BatchSampler):
    """As YOLOX: the size of a batch goes along with its indices."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield [(number % 3, i) for i in batch]


def test_a_batch_sampler_may_add_to_the_indices(tmp_path):
    def make(workers=0):
        dataset = Sized()
        return DataLoader(dataset, num_workers=workers, collate_fn=pseudo_collate,
                          batch_sampler=SizesOfBatches(InOrder(dataset), BATCH, False))
    expected = check_training(make, tmp_path, points=(3, 4))
    assert train(partial(make, 2), tmp_path / 'workers') == expected


@registry.LOOPS.register_module(force=True)
class ValidatesOnSeveral(ValLoop):
    """A loop of the user's own, with a list of loaders."""

    def __init__(self, runner, dataloader, evaluator, fp16=False):
        super().__init__(runner, dataloader[0], evaluator, fp16)
        self.other = runner.build_dataloader(dataloader[1])

    def run(self):
        self.seen = [digest(batch) for batch in self.other]
        return super().run()


def test_a_loop_may_validate_on_several_loaders(tmp_path):
    other = dict(dataset=Noisy(), batch_size=BATCH, sampler=dict(type='DefaultSampler'),
                 collate_fn=dict(type='pseudo_collate'))

    def run(folder, first, workers):
        cfg = settings(loader, tmp_path / folder)
        cfg.update(val_dataloader=[first, dict(other, num_workers=workers)],
                   val_cfg=dict(type='ValidatesOnSeveral'))
        runners = []
        return train(loader, None, cfg=cfg, prepare=runners.append), runners[0].val_loop.seen

    assert run('first', dict(other, num_workers=0), 0) == run('second', loader(), 2)


class Foreign:
    """What libraries put around a loader."""

    def __init__(self, inner):
        self.inner, self.dataset = inner, inner.dataset

    def __len__(self):
        return len(self.inner)

    def __iter__(self):
        return iter(self.inner)


def shared(cfg):
    cfg['val_dataloader'] = cfg['train_dataloader']


@pytest.mark.parametrize('make, change, message', [
    (loader, shared, 'serves training and another loop'),
    (lambda: Foreign(loader()), dict, "Foreign of the stream 'sample' is no torch DataLoader"),
    (lambda: loader(workers=2, in_order=False), dict, 'in_order=False, with num_workers=2')])
def test_a_loader_that_training_cannot_use_is_refused(make, change, message, tmp_path):
    cfg = settings(make, tmp_path)
    change(cfg)
    with pytest.raises(RandomnessError, match=message):
        ReproRunner(**cfg).train()
    adopted(loader(in_order=False))


@pytest.mark.parametrize('workers', ['two', 1.5, -1])
def test_a_number_of_workers_that_is_none_is_named(workers, tmp_path):
    cfg = settings(loader, tmp_path)
    cfg.update(val_dataloader=dict(num_workers=workers, dataset=Noisy()))
    with pytest.raises(ConfigError, match=f"num_workers={workers!r} of the loader of stream 'val'"):
        ReproRunner(**cfg).train()


class Ahead(DataLoader):
    def __iter__(self):
        found = []
        thread = threading.Thread(name='ahead', target=self.load, args=(found, ))
        thread.start()
        thread.join()
        for batch in found:
            if isinstance(batch, Exception):
                raise batch
            yield batch

    def load(self, found):
        try:
            found += list(super().__iter__())
        except Exception as error:
            # not its traceback, which would leave the iterator to the garbage collector
            # (findings/a_sampler_that_raises_closes_a_file_twice.sh)
            found.append(error.with_traceback(None))


@pytest.fixture
def trains():
    generators.claim_for_this_thread()


def test_threads_load_from_workers_only(trains):
    def ahead(workers):
        data = Noisy()
        return adopted(Ahead(data, BATCH, sampler=RandomSampler(data), num_workers=workers,
                             collate_fn=pseudo_collate))

    with pytest.raises(RandomnessError, match="the thread 'ahead' loads samples in the process"):
        list(ahead(0))
    assert digests(ahead(1)) == digests(adopted(loader(RandomSampler)))


class DrawsItsOrder(InOrder):
    def __iter__(self):
        return iter(torch.randperm(len(self)).tolist())


def test_a_thread_that_trains_may_load(tmp_path):
    """In a notebook or a service; afterwards any thread may look at the data."""
    runner = ReproRunner(**settings(loader, tmp_path))
    thread = threading.Thread(target=runner.train)
    thread.start()
    thread.join()
    assert runner.iter == 12 and len(list(runner.train_dataloader)) == 4


def test_threads_draw_no_order_from_the_generators_of_the_trainer(trains):
    data = Noisy()
    made = adopted(Ahead(data, BATCH, sampler=DrawsItsOrder(data), num_workers=1))
    with pytest.raises(RandomnessError, match="the thread 'ahead' asks DrawsItsOrder"):
        list(made)


@pytest.mark.parametrize('indices, warned', [(None, True), (range(3, 11), False)])
def test_a_split_that_was_drawn_is_named(indices, warned, tmp_path):
    data = Noisy()
    subset = random_split(data, [8, 6])[0] if indices is None else Subset(data, indices)
    runner = ReproRunner(**settings(lambda: loader(dataset=lambda: subset), tmp_path))
    assert any('random_split' in text for text in warnings_of(runner)) == warned


def test_the_class_keeps_its_static_method():
    cfg = dict(batch_size=2, num_workers=0, dataset=Noisy(), sampler=InOrder(Noisy()))
    made = ReproRunner.build_dataloader(cfg)
    assert type(made) is DataLoader and not hasattr(made, '_mmrepro_fetch')
