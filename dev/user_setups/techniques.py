"""Techniques of papers and tutorials, and what they keep."""
from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import random
from collections import deque

import numpy as np
import torch
from faults.tiny import Tiny
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import DefaultOptimWrapperConstructor, OptimWrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mmrepro

from .averages import ADAPTERS, AVERAGES
from .optimization import OPTIMIZER
from .recipes import EACH, FILES
from .setup import (
    hook,
    model,
    optimizer,
    setup,
    wrapper,
)
from .steps import KEPT, SAVED, Extra

# ---------------------------------------------------------------------------------- adapters


class LowRank(nn.Module):
    def __init__(self, rows, columns):
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, columns) * .1)
        self.up = nn.Parameter(torch.zeros(rows, 2))

    def forward(self, weight):
        return weight + self.up @ self.down


@setup(ADAPTERS)
@model
class AdapterAsParametrization(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.fc.requires_grad_(False)
        parametrize.register_parametrization(self.head.fc, 'weight', LowRank(3, 4))


class Adapted(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.down, self.up = layer, nn.Linear(4, 2), nn.Linear(2, 3)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.layer(x) + self.up(self.down(x))


@setup(ADAPTERS)
@hook
class WrapsALayerBeforeTheRun(Hook):
    """As libraries of adapters do: freezes all else, and gives the optimizer what is new."""

    def before_run(self, runner):
        runner.model.requires_grad_(False)
        runner.model.head.fc = Adapted(runner.model.head.fc)
        group, = runner.optim_wrapper.optimizer.param_groups
        group['params'] = [value for value in runner.model.parameters() if value.requires_grad]


# ------------------------------------------------------------------------- what a step leaves


@setup(KEPT)
@model
class GradNorm(Extra):
    """Weights of losses follow the norms of their gradients, and the first losses."""

    first = None

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.weights = nn.Parameter(torch.ones(2))

    def extra(self, inputs, label, loss):
        return 1.

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        losses = torch.stack([*self(**data, mode='loss').values()])
        if self.first is None:
            self.first = losses.detach()
        norms = torch.stack([torch.autograd.grad(
            loss, self.head.fc.weight, retain_graph=True, create_graph=True)[0].norm()
            for loss in self.weights * losses])
        rates = losses.detach() / self.first
        target = (norms.mean() * (rates / rates.mean()).sqrt()).detach()
        gradient, = torch.autograd.grad(
            (norms - target).abs().sum(), self.weights, retain_graph=True)
        (self.weights * losses).sum().backward()
        self.weights.grad = gradient
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return dict(loss=losses.sum().detach())


@setup(KEPT)
@model
class WeighsLossesByTheLastEpochs(Extra):
    """Dynamic weight average: means of losses in two epochs."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.means, self.losses, self.epoch = deque(maxlen=2), [], 0

    def extra(self, inputs, label, loss):
        return 1.

    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        if mode != 'loss':
            return losses
        epoch = MessageHub.get_current_instance().get_info('epoch')
        if epoch != self.epoch:
            self.means.append(np.mean(self.losses, axis=0))
            self.losses, self.epoch = [], epoch
        self.losses.append([float(value) for value in losses.values()])
        if len(self.means) < 2:
            return losses
        weights = torch.tensor(self.means[1] / self.means[0]).softmax(0) * 2
        return {name: value * weight for (name, value), weight in zip(losses.items(), weights)}


@setup(KEPT)
@model
class OptimizersInTheBackwardPass(Tiny):
    """Each parameter steps as soon as it has its gradient, which saves memory."""

    optimizers = None

    def train_step(self, data, optim_wrapper):
        if self.optimizers is None:
            self.optimizers = {value: torch.optim.AdamW([value], .01)
                               for value in self.parameters()}
            for value in self.parameters():
                value.register_post_accumulate_grad_hook(self.step)
        loss, logged = self.parse_losses(self(**self.data_preprocessor(data, True), mode='loss'))
        loss.backward()
        return logged

    def step(self, value):
        self.optimizers[value].step()
        self.optimizers[value].zero_grad()


@setup(KEPT)
@model
class ReplaysOldImages(Extra):
    """A reservoir of what it has seen."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.reservoir, self.seen = [], 0

    def extra(self, inputs, label, loss):
        for image in inputs:
            self.seen += 1
            if len(self.reservoir) < 6:
                self.reservoir.append(image)
            elif (place := random.randrange(self.seen)) < 6:
                self.reservoir[place] = image
        return self.backbone(torch.stack(random.sample(self.reservoir, 2))).mean()


# --------------------------------------------------------------------- what checkpoints keep


class Stage(enum.Enum):
    WARMUP, TRAIN, COOL = 'warmup', 'train', 'cool'


FACTORS = {Stage.WARMUP: .1, Stage.TRAIN: 1., Stage.COOL: .01}


@dataclasses.dataclass
class Course:
    stage: Stage = Stage.WARMUP
    steps: int = 0
    losses: list = dataclasses.field(default_factory=list)

    def follow(self, loss):
        self.steps += 1
        self.losses = [*self.losses[-3:], float(loss)]
        if self.steps % 5 == 0:
            self.stage = random.choice([*Stage])
        return FACTORS[self.stage] * sum(self.losses)


class Follows(Extra):
    course: Course

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.course = Course()

    def extra(self, inputs, label, loss):
        return self.course.follow(loss)


@setup(SAVED)
@model
class DataclassWithAnEnum(Follows):
    pass


mmrepro.keep_attributes(DataclassWithAnEnum, 'course')


@setup(SAVED)
@model
class PartsOfADataclass(Follows):
    pass


mmrepro.keep_attributes(PartsOfADataclass, 'course.stage', 'course.steps', 'course.losses')


@setup(SAVED)
@model
class TableOfTheClasses(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = np.zeros(3, [('seen', 'i4'), ('loss', 'f4')])

    def extra(self, inputs, label, loss):
        for number in label.tolist():
            self.table[number]['seen'] += 1
            self.table[number]['loss'] += float(loss)
        return float((self.table['loss'] / np.maximum(self.table['seen'], 1)).sum())


mmrepro.keep_attributes(TableOfTheClasses, 'table')


class Handle:
    """Of a library: has slots, and raises whatever it is asked for."""
    __slots__ = ('value', )
    __hash__ = None

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise TypeError('handles are not compared')

    def __getattr__(self, name):
        raise RuntimeError(f'no {name}')

    def __bool__(self):
        raise ValueError('handles have no truth')

    def __repr__(self):
        raise RuntimeError('no text')


@setup(SAVED)
@model
class HandleOfALibrary(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.handle = Handle(.5)

    def extra(self, inputs, label, loss):
        return self.handle.value


@setup(FILES)
@hook
class ObjectsInCheckpoints(Hook):
    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['args'] = argparse.Namespace(rate=.1)


@setup(FILES)
@hook
class DictOfListsInTheHub(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        losses = runner.message_hub.runtime_info.get('losses', collections.defaultdict(list))
        losses[runner.epoch].append(float(outputs['loss']))
        runner.message_hub.update_info('losses', losses)


# --------------------------------------------------------------------------------- averages


@setup(AVERAGES)
@hook
class AveragesOfTorch(Hook):
    """Beside the model, in checkpoints, and in its place while it is validated."""

    def before_run(self, runner):
        self.average = AveragedModel(
            runner.model, multi_avg_fn=get_ema_multi_avg_fn(.9), use_buffers=True)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.average.update_parameters(runner.model)

    def before_val_epoch(self, runner):
        ours, averages = runner.model.state_dict(), self.average.module.state_dict()
        for name, value in ours.items():
            before = value.clone()
            value.copy_(averages[name])
            averages[name].copy_(before)

    def after_val_epoch(self, runner, metrics=None):
        self.before_val_epoch(runner)

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['average'] = self.average.state_dict()

    def after_load_checkpoint(self, runner, checkpoint):
        self.average.load_state_dict(checkpoint['average'])


@setup(AVERAGES)
@hook
class PullsTowardsTwoAverages(Hook):
    def before_run(self, runner):
        self.averages = [ExponentialMovingAverage(runner.model.backbone, momentum=momentum)
                         for momentum in (.5, .01)]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for average in self.averages:
            average.update_parameters(runner.model.backbone)
            with torch.no_grad():
                for value, mean in zip(runner.model.backbone.parameters(), average.parameters()):
                    value.lerp_(mean, .1)


# -------------------------------------------------------------------- optimizers and wrappers


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class RatesByDepth(DefaultOptimWrapperConstructor):
    """Layer-wise decay of the learning rate."""

    def add_params(self, params, module, **kwargs):
        groups = {}
        for name, value in module.named_parameters():
            depth = 3 if name.startswith('head') else int(name.split('.')[1])
            key = depth, 0. if value.ndim == 1 else .05
            groups.setdefault(key, []).append(value)
        params.extend(dict(params=values, weight_decay=decay, lr=self.base_lr * .7 ** (3 - depth))
                      for (depth, decay), values in groups.items())


@setup(OPTIMIZER)
def rates_by_depth(cfg):
    cfg.optim_wrapper = dict(constructor='RatesByDepth', optimizer=dict(type='AdamW', lr=.01))


@setup(OPTIMIZER)
@optimizer
class LearnsItsRate(torch.optim.Optimizer):
    """Its estimate of the rate is an attribute."""

    def __init__(self, params, lr=1.):
        super().__init__(params, dict(lr=lr))
        self.estimate = .01

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            values = [value for value in group['params'] if value.grad is not None]
            moved = [self.state[value].setdefault('first', value.clone()) - value
                     for value in values]
            gain = sum(float((value.grad * way).sum()) for value, way in zip(values, moved))
            size = sum(float(value.grad.abs().sum()) for value in values)
            self.estimate = max(1.01 * self.estimate, gain / (size + 1e-8))
            for value in values:
                value.sub_(group['lr'] * self.estimate * value.grad)


class SlowGradients(OptimWrapper):
    """Adds an average of the last gradients to each."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.slow = {}

    def step(self, **kwargs):
        values = [value for group in self.param_groups for value in group['params']]
        for number, value in enumerate(values):
            if value.grad is not None:
                before = self.slow.setdefault(number, torch.zeros_like(value.grad))
                before.lerp_(value.grad, .1)
                value.grad.add_(before, alpha=2.)
        super().step(**kwargs)


@setup(OPTIMIZER)
@wrapper
class SlowGradientsAreLost(SlowGradients):
    pass


@setup(OPTIMIZER)
@wrapper
class SlowGradientsAreSaved(SlowGradients):
    def state_dict(self):
        return dict(super().state_dict(), slow=self.slow)

    def load_state_dict(self, state_dict):
        self.slow = state_dict['slow']
        super().load_state_dict({name: value for name, value in state_dict.items()
                                 if name != 'slow'})


@setup(OPTIMIZER)
def rate_that_is_far_too_large(cfg):
    """The weights become infinite; the last line says so."""
    cfg.optim_wrapper.optimizer.lr = 1e30


@setup(EACH)
@hook
class RestsInBlocks(Hook):
    """The backbone rests for five iterations, then trains for five."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter % 5 == 0:
            runner.model.backbone.requires_grad_(runner.iter % 10 == 0)
