"""Datasets that stream, grow, change their order, follow the iteration, or load in the background.
"""
from __future__ import annotations

import concurrent.futures
import io
import os
import random
import sqlite3
import tarfile

import numpy as np
import torch
from faults.tiny import TinyData, TinyPreprocessor
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.registry import DATASETS

from .programs import images
from .setup import dataset, hook, preprocessor, sampler, setup, transform, use_all
from .stores import VALUES, Stored, stored

STREAMS = 'streams behind indices'
ORDERS = 'datasets that change their order or size'
PROGRESS = 'strength of the iteration, late'
BACKGROUND = 'loading in the background'
WRAPPED = 'datasets within datasets'
TRAVEL = 'how samples travel'
UNWORKED = ('again', 'resumed at 3', 'resumed at 8', 'resumed at 12')


def plus(sample, value):
    return dict(sample, inputs=sample['inputs'] + value)


# ------------------------------------------------------------------------------------- stores


class Shards(Stored):
    @staticmethod
    def write(path):
        with tarfile.open(path, 'w') as file:
            for number, value in enumerate(VALUES):
                member = tarfile.TarInfo(f'{number:04}.bin')
                member.size = 8
                file.addfile(member, io.BytesIO(value.tobytes()))


@stored('tarfile')
class ShardThatStreams(Shards):
    """As webdataset: records in the order of the file, through a buffer that is shuffled."""

    def open_store(self):
        self.buffer = []
        return self.records()

    def records(self):
        while True:
            with tarfile.open(self.path, 'r|') as file:
                for member in file:
                    self.buffer.append(file.extractfile(member).read())
                    if len(self.buffer) == 8:
                        yield self.buffer.pop(random.randrange(8))

    def read(self, idx):
        return np.frombuffer(next(self.store))[0]


@stored('sqlite3')
class DatabaseThatCounts(Stored):
    """Takes the image that was used least."""

    @staticmethod
    def write(path):
        with sqlite3.connect(path) as base:
            base.execute('create table images (number integer, value real, used integer)')
            base.executemany('insert into images values (?, ?, 0)', enumerate(VALUES.tolist()))

    def open_store(self):
        return sqlite3.connect(self.path, timeout=60)

    def read(self, idx):
        with self.store:
            number, value = self.store.execute(
                'select number, value from images order by used, number limit 1').fetchone()
            self.store.execute('update images set used = used + 1 where number = ?', (number, ))
        return value


@stored('numpy')
class MappedArrayThatIsNormalized(Stored):
    """In the file, at the first look at each value; runs that come later find it done."""

    done = ()

    @staticmethod
    def write(path):
        with open(path, 'wb') as file:
            np.save(file, VALUES)

    def open_store(self):
        self.done = set()
        return np.load(self.path, mmap_mode='r+')

    def read(self, idx):
        if idx not in self.done:
            self.done.add(idx)
            self.store[idx] *= .9
        return self.store[idx]


# ------------------------------------------------------------------------------------ streams


@setup(STREAMS)
@dataset
class DecodesFromKeyFrames(TinyData):
    """Seeks to a key frame, and goes on from the last frame if that is nearer: other roundings."""

    place, frame = -1, 0.

    def prepare_data(self, idx):
        if idx <= self.place:
            self.place, self.frame = idx - idx % 4 - 1, 0.
        while self.place < idx:
            self.place += 1
            self.frame = np.float32(.5 * self.frame + np.sin(self.place))
        return plus(super().prepare_data(idx), float(self.frame))


# ------------------------------------------------------------------------------ orders and sizes


@sampler
class AsManyAsThereAre(torch.utils.data.Sampler):
    def __init__(self, dataset, **kwargs):
        self.dataset, self.epoch = dataset, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.RandomState(self.epoch).permutation(len(self.dataset)))

    def __len__(self):
        return len(self.dataset)


@hook
class AddsImages(Hook):
    def after_train_epoch(self, runner):
        data = runner.train_dataloader.dataset.data_list
        data += [dict(number=len(data) + number, label=number) for number in range(2)]


@setup(ORDERS)
def images_are_added(cfg):
    """Each epoch is one batch longer than the last."""
    use_all(cfg, AsManyAsThereAre, AddsImages)


@sampler
class KeysOfImages(torch.utils.data.Sampler):
    def __init__(self, dataset, **kwargs):
        self.size = len(dataset)

    def __iter__(self):
        return iter([f'{number}.jpg' for number in range(self.size)])

    def __len__(self):
        return self.size


@dataset
class ByKey(TinyData):
    def prepare_data(self, key):
        return super().prepare_data(int(key.split('.')[0]))


@setup(ORDERS)
def keys_instead_of_indices(cfg):
    use_all(cfg, ByKey, KeysOfImages)


# ------------------------------------------------------------------------------------- progress


def scaled(results, strength):
    gain = np.float32(1 + strength * np.random.rand())
    return dict(results, img=results['img'] * gain)


@transform
class StrengthOfAVariable(BaseTransform):
    def transform(self, results):
        return scaled(results, float(os.environ.get('STRENGTH', '0')))


@hook
class SetsAVariable(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        os.environ['STRENGTH'] = str(.1 * max(0, runner.iter - 10))


@setup(PROGRESS)
def strength_in_a_variable(cfg):
    use_all(cfg, StrengthOfAVariable, SetsAVariable)


@hook
class SetsAVariableAhead(Hook):
    """For the next batch, so that a resumed run has it as well."""

    def set(self, iteration):
        os.environ['STRENGTH'] = str(.1 * max(0, iteration - 10))

    def before_train(self, runner):
        self.set(runner.iter)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.set(runner.iter + 1)


@setup(PROGRESS)
def strength_of_the_next_batch(cfg):
    use_all(cfg, StrengthOfAVariable, SetsAVariableAhead)


# ----------------------------------------------------------------------------------- background


@setup(BACKGROUND)
@dataset
class LoadsAsTheyComplete(TinyData):
    """Parts of a sample, in the order in which they are done."""

    def part(self, number):
        return torch.from_numpy(np.concatenate(images() * (1 + number % 3 * 8))).sum() + number

    def prepare_data(self, idx):
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            tasks = [pool.submit(self.part, number) for number in range(6)]
            parts = [task.result() for task in concurrent.futures.as_completed(tasks)]
        return plus(super().prepare_data(idx), torch.stack(parts)[:2].sum())


def negative(image):
    return -image


@setup(BACKGROUND, variations=UNWORKED)  # workers may not have children
@dataset
class PoolWithinATransform(TinyData):
    pool = None

    def prepare_data(self, idx):
        self.pool = self.pool or concurrent.futures.ProcessPoolExecutor(1)
        image = self.pool.submit(negative, images()[idx]).result()
        return plus(super().prepare_data(idx), torch.from_numpy(image))


# ------------------------------------------------------------------------------------- wrapped


class Part(torch.utils.data.Dataset):
    def __init__(self, first):
        self.first, self.draw = first, np.random.default_rng()

    def __len__(self):
        return 8

    def __getitem__(self, idx):
        image = torch.from_numpy(images()[self.first + idx]) * self.draw.random(dtype=np.float32)
        return dict(inputs=image, label=torch.tensor(idx % 3))


@setup(WRAPPED)
@dataset
class PartsMadeLazily(torch.utils.data.Dataset):
    """A concatenation whose parts are made when they are read first."""

    def __init__(self, **kwargs):
        self.parts = [None, None]

    def __len__(self):
        return 16

    def __getitem__(self, idx):
        number, idx = divmod(idx, 8)
        self.parts[number] = self.parts[number] or Part(8 * number)
        return self.parts[number][idx]


@setup(WRAPPED)
@dataset
class MosaicOfItsOwn:
    """No class of MMEngine: builds another dataset, and forwards what it does not know."""

    def __init__(self, **kwargs):
        self.inner = DATASETS.build(dict(kwargs, type='TinyData'))

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, idx):
        parts = [self.inner[number] for number in (idx, *random.choices(range(16), k=3))]
        weights = np.random.dirichlet(np.ones(4))
        return plus(parts[0], sum(float(w) * part['inputs'] for w, part in zip(weights, parts)))


# -------------------------------------------------------------------------------------- travel


@dataset
class Spectra(TinyData):
    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        spectrum = torch.fft.fft2(sample.pop('inputs')).conj()
        return dict(sample, spectrum=spectrum, phase=spectrum.imag)


@preprocessor
class InvertsSpectra(TinyPreprocessor):
    def forward(self, data, training=False):
        inputs = [torch.fft.ifft2(spectrum.conj()).real + .01 * phase
                  for spectrum, phase in zip(data['spectrum'], data['phase'])]
        return super().forward(dict(inputs=inputs, label=data['label']), training)


@setup(TRAVEL)
def spectra(cfg):
    use_all(cfg, Spectra, InvertsSpectra)


class Picture(torch.Tensor):
    """With a path, as those of torchvision's transforms have a format."""


@setup(TRAVEL)
@dataset
class TensorsOfItsOwn(TinyData):
    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        picture = (sample['inputs'] * random.random()).as_subclass(Picture)
        picture.path = f'{idx}.jpg'
        return dict(sample, inputs=picture)
