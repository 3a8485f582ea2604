"""Hooks: what they draw, read and change in every iteration."""
from __future__ import annotations

import os
import random
import time
import uuid

import numpy as np
import torch
from mmengine.hooks import Hook

from .setup import hook, setup

KIND = 'hooks that draw, read the clock, or change the run'


def norm_of(runner):
    return runner.model.backbone[1]


@setup(KIND)
@hook
class ScalesTheBatch(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs'] = [x * float(np.random.default_rng().random())
                                for x in data_batch['inputs']]


@setup(KIND)
@hook
class ScalesTheBatchSeeded(Hook):
    """Multi-scale training, say: from the global generator."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs'] = [x * random.choice((.5, 1, 2)) for x in data_batch['inputs']]


@setup(KIND)
@hook
class OwnSeededGenerator(Hook):
    def __init__(self):
        self.rng = np.random.default_rng(3)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs'] = [x * float(self.rng.random()) for x in data_batch['inputs']]


@setup(KIND)
@hook
class NoiseOnWeights(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            runner.model.head.fc.bias += float(np.random.default_rng().normal()) * .01


@setup(KIND)
@hook
class NoiseOnWeightsSeeded(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            runner.model.head.fc.bias += torch.randn(3) * .01


@setup(KIND)
@hook
class AddressesInABuffer(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        norm_of(runner).running_mean += (id(object()) % 101) * 1e-5


@setup(KIND)
@hook
class RateFromTheClock(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for group in runner.optim_wrapper.param_groups:
            group['lr'] = .01 + time.time() % 1 * .01


@setup(KIND)
@hook
class RateFromTheSpeed(Hook):
    """Lowers the learning rate if an iteration has taken long."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.begun = time.perf_counter()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for group in runner.optim_wrapper.param_groups:
            group['lr'] *= 1 - (time.perf_counter() - self.begun) * .01


@setup(KIND)
@hook
class StopsByTheClock(Hook):
    """Skips what comes late: the batch is made zero in odd microseconds."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if time.time_ns() // 1000 % 2:
            data_batch['inputs'] = [x * 0 for x in data_batch['inputs']]


@setup(KIND)
@hook
class CountsIterations(Hook):
    """A counter of its own reaches the learning rate; a resume starts it again."""

    count = 0

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.count += 1
        for group in runner.optim_wrapper.param_groups:
            group['lr'] = .1 / self.count


@setup(KIND)
@hook
class FollowsTheIteration(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for group in runner.optim_wrapper.param_groups:
            group['lr'] = .1 / (1 + runner.iter)


@setup(KIND)
@hook
class KeepsTheBestLoss(Hook):
    best = float('inf')

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = float(outputs['loss'])
        if loss > self.best:
            with torch.no_grad():
                runner.model.head.fc.weight *= .99
        self.best = min(self.best, loss)


@setup(KIND)
@hook
class AveragesOfItsOwn(Hook):
    """Averages weights by hand, and pulls the model towards them."""

    def before_train(self, runner):
        self.average = runner.model.head.fc.weight.detach().clone()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            weight = runner.model.head.fc.weight
            self.average.mul_(.9).add_(weight, alpha=.1)
            weight.lerp_(self.average, .1)


@setup(KIND)
@hook
class ReseedsEverything(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)


@setup(KIND)
@hook
class ReseedsFromEntropy(Hook):
    """mmrepro seeds again behind all hooks of this moment."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        random.seed(), np.random.seed(), torch.seed()


@setup(KIND)
@hook
class RestartsFromTheClock(Hook):
    """Shuffles the optimizer's momentum away, by chance."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if uuid.uuid4().int % 3 == 0:
            runner.optim_wrapper.optimizer.state.clear()


@setup(KIND)
@hook
class ReadsAVariable(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        scale = float(os.environ.get('SHAPES_GAIN', '1'))
        data_batch['inputs'] = [x * scale for x in data_batch['inputs']]


@setup(KIND)
@hook
class PrintsTheTime(Hook):
    """Reads the clock, writes a file: nothing of it reaches the training."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with open(os.path.join(runner.work_dir, 'times.txt'), 'a') as file:
            file.write(f'{time.time()} {uuid.uuid4()}\n')


@setup(KIND)
@hook
class WeightDecayByHand(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for parameter in runner.model.parameters():
                parameter.mul_(.999)


@setup(KIND)
@hook
class GradientNoise(Hook):
    """Hooks on gradients, registered once."""

    def before_train(self, runner):
        runner.model.head.fc.weight.register_hook(
            lambda grad: grad + float(np.random.default_rng().normal()) * .01)
