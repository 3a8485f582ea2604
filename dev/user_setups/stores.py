"""Stores of images, orders, and parts of a run that have state of their own."""
from __future__ import annotations

import importlib.util
import os
import pickle
import sqlite3
import zipfile

import numpy as np
import torch
from faults.tiny import TinyData, TinyMetric, TinyPreprocessor
from mmengine.logging import MessageHub
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from mmengine.runner import Runner
from torch.utils.data import BatchSampler

from .setup import (
    ANOTHER,
    batch_sampler,
    collate,
    dataset,
    metric,
    preprocessor,
    runner,
    scheduler,
    setup,
    use_all,
)

STORES = 'stores of images'
ORDERS = 'batch samplers and groups of parameters'
PARTS = 'preprocessors, metrics, runners and schedulers with state'

VALUES = np.sin(np.arange(32.))


# ------------------------------------------------------------------------------------- stores


class Stored(TinyData):
    """Adds a number from a file to each image; the file is opened when the first is read."""

    store = None

    def __init__(self, path=None, **kwargs):
        self.path = path
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        if self.store is None:
            self.store = self.open_store()
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] + float(self.read(idx)))


def stored(package):
    """Return a decorator: a set-up whose file is written before, if the package is there."""
    def decorate(cls):
        def change(cfg):
            path = os.path.join(os.path.dirname(cfg.first), f'{cls.__name__}.store')
            if not os.path.exists(path):
                cls.write(path)
            use_all(cfg, dataset(cls))
            cfg.train_dataloader.dataset.path = path
        change.__name__ = cls.__name__
        if importlib.util.find_spec(package):
            setup(STORES)(change)
        return cls
    return decorate


@stored('numpy')
class MappedArray(Stored):
    @staticmethod
    def write(path):
        with open(path, 'wb') as file:
            np.save(file, VALUES)

    def open_store(self):
        return np.load(self.path, mmap_mode='r')

    def read(self, idx):
        return self.store[idx]


@stored('zipfile')
class ZipFileOpenedLazily(Stored):
    @staticmethod
    def write(path):
        with zipfile.ZipFile(path, 'w') as file:
            for number, value in enumerate(VALUES):
                file.writestr(str(number), value.tobytes())

    def open_store(self):
        return zipfile.ZipFile(self.path)

    def read(self, idx):
        return np.frombuffer(self.store.read(str(idx)))[0]


@stored('sqlite3')
class DatabaseThatIsOnlyRead(Stored):
    @staticmethod
    def write(path):
        with sqlite3.connect(path) as base:
            base.execute('create table images (number integer, value real)')
            base.executemany('insert into images values (?, ?)', enumerate(VALUES.tolist()))

    def open_store(self):
        return sqlite3.connect(f'file:{self.path}?mode=ro', uri=True)

    def read(self, idx):
        return self.store.execute(
            'select value from images where number = ?', (idx, )).fetchone()[0]


@stored('pickle')
class PickleReadOnce(Stored):
    @staticmethod
    def write(path):
        with open(path, 'wb') as file:
            pickle.dump(VALUES.tolist(), file)

    def open_store(self):
        with open(self.path, 'rb') as file:
            return pickle.load(file)

    def read(self, idx):
        return self.store[idx]


@stored('pickle')
class PickleThatIsEdited(PickleReadOnce):
    """Values that were read are halved in memory."""

    def read(self, idx):
        self.store[idx] *= .5
        return self.store[idx]


@stored('h5py')
class ImagesInHdf5(Stored):
    @staticmethod
    def write(path):
        import h5py
        with h5py.File(path, 'w') as file:
            file['values'] = VALUES

    def open_store(self):
        import h5py
        return h5py.File(self.path, 'r')

    def read(self, idx):
        return self.store['values'][idx]


@stored('lmdb')
class ImagesInLmdb(Stored):
    @staticmethod
    def write(path):
        import lmdb
        with lmdb.open(path, subdir=False) as base, base.begin(write=True) as transaction:
            for number, value in enumerate(VALUES):
                transaction.put(str(number).encode(), value.tobytes())

    def open_store(self):
        import lmdb
        return lmdb.open(self.path, subdir=False, readonly=True, lock=False)

    def read(self, idx):
        with self.store.begin() as transaction:
            return np.frombuffer(transaction.get(str(idx).encode()))[0]


# ------------------------------------------------------------------------------------- orders


class InBatches(BatchSampler):
    def __init__(self, sampler, batch_size, drop_last=False):
        super().__init__(sampler, batch_size, drop_last)


class ByLabel(InBatches):
    """Batches of one label, as those of one aspect ratio."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.buckets = {}

    def __iter__(self):
        for index in self.sampler:
            bucket = self.buckets.setdefault(index % 3, [])
            bucket.append(index)
            if len(bucket) == self.batch_size:
                yield self.buckets.pop(index % 3)


@setup(ORDERS)
@batch_sampler
class LeftoversForTheNextEpoch(ByLabel):
    pass


@setup(ORDERS)
@batch_sampler
class LeftoversAreDropped(ByLabel):
    def __iter__(self):
        self.buckets = {}
        yield from super().__iter__()

    def __len__(self):
        return 7


@setup(ORDERS)
@batch_sampler
class LongBatchesFirst(InBatches):
    """Sorts the batches of an epoch."""

    def __iter__(self):
        yield from sorted(super().__iter__(), key=lambda batch: -sum(batch))


@setup(ORDERS)
@batch_sampler
class RotatesTheBatches(InBatches):
    """Each pass begins with another batch."""

    passes = 0

    def __iter__(self):
        batches = [*super().__iter__()]
        self.passes += 1
        first = self.passes % len(batches)
        yield from batches[first:] + batches[:first]


class Groups:
    """Groups of parameters of one shape; the order of the names is that of ``ordered``."""
    names = ('backbone.0.bias', 'backbone.1.weight', 'backbone.1.bias')

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.settings = optim_wrapper_cfg

    def __call__(self, model):
        from mmengine.optim import OptimWrapper
        known = dict(model.named_parameters())
        rest = [value for name, value in known.items() if name not in self.names]
        groups = [dict(params=[known[name] for name in self.ordered()]), dict(params=rest)]
        return OptimWrapper(torch.optim.SGD(groups, lr=.1, momentum=.9))


def grouped(cls):
    """Let a config use a constructor of optimizers."""
    def change(cfg):
        from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
        OPTIM_WRAPPER_CONSTRUCTORS.register_module(module=cls, force=True)
        cfg.optim_wrapper.constructor = cls.__name__
    change.__name__ = cls.__name__
    setup(ORDERS, variations=('again', 'resumed at 12', *ANOTHER))(change)
    return cls


@grouped
class GroupsInTheOrderOfASet(Groups):
    """Momenta belong to numbers of parameters, which another hash seed gives otherwise."""

    def ordered(self):
        return set(self.names)


@grouped
class GroupsInTheOrderOfNames(Groups):
    def ordered(self):
        return sorted(set(self.names))


# -------------------------------------------------------------------------------------- parts


@setup(PARTS)
@preprocessor
class SizeForFiveBatches(TinyPreprocessor):
    """Another size after each five batches, as BatchSyncRandomResize; counted in an attribute."""

    count, scale = 0, 1.

    def forward(self, data, training=False):
        data = super().forward(data, training)
        if training:
            if self.count % 5 == 0:
                self.scale = 1 + float(torch.rand(()))
            self.count += 1
            data['inputs'] = data['inputs'] * self.scale
        return data


@setup(PARTS)
@preprocessor
class SizeByTheIteration(TinyPreprocessor):
    def forward(self, data, training=False):
        data = super().forward(data, training)
        iteration = MessageHub.get_current_instance().get_info('iter', 0)
        if training:
            data['inputs'] = data['inputs'] * (1 + .1 * (iteration // 5))
        return data


@setup(PARTS)
@metric
class MeanOfAllValidations(TinyMetric):
    """Of this one and those before."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.all = []

    def compute_metrics(self, results):
        self.all.append(max(results))
        return dict(largest=max(results), mean=float(np.mean(self.all)))


@setup(PARTS)
@metric
class CountsValidations(TinyMetric):
    """For a line that it prints."""

    count = 0

    def compute_metrics(self, results):
        self.count += 1
        print('validation', self.count)
        return super().compute_metrics(results)


@setup(PARTS)
@runner
class RunnerThatCounts(Runner):
    """Lowers the rate after every third event, and no checkpoint has the count."""

    steps = 0

    def call_hook(self, fn_name, **kwargs):
        super().call_hook(fn_name, **kwargs)
        if fn_name == 'after_train_iter':
            self.steps += 1
            if self.steps % 3 == 0:
                for group in self.optim_wrapper.param_groups:
                    group['lr'] *= .9


@setup(PARTS)
@runner
class RunnerThatCountsForTheLog(Runner):
    steps = 0

    def call_hook(self, fn_name, **kwargs):
        super().call_hook(fn_name, **kwargs)
        self.steps += fn_name == 'after_train_iter'
        if fn_name == 'after_train_epoch':
            print(self.steps, 'steps')


@setup(PARTS)
@scheduler
class HidesItsCounter(LRSchedulerMixin, _ParamScheduler):
    """Its state_dict leaves out what it counts."""

    seen = 0

    def _get_value(self):
        self.seen += 1
        return [.1 / self.seen for _ in self.optimizer.param_groups]

    def state_dict(self):
        state = super().state_dict()
        state.pop('seen', None)
        return state


@setup(PARTS)
@scheduler
class CachesWhatItComputes(LRSchedulerMixin, _ParamScheduler):
    """A table that follows from its settings, left out of the state_dict."""

    def _get_value(self):
        if not hasattr(self, 'table'):
            self.table = np.linspace(.1, .01, 30).tolist()
        return [self.table[self.last_step] for _ in self.optimizer.param_groups]

    def state_dict(self):
        state = super().state_dict()
        state.pop('table', None)
        return state


def reference_of(items):
    if not hasattr(reference_of, 'first'):
        reference_of.first = float(items[0]['inputs'].mean())
    return reference_of.first


@setup(PARTS)
@collate
def static_variable_of_a_collate(items):
    return dict(inputs=[item['inputs'] - reference_of(items) for item in items],
                label=[item['label'] for item in items])
