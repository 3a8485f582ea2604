"""Models and losses: what a step leaves for later ones, and what checkpoints keep of it."""
from __future__ import annotations

import functools
import itertools
import random
from collections import deque

import numpy as np
import torch
from faults.tiny import Tiny
from mmengine.logging import MessageHub
from torch import nn

import mmrepro

from .setup import model, setup

KEPT = 'state that a step leaves'
SAVED = 'state that a checkpoint keeps'


class Extra(Tiny):
    """Adds ``extra(inputs, label, loss)`` to the losses."""

    def forward(self, inputs, label, mode='tensor'):
        result = super().forward(inputs, label, mode)
        if mode == 'loss':
            weight = self.head.fc.weight.pow(2).mean()
            result['loss_extra'] = self.extra(inputs, label, result['loss']) * weight
        return result


@setup(KEPT)
@model
class AfterAWarmUp(Extra):
    steps = 0

    def extra(self, inputs, label, loss):
        self.steps += 1
        return float(self.steps > 5)


@setup(KEPT)
@model
class CountedSteps(Extra):
    steps = 0

    def extra(self, inputs, label, loss):
        self.steps += 1
        return self.steps * .1


@setup(KEPT)
@model
class SmallestLoss(Extra):
    smallest = float('inf')

    def extra(self, inputs, label, loss):
        self.smallest = min(self.smallest, float(loss.detach()))
        return self.smallest


@setup(KEPT)
@model
class InitializedFromData(Extra):
    centre = None

    def extra(self, inputs, label, loss):
        if self.centre is None:
            self.centre = inputs.mean().detach()
        return self.centre


@setup(KEPT)
@model
class RefreshedEveryFive(Extra):
    steps, target = 0, 0.

    def extra(self, inputs, label, loss):
        if self.steps % 5 == 0:
            self.target = float(inputs.std())
        self.steps += 1
        return self.target


@setup(KEPT)
@model
class AverageOfTheLoss(Extra):
    average = 0.

    def extra(self, inputs, label, loss):
        self.average = .9 * self.average + .1 * loss.detach()
        return self.average


@setup(KEPT)
@model
class QueueOfFeatures(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.queue = deque(maxlen=4)

    def extra(self, inputs, label, loss):
        self.queue.append(inputs.mean().detach())
        return torch.stack(list(self.queue)).sum()


@setup(KEPT)
@model
class PrototypePerClass(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.prototypes = {}

    def extra(self, inputs, label, loss):
        for image, one in zip(inputs, label.tolist()):
            self.prototypes[one] = image.mean().detach()
        return sum(self.prototypes.values())


@setup(KEPT)
@model
class ArrayOfCounts(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.counts = np.zeros(3)

    def extra(self, inputs, label, loss):
        self.counts += np.bincount(label.numpy(), minlength=3)
        return float(self.counts.max())


@setup(KEPT)
@model
class BufferThatIsNotSaved(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('mean', torch.zeros(()), persistent=False)

    def extra(self, inputs, label, loss):
        self.mean.mul_(.9).add_(inputs.mean() * .1)
        return self.mean.clone()


@setup(KEPT)
@model
class TensorAttribute(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = torch.zeros(())

    def extra(self, inputs, label, loss):
        self.mean = .9 * self.mean + .1 * inputs.mean()
        return self.mean


class Meter:
    def __init__(self):
        self.total = 0.

    def __call__(self, value):
        self.total += value
        return self.total


@setup(KEPT)
@model
class MeterOfItsOwn(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.meter = Meter()

    def extra(self, inputs, label, loss):
        return self.meter(float(inputs.mean()))


@setup(KEPT)
@model
class BoundMethod(Extra):
    """The state is behind a function that the model holds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.measure = functools.partial(Meter().__call__)

    def extra(self, inputs, label, loss):
        return self.measure(float(inputs.mean()))


def counter():
    count = 0

    def step():
        nonlocal count
        count += 1
        return count
    return step


@setup(KEPT)
@model
class Closure(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = counter()

    def extra(self, inputs, label, loss):
        return self.count() * .1


@setup(KEPT)
@model
class IteratorOfTheModel(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.schedule = itertools.count()

    def extra(self, inputs, label, loss):
        return next(self.schedule) * .1


STEPS = 0


@setup(KEPT)
@model
class GlobalOfTheModule(Extra):
    def extra(self, inputs, label, loss):
        global STEPS
        STEPS += 1
        return STEPS * .1


@setup(KEPT)
@model
class GlobalBehindAThreshold(Extra):
    seen = []

    def extra(self, inputs, label, loss):
        type(self).seen.append(1)
        return float(len(self.seen) > 6)


@functools.cache
def first_of(label):
    return random.random()


@setup(KEPT)
@model
class CachedDrawPerClass(Extra):
    def extra(self, inputs, label, loss):
        return first_of(int(label[0]))


@setup(KEPT)
@model
class GeneratorMadeInAStep(Extra):
    rng = None

    def extra(self, inputs, label, loss):
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(1)
        return torch.rand((), generator=self.rng)


@setup(KEPT)
@model
class TemperatureThatDecays(Extra):
    temperature = 2.

    def extra(self, inputs, label, loss):
        self.temperature = max(.5, self.temperature * .9)
        return self.temperature


@setup(KEPT)
@model
class PlateauOfTheLoss(Extra):
    """Changes its weight when the loss has not fallen for two steps."""

    best, bad, weight = float('inf'), 0, 1.

    def extra(self, inputs, label, loss):
        value = float(loss.detach())
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        if self.bad > 1:
            self.weight, self.bad = self.weight * .5, 0
        return self.weight


# -------------------------------------------------------------------- kept by a checkpoint


@setup(SAVED)
@model
class CountInABuffer(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('steps', torch.zeros(()))

    def extra(self, inputs, label, loss):
        self.steps += 1
        return self.steps.clone() * .1


@setup(SAVED)
@model
class ExtraState(Extra):
    average = 0.

    def get_extra_state(self):
        return dict(average=self.average)

    def set_extra_state(self, state):
        self.average = state['average']

    def extra(self, inputs, label, loss):
        self.average = .9 * self.average + .1 * float(loss.detach())
        return self.average


class SavesByItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x * self.count * .1

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + 'count'] = torch.tensor(self.count)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if prefix + 'count' in state_dict:
            self.count = int(state_dict.pop(prefix + 'count'))
        super()._load_from_state_dict(state_dict, prefix, *args)


@setup(SAVED)
@model
class PartThatSavesByItself(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.part = SavesByItself()

    def extra(self, inputs, label, loss):
        return self.part(loss.detach())


@setup(SAVED)
@model
class StateDictHooks(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.count = 0
        self._register_state_dict_hook(self._save)
        self._register_load_state_dict_pre_hook(self._load)

    def _save(self, module, state, prefix, metadata):
        state[prefix + 'count'] = torch.tensor(self.count)

    def _load(self, state, prefix, *args):
        if prefix + 'count' in state:
            self.count = int(state.pop(prefix + 'count'))

    def extra(self, inputs, label, loss):
        self.count += 1
        return self.count * .1


def keeping(*names):
    """Return a decorator of a class of which checkpoints keep these attributes."""
    def decorate(cls):
        mmrepro.keep_attributes(cls, *names)
        return cls
    return decorate


@setup(SAVED)
@model
@keeping('steps')
class RegisteredAttribute(Extra):
    steps = 0

    def extra(self, inputs, label, loss):
        self.steps += 1
        return self.steps * .1


@setup(SAVED)
@model
class FrozenParameterAsMemory(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.centre = nn.Parameter(torch.zeros(()), requires_grad=False)

    def extra(self, inputs, label, loss):
        with torch.no_grad():
            self.centre.mul_(.9).add_(inputs.mean(), alpha=.1)
        return self.centre.clone()


@setup(SAVED)
@model
class MessageHubAsMemory(Extra):
    def extra(self, inputs, label, loss):
        hub = MessageHub.get_current_instance()
        total = hub.runtime_info.get('total', 0.) + float(inputs.mean())
        hub.update_info('total', total)
        return total


@setup(SAVED)
@model
class IterationOfTheHub(Extra):
    """A schedule that follows the iteration, as the heads of mmdet that know it."""

    def extra(self, inputs, label, loss):
        return .1 * MessageHub.get_current_instance().get_info('iter')


@setup(SAVED)
@model
class ComplexBuffer(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('phase', torch.zeros(2, dtype=torch.complex64))

    def extra(self, inputs, label, loss):
        self.phase += torch.complex(inputs.mean(), inputs.std())
        return self.phase.abs().sum()


@setup(SAVED)
@model
class SharedModule(Extra):
    """One module in two places."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = nn.BatchNorm2d(3)
        self.again = nn.ModuleList([self.norm])

    def extra(self, inputs, label, loss):
        return self.again[0](self.norm(inputs)).std()


@setup(SAVED)
@model
class LastPredictions(Extra):
    """Keeps tensors of a step for logging; no step reads them."""

    def extra(self, inputs, label, loss):
        self.last = dict(inputs=inputs.detach(), losses=[loss.detach()])
        self.log = getattr(self, 'log', 0) + 1
        return 1.


@setup(SAVED)
@model
class CacheOfGrids(Extra):
    """Caches what depends on the size of the image only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.grids = {}

    def extra(self, inputs, label, loss):
        size = tuple(inputs.shape[2:])
        if size not in self.grids:
            self.grids[size] = torch.linspace(0, 1, size[0] * size[1]).view(size)
        return (inputs * self.grids[size]).mean()
