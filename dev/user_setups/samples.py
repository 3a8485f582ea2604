"""Transforms and datasets: what one sample leaves for the next."""
from __future__ import annotations

import contextvars
import functools
import itertools
import os
import random
import tempfile
import threading
import weakref
from collections import OrderedDict, deque

import numpy as np
import torch
from faults.tiny import TinyData
from mmcv.transforms import BaseTransform

from .setup import dataset, setup, transform

KEPT = 'state that an earlier sample leaves'


class Brighter(BaseTransform):
    """Adds ``value(img)`` to the image."""

    def transform(self, results):
        results['img'] = results['img'] + np.float32(self.value(results['img'], results))
        return results


@setup(KEPT)
@transform
class MeanOfTheFirst(Brighter):
    reference = None

    def value(self, img, results):
        if self.reference is None:
            self.reference = float(img.mean())
        return self.reference


@setup(KEPT)
@transform
class ColourPerClass(Brighter):
    def __init__(self):
        self.colours = {}

    def value(self, img, results):
        return self.colours.setdefault(results['label'], random.random())


@setup(KEPT)
@transform
class CachedDraw(Brighter):
    @functools.cache  # noqa: B019
    def draw(self, label):
        return random.random()

    def value(self, img, results):
        return self.draw(results['label'])


@functools.lru_cache(maxsize=4)
def strength_of(label):
    return np.random.uniform()


@setup(KEPT)
@transform
class CachedFunctionOfTheModule(Brighter):
    def value(self, img, results):
        return strength_of(results['label'])


@setup(KEPT)
@transform
class CachedProperty(Brighter):
    @functools.cached_property
    def gain(self):
        return random.gauss(0, 1)

    def value(self, img, results):
        return self.gain


@setup(KEPT)
@transform
class LargestSoFar(Brighter):
    largest = 0.

    def value(self, img, results):
        self.largest = max(self.largest, float(np.abs(img).max()))
        return self.largest


@setup(KEPT)
@transform
class RunningMean(Brighter):
    def __init__(self):
        self.mean = np.zeros(3, np.float32)

    def value(self, img, results):
        self.mean += 0.1 * (img.mean((1, 2)) - self.mean)
        return self.mean[:, None, None]


@setup(KEPT)
@transform
class PastesTheLast(Brighter):
    def __init__(self):
        self.last = deque(maxlen=3)

    def value(self, img, results):
        pasted = self.last[0] if self.last else 0
        self.last.append(img.copy())
        return pasted


class Bank:
    images: OrderedDict = OrderedDict()


@setup(KEPT)
@transform
class BankOfTheClass(Brighter):
    def value(self, img, results):
        Bank.images[results['label']] = img.mean()
        return sum(Bank.images.values())


@setup(KEPT)
@transform
class EveryThird(Brighter):
    def __init__(self):
        self.turn = itertools.cycle((0., 0., 1.))

    def value(self, img, results):
        return next(self.turn)


def _ramp():
    level = 0.
    while True:
        yield level
        level += .01


@setup(KEPT)
@transform
class GeneratorFunction(Brighter):
    def __init__(self):
        self.ramp = _ramp()

    def value(self, img, results):
        return next(self.ramp)


@setup(KEPT)
@transform
class ShuffledOnce(Brighter):
    order = None

    def value(self, img, results):
        if self.order is None:
            self.order = np.random.permutation(16)
        return self.order[results['number']]


@setup(KEPT)
@transform
class WarmUpOfSamples(Brighter):
    seen = 0

    def value(self, img, results):
        self.seen += 1
        return self.seen > 9


@setup(KEPT)
@transform
class DefaultArgument(Brighter):
    def value(self, img, results, kept=[]):  # noqa: B006
        kept.append(float(img.mean()))
        return sum(kept[-2:])


LOCAL = threading.local()


@setup(KEPT)
@transform
class ThreadLocal(Brighter):
    def value(self, img, results):
        LOCAL.count = getattr(LOCAL, 'count', 0) + 1
        return LOCAL.count


COUNT: contextvars.ContextVar[int] = contextvars.ContextVar('count', default=0)


@setup(KEPT)
@transform
class ContextVariable(Brighter):
    def value(self, img, results):
        COUNT.set(COUNT.get() + 1)
        return COUNT.get()


@setup(KEPT)
@transform
class VariableOfTheEnvironment(Brighter):
    def value(self, img, results):
        count = int(os.environ.get('SAMPLES_SEEN', '0')) + 1
        os.environ['SAMPLES_SEEN'] = str(count)
        return count


@setup(KEPT)
@transform
class CacheFile(Brighter):
    """Keeps the first sample of each class in a file of the system's temporary folder."""

    def value(self, img, results):
        path = os.path.join(tempfile.gettempdir(), f'palette-{os.getpid()}-{results["label"]}.npy')
        if not os.path.exists(path):
            np.save(path, img)
        return np.load(path).mean()


class FileOfTorch(BaseTransform):
    """Keeps the first sample of each class in a folder of the run."""

    def __init__(self, folder):
        self.folder = folder

    def transform(self, results):
        os.makedirs(self.folder, exist_ok=True)
        path = os.path.join(self.folder, f'{results["label"]}.pt')
        if not os.path.exists(path):
            torch.save(float(results['img'].mean()), path)
        results['img'] = results['img'] + np.float32(torch.load(path))
        return results


@setup(KEPT, variations=('again', 'workers'))  # a resume in another folder is refused
def file_of_torch(cfg):
    cfg.train_dataloader.dataset.pipeline.insert(
        2, dict(type=FileOfTorch, folder=os.path.join(cfg.work_dir, 'cache')))


PALETTE: dict[int, float] = {}


@setup(KEPT)
@transform
class PaletteOfTheModule(Brighter):
    def value(self, img, results):
        return PALETTE.setdefault(results['label'], float(img.mean()))


@setup(KEPT)
@transform
class ReferenceOfTheClass(Brighter):
    reference = None

    def value(self, img, results):
        if self.reference is None:
            type(self).reference = float(img.mean())
        return self.reference


KNOWN: weakref.WeakValueDictionary = weakref.WeakValueDictionary()


class Image:
    def __init__(self, img):
        self.img = img


@setup(KEPT)
@transform
class WeakCache(Brighter):
    def value(self, img, results):
        found = KNOWN.get(results['label'])
        if found is None:
            found = KNOWN[results['label']] = self.strong = Image(img)
        return found.img.mean()


@setup(KEPT)
@transform
class ChangesItsOwnSetting(Brighter):
    strength = .5

    def value(self, img, results):
        self.strength *= .9
        return self.strength


@setup(KEPT)
@dataset
class MemoOfTheDataset(TinyData):
    def __init__(self, **kwargs):
        self.memo = {}
        super().__init__(**kwargs)

    def get_data_info(self, i):
        info = super().get_data_info(i)
        info['number'] = self.memo.setdefault(info['label'], random.randrange(8))
        return info


@setup(KEPT)
@dataset
class EditsItsAnnotations(TinyData):
    def prepare_data(self, i):
        self.data_list[i]['number'] = (self.data_list[i]['number'] + 1) % 8
        return super().prepare_data(i)


@setup(KEPT)
@dataset
class HardExamples(TinyData):
    """Gives the hardest sample so far instead of every fourth one."""

    hardest, asked = 0, 0

    def __getitem__(self, i):
        self.asked += 1
        self.hardest = max(self.hardest, i)
        return super().__getitem__(self.hardest if self.asked % 4 == 0 else i)


@setup(KEPT)
@dataset
class CachesWhatItLoaded(TinyData):
    """As many users do to save the disk: the random transforms are cached as well."""

    def __init__(self, **kwargs):
        self.cache = {}
        super().__init__(**kwargs)

    def prepare_data(self, i):
        if i not in self.cache:
            self.cache[i] = super().prepare_data(i)
        return self.cache[i]
