"""Optimizers, their wrappers, schedulers and clipping."""
from __future__ import annotations

import random
import time

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler
from torch.optim import SGD

from .setup import hook, optimizer, scheduler, setup, wrapper

OPTIMIZER = 'optimizers and schedulers'

BEST = float('inf')


@setup(OPTIMIZER)
@optimizer
class BranchesOnAGlobal(SGD):
    """Halves its step when the gradient is larger than the smallest so far."""

    def step(self, closure=None):
        global BEST
        norm = sum(float(p.grad.norm()) for group in self.param_groups for p in group['params'])
        if norm > BEST:
            for group in self.param_groups:
                for parameter in group['params']:
                    parameter.grad.mul_(.5)
        BEST = min(BEST, norm)
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class CountsItsSteps(SGD):
    """In an attribute that its state_dict does not have."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group['lr'] = .1 / self.steps
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class KeepsItsStateInTheState(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group['steps'] = group.get('steps', 0) + 1
            for parameter in group['params']:
                parameter.grad.div_(group['steps'])
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class NoisySteps(SGD):
    """Langevin dynamics: noise from the global generator."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group['params']:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-3)


@setup(OPTIMIZER)
@optimizer
class NoisyStepsFromEntropy(SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group['params']:
                    parameter.add_(float(np.random.default_rng().normal()), alpha=1e-3)


@setup(OPTIMIZER)
@optimizer
class OwnGeneratorOfAnOptimizer(SGD):
    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.rng = torch.Generator().manual_seed(0)

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group['params']:
                parameter.grad.mul_(torch.rand((), generator=self.rng))
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class OrderOfAddresses(SGD):
    """Clips tensor after tensor, in the order of a set."""

    def step(self, closure=None):
        left = 1.
        for parameter in {p for group in self.param_groups for p in group['params']}:
            parameter.grad.mul_(left)
            left *= .9
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class StepByTheClock(SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group['lr'] = .05 + time.time() % .05
        return super().step(closure)


@setup(OPTIMIZER)
@optimizer
class LookAhead(SGD):
    """Slow weights in an attribute, every three steps."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.slow, self.count = None, 0

    def step(self, closure=None):
        super().step(closure)
        tensors = [p for group in self.param_groups for p in group['params']]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in tensors]
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, fast in zip(self.slow, tensors):
                    slow.lerp_(fast, .5)
                    fast.copy_(slow)


@setup(OPTIMIZER)
@optimizer
class LookAheadInItsState(SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group['params']:
                    state = self.state[p]
                    slow = state.setdefault('slow', p.detach().clone())
                    slow.lerp_(p, .5)
                    p.copy_(slow)


@setup(OPTIMIZER)
@scheduler
class OwnCounter(LRSchedulerMixin, _ParamScheduler):
    """Its state_dict has it."""

    seen = 0

    def __init__(self, optimizer, **kwargs):
        super().__init__(optimizer, **kwargs)

    def _get_value(self):
        self.seen += 1
        return [.1 / self.seen for _ in self.optimizer.param_groups]


@setup(OPTIMIZER)
@scheduler
class RandomRate(LRSchedulerMixin, _ParamScheduler):
    def _get_value(self):
        return [.1 * random.random() for _ in self.optimizer.param_groups]


@setup(OPTIMIZER)
@scheduler
class RateFromEntropy(LRSchedulerMixin, _ParamScheduler):
    def _get_value(self):
        return [.1 * float(np.random.default_rng().random()) for _ in self.optimizer.param_groups]


COUNT = 0


@setup(OPTIMIZER)
@scheduler
class RateOfAGlobalCounter(LRSchedulerMixin, _ParamScheduler):
    def _get_value(self):
        global COUNT
        COUNT += 1
        return [.1 / COUNT for _ in self.optimizer.param_groups]


@setup(OPTIMIZER)
@wrapper
class ClipsByItsHistory(OptimWrapper):
    """Clips at the mean of the norms so far, as AutoClip."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.norms = []

    def step(self, **kwargs):
        norm = float(torch.nn.utils.clip_grad_norm_(
            [p for group in self.param_groups for p in group['params']],
            float(np.mean(self.norms)) if self.norms else 1.))
        self.norms.append(norm)
        super().step(**kwargs)


@setup(OPTIMIZER)
@wrapper
class SkipsBadSteps(OptimWrapper):
    """Skips a step if its loss is higher than all before."""

    worst = -float('inf')

    def update_params(self, loss, *args, **kwargs):
        value = float(loss.detach())
        if value > self.worst:
            super().update_params(loss, *args, **kwargs)
        self.worst = max(self.worst, value)


@setup(OPTIMIZER)
@wrapper
class NoisyGradients(OptimWrapper):
    def step(self, **kwargs):
        for group in self.param_groups:
            for parameter in group['params']:
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=1e-3)
        super().step(**kwargs)


@setup(OPTIMIZER)
@hook
class WarmsUpAgain(Hook):
    """Begins its warm-up when the training begins: a resume warms up again."""

    def before_train(self, runner):
        self.begun = runner.iter

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for group in runner.optim_wrapper.param_groups:
            group['lr'] = .1 * min(1., (runner.iter - self.begun + 1) / 5)


@setup(OPTIMIZER)
def two_schedulers(cfg):
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=.1, begin=0, end=5, by_epoch=False),
        dict(type='CosineAnnealingLR', T_max=7, begin=5, end=12, by_epoch=False)]


@setup(OPTIMIZER)
def accumulated_gradients(cfg):
    cfg.optim_wrapper.accumulative_counts = 2


@setup(OPTIMIZER)
def groups_of_parameters(cfg):
    cfg.optim_wrapper.paramwise_cfg = dict(norm_decay_mult=0., custom_keys={
        'head': dict(lr_mult=2.)})
    cfg.optim_wrapper.optimizer.weight_decay = .01


@setup(OPTIMIZER)
def clipped_gradients(cfg):
    cfg.optim_wrapper.clip_grad = dict(max_norm=.1)


@setup(OPTIMIZER)
@optimizer
class LookAheadInItsGroups(SGD):
    """Slow weights and a count in the groups of parameters, as Ranger has them."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        for group in self.param_groups:
            group.update(slow=[value.detach().clone() for value in group['params']], count=0)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group['count'] += 1
            if group['count'] % 3 == 0:
                for slow, value in zip(group['slow'], group['params']):
                    slow.lerp_(value, .5)
                    value.copy_(slow)


@setup(OPTIMIZER)
@optimizer
class OrthogonalMomenta(torch.optim.Optimizer):
    """Muon: momenta are made orthogonal by a few products of matrices."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group['params']:
                momentum = self.state[value].setdefault('momentum', torch.zeros_like(value))
                update = momentum.mul_(.9).add_(value.grad).flatten(1) if value.ndim > 1 else None
                if update is not None:
                    update = update / (update.norm() + 1e-7)
                    for _ in range(3):
                        product = update @ update.T
                        update = 3.4 * update + (2 * product @ product - 4.7 * product) @ update
                    momentum = update.view_as(value)
                value.sub_(momentum, alpha=.1 * group['lr'])


class LossScale(OptimWrapper):
    """A scale of the loss that grows after each fourth step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale, self.steps = 64., 0

    def scale_loss(self, loss):
        return super().scale_loss(loss) * self.scale

    def step(self, **kwargs):
        self.steps += 1
        self.scale *= 3. if self.steps % 4 == 0 else 1.
        super().step(**kwargs)


@setup(OPTIMIZER)
@wrapper
class LossScaleThatIsLost(LossScale):
    pass


@setup(OPTIMIZER)
@wrapper
class LossScaleThatIsSaved(LossScale):
    def state_dict(self):
        return dict(super().state_dict(), scale=self.scale, steps=self.steps)

    def load_state_dict(self, state_dict):
        rest = dict(state_dict)
        self.scale, self.steps = rest.pop('scale'), rest.pop('steps')
        super().load_state_dict(rest)


class WarmsUpByHand(Hook):
    """As the hooks of MMYOLO that set rates."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for group, rate in zip(runner.optim_wrapper.param_groups, self.rates(runner)):
            group['lr'] = float(np.interp(runner.iter, [0, 10, 24], [.001, rate, rate / 10]))


@setup(OPTIMIZER)
@hook
class WarmsUpToInitialRates(WarmsUpByHand):
    """Which the groups have, and with them checkpoints."""

    def before_train(self, runner):
        for group in runner.optim_wrapper.param_groups:
            group.setdefault('initial_lr', group['lr'])

    def rates(self, runner):
        return [group['initial_lr'] for group in runner.optim_wrapper.param_groups]


@setup(OPTIMIZER)
@hook
class WarmsUpToRatesOfTheStart(WarmsUpByHand):
    """Those that the groups have when the training begins."""

    def before_train(self, runner):
        self.started_with = [group['lr'] for group in runner.optim_wrapper.param_groups]

    def rates(self, runner):
        return self.started_with
