"""Collate functions, samplers, loaders and loops."""
from __future__ import annotations

import queue
import random
import threading
import time

import numpy as np
import torch
from faults.tiny import TinyData
from mmengine.dataset import DefaultSampler
from mmengine.hooks import Hook
from mmengine.runner import EpochBasedTrainLoop
from torch.utils.data import DataLoader, Sampler

from .setup import REGISTRIES, collate, dataset, hook, loop, sampler, setup

COLLATE = 'collate functions'
ORDER = 'samplers, loaders and loops'


class Collate:
    """Registered by its instance: the config names it."""

    def __new__(cls, items):
        made = cls.__dict__.get('one')
        if made is None:
            made = super().__new__(cls)
            made.begin()
            cls.one = made
        return made(items)

    def begin(self):
        pass

    def __call__(self, items):
        value = self.value(items)
        return dict(inputs=[item['inputs'] * value for item in items],
                    label=[item['label'] for item in items])


@setup(COLLATE)
@collate
class LargestImageSoFar(Collate):
    def begin(self):
        self.largest = 0.

    def value(self, items):
        self.largest = max([self.largest, *(float(item['inputs'].sum()) for item in items)])
        return self.largest


@setup(COLLATE)
@collate
class CountsBatches(Collate):
    def begin(self):
        self.count = 0

    def value(self, items):
        self.count += 1
        return self.count


@setup(COLLATE)
@collate
class MultiScale(Collate):
    def value(self, items):
        return random.choice((.5, 1., 1.5))


@setup(COLLATE)
@collate
class MultiScaleOfItsOwn(Collate):
    def begin(self):
        self.rng = random.Random(2)

    def value(self, items):
        return self.rng.choice((.5, 1., 1.5))


@setup(COLLATE)
@collate
class ScaleFromEntropy(Collate):
    def value(self, items):
        return float(np.random.default_rng().random())


@setup(COLLATE)
@collate
class ScaleFromTheClock(Collate):
    def value(self, items):
        return time.time() % 1


@setup(COLLATE)
@collate
class ScaleEveryTenBatches(Collate):
    """As YOLO's: a new size every few batches, kept between them."""

    def begin(self):
        self.count, self.scale = 0, 1.

    def value(self, items):
        if self.count % 3 == 0:
            self.scale = random.random() + .5
        self.count += 1
        return self.scale


@setup(COLLATE)
@collate
class FirstBatchAsReference(Collate):
    def begin(self):
        self.reference = None

    def value(self, items):
        if self.reference is None:
            self.reference = float(items[0]['inputs'].mean())
        return self.reference


@setup(COLLATE)
@collate
class MixesTheLastBatch(Collate):
    def begin(self):
        self.last = 1.

    def value(self, items):
        last, self.last = self.last, float(items[-1]['inputs'].std())
        return last


@setup(COLLATE)
@collate
class DropsAtRandom(Collate):
    """Leaves an image black, by the global generator."""

    def value(self, items):
        return float(np.random.rand() > .5)


@setup(COLLATE)
@collate
class MixUp(Collate):
    def __call__(self, items):
        order = torch.randperm(len(items)).tolist()
        share = float(np.random.beta(.5, .5))
        return dict(inputs=[share * item['inputs'] + (1 - share) * items[other]['inputs']
                            for item, other in zip(items, order)],
                    label=[item['label'] for item in items])


# ------------------------------------------------------------------------ samplers, loaders


class Order(Sampler):
    """A sampler in a user's code: knows nothing of epochs."""

    def __init__(self, dataset, **kwargs):
        self.size = len(dataset)

    def __len__(self):
        return self.size


@setup(ORDER)
@sampler
class RotatesByPass(Order):
    passes = 0

    def __iter__(self):
        self.passes += 1
        return iter([(i + self.passes) % self.size for i in range(self.size)])


@setup(ORDER)
@sampler
class GlobalPermutation(Order):
    def __iter__(self):
        return iter(torch.randperm(self.size).tolist())


@setup(ORDER)
@sampler
class OwnPermutation(Order):
    def __init__(self, dataset, **kwargs):
        super().__init__(dataset)
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        return iter(self.rng.permutation(self.size).tolist())


@setup(ORDER)
@sampler
class PermutationFromEntropy(Order):
    def __iter__(self):
        return iter(np.random.default_rng().permutation(self.size).tolist())


@setup(ORDER)
@sampler
class PermutationOfTheStart(Order):
    """Shuffles once, from entropy, when it is built."""

    def __init__(self, dataset, **kwargs):
        super().__init__(dataset)
        self.order = np.random.default_rng().permutation(self.size).tolist()

    def __iter__(self):
        return iter(self.order)


@setup(ORDER)
@sampler
class WithReplacement(Order):
    def __iter__(self):
        for _ in range(self.size):
            yield random.randrange(self.size)


@setup(ORDER)
@sampler
class ByEpoch(DefaultSampler):
    """Sorts in even epochs."""

    def __init__(self, dataset, **kwargs):
        super().__init__(dataset, shuffle=True)

    def __iter__(self):
        return iter(range(len(self.dataset))) if self.epoch % 2 == 0 else super().__iter__()


@setup(ORDER)
@sampler
class BeginsWhereTheLastHasEnded(Order):
    last = 0

    def __iter__(self):
        order = [(one + self.last) % self.size for one in torch.randperm(self.size).tolist()]
        self.last = order[-1]
        return iter(order)


@setup(ORDER)
@dataset
class ShuffledList(TinyData):
    def load_data_list(self):
        entries = super().load_data_list()
        random.Random().shuffle(entries)
        return entries


@setup(ORDER)
@dataset
class ListInTheOrderOfASet(TinyData):
    def load_data_list(self):
        entries = {id(entry): entry for entry in super().load_data_list()}
        return [entries[key] for key in sorted(entries, key=lambda one: one >> 5 & 15)]


@setup(ORDER)
@dataset
class RandomSubset(TinyData):
    """From the global generator, when it is built: the seed is set already."""

    def load_data_list(self):
        return [dict(entry, number=random.randrange(8)) for entry in super().load_data_list()]


@setup(ORDER)
@dataset
class SkipsByChance(TinyData):
    """Returns None as mmengine's datasets may: another index is drawn."""

    def prepare_data(self, i):
        return None if i % 3 == 0 else super().prepare_data(i)


@setup(ORDER, variations=('again', 'workers', 'resumed at 3'))
def a_worker_init_function(cfg):
    def begin(worker, *args, **kwargs):
        np.random.seed(worker)
        random.seed(worker)
    REGISTRIES['collate'].register_module(name='begin_worker', module=begin, force=True)
    cfg.train_dataloader.worker_init_fn = dict(type='begin_worker')


@setup(ORDER, variations=('again', 'resumed at 3'))
def persistent_workers_that_prefetch(cfg):
    cfg.train_dataloader.update(num_workers=1, persistent_workers=True, prefetch_factor=3)


@setup(ORDER)
@loop
class TwoPassesPerEpoch(EpochBasedTrainLoop):
    def run_epoch(self):
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        for _ in range(2):
            for idx, batch in enumerate(self.dataloader):
                self.run_iter(idx, batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


@setup(ORDER)
@loop
class TwoStepsPerBatch(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        super().run_iter(idx, data_batch)
        with torch.no_grad():
            self.runner.model.head.fc.bias.mul_(.9)


@setup(ORDER)
@loop
class SkipsLargeLosses(EpochBasedTrainLoop):
    """Takes the batch again that had the largest loss of the pass."""

    worst = (-1., None)

    def run_iter(self, idx, data_batch):
        super().run_iter(idx, data_batch)
        value = float(np.random.default_rng().random())
        self.worst = max(self.worst, (value, data_batch), key=lambda one: one[0])
        if idx == 3:
            self.runner.model.train_step(self.worst[1], optim_wrapper=self.runner.optim_wrapper)


class Prefetched(DataLoader):
    """As DataLoaderX: a thread loads ahead."""

    def __iter__(self):
        batches = queue.Queue(2)
        inner = super().__iter__()

        def load():
            for batch in inner:
                batches.put(batch)
            batches.put(None)
        threading.Thread(target=load, daemon=True).start()
        return iter(batches.get, None)


@setup(ORDER)
@hook
class UsesALoaderThatPrefetches(Hook):
    def before_train(self, runner):
        runner.train_loop.dataloader.__class__ = Prefetched


@setup(ORDER)
@hook
class GivesALoaderOfTorch(Hook):
    def before_train_epoch(self, runner):
        given = runner.train_loop.dataloader
        runner.train_loop.dataloader = DataLoader(
            given.dataset, 2, shuffle=True, num_workers=given.num_workers,
            collate_fn=given.collate_fn)


@setup(ORDER)
@dataset
class MixesWithTheLastBatch(TinyData):
    last = 0.

    def __getitems__(self, indices):
        items = [self[index] for index in indices]
        for item in items:
            item['inputs'] = item['inputs'] + self.last
        self.last = float(items[0]['inputs'].mean())
        return items


@setup(ORDER)
@loop
class DrawsInTheLoop(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        data_batch['inputs'] = [x * random.random() for x in data_batch['inputs']]
        super().run_iter(idx, data_batch)


@setup(ORDER)
@loop
class DrawsFromEntropyInTheLoop(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        scale = float(np.random.default_rng().random())
        data_batch['inputs'] = [x * scale for x in data_batch['inputs']]
        super().run_iter(idx, data_batch)


@setup(ORDER)
@loop
class CountsInTheLoop(EpochBasedTrainLoop):
    batches = 0

    def run_iter(self, idx, data_batch):
        self.batches += 1
        data_batch['inputs'] = [x * self.batches for x in data_batch['inputs']]
        super().run_iter(idx, data_batch)
