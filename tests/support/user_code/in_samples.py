"""Transforms, datasets and collate functions."""
from __future__ import annotations

import functools
import os
import random
import secrets
import sys
import threading
import time
import types
import uuid

import cv2
import helper_module
import numpy as np
import torch
from faults.tiny import TinyData
from mmcv.transforms import BaseTransform
from mmcv.transforms.utils import cache_randomness
from mmengine.registry import DATASETS, FUNCTIONS

from .setup import FOUND, SAME, setup, transform

OF_MODULE = np.random.default_rng(0)
IMPORTED_LATE = types.ModuleType('user_generators')
IMPORTED_LATE.rng = np.random.default_rng(1)
sys.modules['user_generators'] = IMPORTED_LATE
SEEN: list = []


class Brighter(BaseTransform):
    """Adds ``draw()`` to the image; the rows below say where the number comes from."""

    def transform(self, results):
        results['img'] = results['img'] + np.float32(self.draw())
        return results


# --- generators that can be keyed: the same bits ------------------------------------------------

@setup(SAME)
@transform
class GeneratorBehindCacheRandomness(Brighter):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    @cache_randomness
    def _value(self):
        return self.rng.normal()

    def draw(self):
        return self._value()


def logged(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner


@setup(SAME)
@transform
class GeneratorBehindADecorator(Brighter):
    @logged
    def draw(self):
        return OF_MODULE.normal()


@setup(SAME)
@transform
class GeneratorInAStaticMethod(Brighter):
    @staticmethod
    def draw():
        return OF_MODULE.normal()


@setup(SAME)
@transform
class GeneratorInAClassMethod(Brighter):
    rng = random.Random(0)

    @classmethod
    def draw(cls):
        return cls.rng.random()


@setup(SAME)
@transform
class GeneratorInAProperty(Brighter):
    @property
    def value(self):
        return OF_MODULE.normal()

    def draw(self):
        return self.value


class Slotted:
    __slots__ = ('rng', )

    def __init__(self):
        self.rng = torch.Generator().manual_seed(1)


@setup(SAME)
@transform
class GeneratorInASlot(Brighter):
    def __init__(self):
        self.slotted = Slotted()

    def draw(self):
        return float(torch.rand((), generator=self.slotted.rng))


@setup(SAME)
@transform
class GeneratorOfAnotherModule(Brighter):
    def draw(self):
        return helper_module.rng.normal()


def with_generator(rng):
    return lambda: rng.normal()


@setup(SAME)
@transform
class GeneratorInAClosure(Brighter):
    def __init__(self):
        self.draw = with_generator(np.random.default_rng(5))


# --- what lists miss: found by a self-check -----------------------------------------------------

@setup(FOUND, 'GeneratorOfAModuleThatAMethodImports')
@transform
class GeneratorOfAModuleThatAMethodImports(Brighter):
    def draw(self):
        import user_generators
        return user_generators.rng.normal()


@setup(FOUND, 'GeneratorMadeAtTheFirstSample')
@transform
class GeneratorMadeAtTheFirstSample(Brighter):
    def draw(self):
        if not hasattr(self, 'holder'):
            self.holder = np.random.default_rng(0)
        return self.holder.normal()


@setup(FOUND, 'UnseededGenerator')
@transform
class UnseededGenerator(Brighter):
    def draw(self):
        return np.random.default_rng().normal()


@setup(FOUND, 'Secret')
@transform
class Secret(Brighter):
    def draw(self):
        return secrets.randbelow(1 << 20)


@setup(FOUND, 'UniqueNumber')
@transform
class UniqueNumber(Brighter):
    def draw(self):
        return uuid.uuid4().int % 1000003


@setup(FOUND, 'Entropy')
@transform
class Entropy(Brighter):
    def draw(self):
        return int.from_bytes(os.urandom(2), 'little')


@setup(FOUND, 'Clock')
@transform
class Clock(Brighter):
    def draw(self):
        return time.perf_counter_ns() % 1000003


@setup(FOUND, 'OpenCVsOwnGenerator')
@transform
class OpenCVsOwnGenerator(Brighter):
    def draw(self):
        noise = np.empty((1, 1), np.float32)
        cv2.randn(noise, 0, 1)
        return noise[0, 0]


@setup(FOUND, 'Counter')
@transform
class Counter(Brighter):
    def __init__(self):
        self.count = 0

    def draw(self):
        self.count += 1
        return self.count


@setup(FOUND, 'EarlierSample')
@transform
class EarlierSample(Brighter):
    """Mixes the sample before in."""

    def __init__(self):
        self.before = 0.

    def draw(self):
        return self.before

    def transform(self, results):
        results = super().transform(results)
        self.before = float(results['img'].mean())
        return results


@setup(FOUND, 'ListOfTheModule')
@transform
class ListOfTheModule(Brighter):
    def draw(self):
        SEEN.append(1)
        return len(SEEN)


@setup(FOUND, 'ThreadInTheBackground')
@transform
class ThreadInTheBackground(Brighter):
    """A thread goes on counting what the samples read."""

    def __init__(self):
        self.box, self.wanted, self.made = [0], threading.Semaphore(0), threading.Semaphore(0)
        self.thread = None

    def _count(self):
        while True:
            self.wanted.acquire()
            self.box[0] += 1
            self.made.release()

    def draw(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self._count, daemon=True)
            self.thread.start()
        self.wanted.release()
        self.made.acquire()
        return self.box[0]


@setup(FOUND, 'CountingData')
def a_dataset_that_counts(cfg):
    @DATASETS.register_module(force=True)
    class CountingData(TinyData):
        asked = 0

        def get_data_info(self, i):
            type(self).asked += 1
            return dict(super().get_data_info(i), number=self.asked)

    cfg.train_dataloader.dataset.type = 'CountingData'


# --- collate functions --------------------------------------------------------------------------

class DrawingCollate:
    def __init__(self):
        self.rng = random.Random(3)

    def __call__(self, items):
        scale = self.rng.random() + random.random()
        return dict(inputs=[item['inputs'] * scale for item in items],
                    label=[item['label'] for item in items])


@setup(SAME)
def a_collate_function_with_a_generator(cfg):
    FUNCTIONS.register_module(name='drawing_collate', module=DrawingCollate(), force=True)
    cfg.train_dataloader.collate_fn = dict(type='drawing_collate')


@setup(FOUND, 'collate')
def a_collate_function_that_counts(cfg):
    calls = [0]

    @FUNCTIONS.register_module(force=True)
    def counting_collate(items):
        calls[0] += 1
        return dict(inputs=[item['inputs'] + calls[0] for item in items],
                    label=[item['label'] for item in items])

    cfg.train_dataloader.collate_fn = dict(type='counting_collate')
