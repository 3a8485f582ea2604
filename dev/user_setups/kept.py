"""Samples and steps that keep something where no list of places would look for it."""
from __future__ import annotations

import functools
import json
import os
import random
import threading
import time
import weakref

import cv2
import numpy as np
import torch
from faults.tiny import TinyData, TinyPack
from mmengine.logging import MessageHub
from torch import nn

from .samples import Brighter
from .setup import REGISTRIES, dataset, model, setup, transform
from .steps import Extra

OF_SAMPLES = 'places where samples keep something'
OF_STEPS = 'places where steps keep something'
LOGGED = 'what is only logged, or put back'


# ----------------------------------------------------------------------------------- samples


def static(img):
    if not hasattr(static, 'first'):
        static.first = float(img.mean())
    return static.first


@setup(OF_SAMPLES)
@transform
class StaticVariable(Brighter):
    def value(self, img, results):
        return static(img)


def kept(img, first=[]):  # noqa: B006  as users write it
    if not first:
        first.append(float(img.mean()))
    return first[0]


@setup(OF_SAMPLES)
@transform
class DefaultOfAFunction(Brighter):
    def value(self, img, results):
        return kept(img)


def remembered(img, memory):
    return memory.setdefault('first', float(img.mean()))


with_a_memory = functools.partial(remembered, memory={})


@setup(OF_SAMPLES)
@transform
class MemoryOfAPartial(Brighter):
    def value(self, img, results):
        return with_a_memory(img)


@setup(OF_SAMPLES)
@transform
class AttributeOfALibrary(Brighter):
    """Puts its reference on a module that everybody has."""

    def value(self, img, results):
        if not hasattr(json, 'user_reference'):
            json.user_reference = float(img.mean())
        return json.user_reference


class Reference:
    """A descriptor with the values of all objects."""

    def __init__(self):
        self.values = weakref.WeakKeyDictionary()

    def __get__(self, owner, cls=None):
        return self.values.get(owner)

    def __set__(self, owner, value):
        self.values[owner] = value


@setup(OF_SAMPLES)
@transform
class ValueOfADescriptor(Brighter):
    reference = Reference()

    def value(self, img, results):
        if self.reference is None:
            self.reference = float(img.mean())
        return self.reference


@setup(OF_SAMPLES)
@transform
class CopiesToItself(Brighter):
    """An object with a handle, which nobody shall copy."""

    reference = None

    def __deepcopy__(self, memo):
        return self

    def value(self, img, results):
        if self.reference is None:
            self.reference = float(img.mean())
        return self.reference


@setup(OF_SAMPLES)
@transform
class ModuleWithAReference(nn.Module):
    """A transform in the manner of torchvision v2."""

    reference = None

    def forward(self, results):
        if self.reference is None:
            self.reference = float(results['img'].mean())
        return dict(results, img=results['img'] - np.float32(self.reference))


@setup(OF_SAMPLES)
@transform
class ModuleThatDraws(nn.Module):
    """The same, without anything that stays."""

    def __init__(self):
        super().__init__()
        self.register_buffer('weights', torch.linspace(.5, 1.5, 3).view(3, 1, 1))

    def forward(self, results):
        weights = (self.weights * (1 + torch.rand(()))).numpy()
        return dict(results, img=results['img'] * weights)


@setup(OF_SAMPLES)
@transform
class HoldsModulesOfPython(Brighter):
    def __init__(self):
        self.library, self.other = cv2, json

    def value(self, img, results):
        return float(self.library.GaussianBlur(np.ascontiguousarray(img[0]), (3, 3), 0).mean())


class AttrDict(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


@setup(OF_SAMPLES)
@transform
class SettingsInAnAttrDict(Brighter):
    def __init__(self):
        self.settings = AttrDict(low=.1, high=.2)

    def value(self, img, results):
        return random.uniform(self.settings.low, self.settings.high)


@setup(OF_SAMPLES)
@dataset
class CountsUnderALock(TinyData):
    """It cannot be copied."""

    def __init__(self, **kwargs):
        self.lock, self.count = threading.Lock(), 0
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        with self.lock:
            self.count += 1
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] * (1 + .01 * self.count))


@setup(OF_SAMPLES)
@dataset
class LoadsUnderALock(TinyData):
    def __init__(self, **kwargs):
        self.lock = threading.Lock()
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        with self.lock:
            return super().prepare_data(idx)


@setup(OF_SAMPLES)
@dataset
class CachedProperties(TinyData):
    """Computed when they are first read, from settings alone."""

    @functools.cached_property
    def gains(self):
        return np.linspace(.5, 1.5, self.size, dtype=np.float32)

    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] * self.gains[idx])


@setup(OF_SAMPLES)
@dataset
class CachedPropertyOfTheFirstImage(TinyData):
    def gain_of(self, sample):
        self.__dict__.setdefault('gain', float(sample['inputs'].mean()))
        return self.gain

    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] + self.gain_of(sample))


@setup(OF_SAMPLES)
@dataset
class LoadsTheNextAhead(TinyData):
    """A thread computes what does not depend on chance of the next sample."""

    def __init__(self, **kwargs):
        self.ahead = {}
        super().__init__(**kwargs)

    def compute(self, idx):
        self.ahead[idx] = float(np.sin(idx))

    def prepare_data(self, idx):
        if idx not in self.ahead:
            self.compute(idx)
        thread = threading.Thread(target=self.compute, args=((idx + 1) % self.size, ))
        thread.start()
        sample = super().prepare_data(idx)
        thread.join()
        return dict(sample, inputs=sample['inputs'] + self.ahead.pop(idx))


class PacksTheTime(TinyPack):
    def transform(self, results):
        return dict(super().transform(results), loaded_at=time.time())


@setup(LOGGED)
def field_that_no_model_reads(cfg):
    REGISTRIES['transform'].register_module(module=PacksTheTime, force=True)
    cfg.train_dataloader.dataset.pipeline[-1] = dict(type='PacksTheTime')


# ------------------------------------------------------------------------------------- steps


class Centre(nn.Module):
    """Keeps what it has seen first."""

    first = None

    def forward(self, x):
        if self.first is None:
            self.first = float(x.mean())
        return self.first


@setup(OF_STEPS)
@model
class ModuleInAList(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = [Centre()]

    def extra(self, inputs, label, loss):
        return self.hidden[0](inputs)


def smoothed(loss):
    smoothed.value = .9 * getattr(smoothed, 'value', loss) + .1 * loss
    return smoothed.value


@setup(OF_STEPS)
@model
class StaticVariableOfALoss(Extra):
    def extra(self, inputs, label, loss):
        return smoothed(float(loss))


def peak(loss, seen=[0.]):  # noqa: B006  as users write it
    seen[0] = max(seen[0], loss)
    return seen[0]


@setup(OF_STEPS)
@model
class DefaultOfALoss(Extra):
    def extra(self, inputs, label, loss):
        return peak(float(loss))


@setup(OF_STEPS)
@model
class PartialOfALoss(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.weigh = functools.partial(remembered, memory={})

    def extra(self, inputs, label, loss):
        return self.weigh(inputs)


@setup(OF_STEPS)
@model
class DescriptorOfAModel(Extra):
    reference = Reference()

    def extra(self, inputs, label, loss):
        if self.reference is None:
            self.reference = float(inputs.mean())
        return self.reference


@setup(OF_STEPS)
@model
class ClosureOfAForwardHook(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        seen = {}
        self.neck.register_forward_hook(
            lambda module, given, out: out - seen.setdefault('first', out.detach().mean()))

    def extra(self, inputs, label, loss):
        return 1


@setup(OF_STEPS)
@model
class PeakOfAGradientHook(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        largest = [0.]

        def clip(gradient):
            largest[0] = max(largest[0], float(gradient.norm()))
            return gradient / (1 + largest[0])
        self.head.fc.weight.register_hook(clip)

    def extra(self, inputs, label, loss):
        return 1


@setup(OF_STEPS)
@model
class HookThatOnlyClips(Extra):
    """A gradient hook without a memory."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.fc.weight.register_hook(lambda gradient: gradient.clamp(-.05, .05))

    def extra(self, inputs, label, loss):
        return 1


@setup(OF_STEPS)
@model
class BufferOfTheFirstStep(Extra):
    """The first step registers it; checkpoints have it."""

    def extra(self, inputs, label, loss):
        if not hasattr(self, 'centre'):
            self.register_buffer('centre', inputs.mean((0, 2, 3)))
        return (self.centre.sum() - inputs.mean())**2


@setup(OF_STEPS)
@model
class ProjectionOfTheFirstStep(Extra):
    """The same with random numbers, and checkpoints do not have it."""

    def extra(self, inputs, label, loss):
        if not hasattr(self, 'projection'):
            self.register_buffer('projection', torch.randn(3), persistent=False)
        return (inputs.mean((0, 2, 3)) @ self.projection)**2


@setup(OF_STEPS)
@model
class EnvironmentOfAStep(Extra):
    """A step writes a variable that later steps read."""

    def extra(self, inputs, label, loss):
        before = float(os.environ.get('USER_LAST_LOSS', '0'))
        os.environ['USER_LAST_LOSS'] = str(float(loss))
        return before


@setup(OF_STEPS)
@model
class HubOfItsOwn(Extra):
    """Not the hub of the run, which checkpoints have."""

    def extra(self, inputs, label, loss):
        hub = MessageHub.get_instance('user')
        before = hub.get_info('smoothed', 1.)
        hub.update_info('smoothed', .9 * before + .1 * float(loss))
        return before


@setup(OF_STEPS)
@model
class CachedPropertyOfAModel(Extra):
    @functools.cached_property
    def weights(self):
        return torch.linspace(0, 1, 3)

    def extra(self, inputs, label, loss):
        return (inputs.mean((0, 2, 3)) * self.weights).sum()


# --------------------------------------------------------------------------- logged, put back


@setup(LOGGED)
@model
class LogsItsTime(Extra):
    def forward(self, inputs, label, mode='tensor'):
        begun = time.perf_counter()
        result = super().forward(inputs, label, mode)
        if mode == 'loss':
            result['time_forward'] = torch.tensor(time.perf_counter() - begun)
        return result

    def extra(self, inputs, label, loss):
        return 1


@setup(LOGGED)
@model
class LogsASmoothedNumber(Extra):
    smoothed = 0.

    def forward(self, inputs, label, mode='tensor'):
        result = super().forward(inputs, label, mode)
        if mode == 'loss':
            self.smoothed = .9 * self.smoothed + .1 * float(result['loss'])
            result['smoothed'] = torch.tensor(self.smoothed)
        return result

    def extra(self, inputs, label, loss):
        return 1


@setup(LOGGED)
@model
class CountsPredictionsForTheLog(Extra):
    predicted = 0

    def forward(self, inputs, label, mode='tensor'):
        self.predicted += mode == 'predict'
        result = super().forward(inputs, label, mode)
        if mode == 'loss':
            result['predicted'] = torch.tensor(float(self.predicted))
        return result

    def extra(self, inputs, label, loss):
        return 1


@setup(LOGGED, variations=('again', 'not validated', 'resumed at 12'))
@model
class MergesToPredict(Extra):
    """eval() scales a weight, and train() puts it back bit for bit."""

    def train(self, mode=True):
        weight = self.head.fc.weight
        if mode != self.training:
            if mode:
                weight.data = self.unmerged
            else:
                self.unmerged, weight.data = weight.data, weight.data * 2
        return super().train(mode)

    def extra(self, inputs, label, loss):
        return 1
