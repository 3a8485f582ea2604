"""Faults in hooks, settings and state, and of one rank."""
import os
import time

import numpy as np
import torch
from faults import tiny
from faults.fault import FROM, SEQUENTIAL, fault, noisy_kernel, planted
from mmengine.optim.scheduler import StepLR


@planted(tiny.QuietHook, 'before_train_iter', fast=True, randomness=SEQUENTIAL, phase='forward',
         path='head.drop', kind='generator', operator='aten.bernoulli_.float',
         cause='other draws before', mover='hook QuietHook.before_train_iter aten.randperm.default')
def a_hook_that_draws_random_numbers(original, self, *args, **kwargs):
    np.random.rand(1), torch.randperm(3)


@planted(tiny.QuietHook, 'after_train_iter', since=FROM - 1, iteration=FROM - 1, phase='hook',
         path='QuietHook.after_train_iter', kind='output', cause='hook changes the state',
         mentions=('parameter head.fc.bias', 'tiny.py:', 'first differ at iteration 2, in '
                   'QuietHook.after_train_iter; it shows in iteration 3'))
def a_hook_that_changes_weights(original, self, runner, *args, **kwargs):
    runner.model.head.fc.bias.detach().numpy()[0] += 0.5


@planted(tiny.QuietHook, 'before_train_iter', phase='hook', path='QuietHook.before_train_iter',
         kind='extra', operator='aten.mul_.Tensor')
def a_hook_that_changes_weights_by_operators(original, self, runner, *args, **kwargs):
    runner.model.head.fc.weight.data.mul_(0.5)


@planted(tiny.QuietHook, 'after_train_iter', since=FROM - 1, iteration=FROM - 1, phase='hook',
         path='QuietHook.after_train_iter', kind='argument', cause='another setting',
         mentions='group 0 lr=0.05 / 0.2')
def a_hook_that_changes_the_learning_rate(original, self, runner, *args, **kwargs):
    runner.optim_wrapper.param_groups[0]['lr'] = 0.2


@planted(StepLR, '__init__', since=0, iteration=2, kind='argument', cause='another setting',
         mentions='StepLR 0 gamma=0.5 / 0.25')
def another_schedule(original, self, *args, gamma, **kwargs):
    original(self, *args, gamma=0.25, **kwargs)


@planted(tiny.QuietHook, 'before_train_iter', since=0, runs='AB', iteration=0,
         phase='hook', path='QuietHook.before_train_iter', kind='argument', cause='clock in a hook',
         mentions=('in a_hook_that_reads_the_clock', ' lr='))
def a_hook_that_reads_the_clock(original, self, runner, *args, **kwargs):
    runner.optim_wrapper.param_groups[0]['lr'] = 0.1 + time.time_ns() % 1000003 * 1e-9


@planted(tiny.QuietHook, 'before_train_iter', since=0, runs='AB', iteration=0, phase='hook',
         path='QuietHook.before_train_iter', cause='entropy in a hook',
         mentions=('in a_hook_that_draws_from_the_operating_system', ' lr='))
def a_hook_that_draws_from_the_operating_system(original, self, runner, *args, **kwargs):
    runner.optim_wrapper.param_groups[0]['lr'] = 0.1 + os.urandom(8)[0] * 1e-3 + sum(
        os.urandom(8)) * 1e-6


@planted(tiny.Head, 'forward', since=0, runs='AB', resume_at=FROM, phase='forward', path='head',
         kind='argument', cause='state lost at resume', mentions='head.scale')
def an_attribute_that_is_lost_at_resume(original, self, x):
    self.scale += 0.125
    return original(self, x)


@planted(torch.optim.SGD, 'load_state_dict', since=0, resume_at=FROM, phase='start',
         cause='state lost at resume', mentions='optimizer momentum_buffer backbone.0.weight')
def momentum_that_is_lost_at_resume(original, self, state):
    original(self, dict(state, state={}))


@planted(tiny.Head, 'forward', since=0, fast=True, runs='AB', validate_at=FROM, phase='forward',
         path='head', kind='argument', cause='state that a validation leaves',
         mentions='head.scale')
def an_attribute_that_a_validation_changes(original, self, x):
    if not self.training:
        self.scale = 1.25
    return original(self, x)


@planted(tiny.Head, 'forward', since=0, runs='AB', validate_at=FROM, phase='start', kind='output',
         cause='state that a validation leaves', mentions='buffer head.temperature')
def a_buffer_that_a_validation_changes(original, self, x):
    if not self.training:
        self.temperature += 0.25
    return original(self, x)


BEST = 9.


@planted(torch.optim.SGD, 'step', since=0, fast=True, runs='AB', resume_at=FROM, phase='optimizer',
         cause='state lost at resume',
         mentions=('global faults.in_state:BEST: ', 'in a_global_that_is_lost_at_resume'))
def a_global_that_is_lost_at_resume(original, self, *args, **kwargs):
    global BEST
    BEST -= 1
    for parameter in self.param_groups[0]['params'] if BEST < 6 else ():
        parameter.data.mul_(0.5)
    return original(self, *args, **kwargs)


@planted(torch.optim.SGD, 'step', since=0, runs='AB', resume_at=FROM, phase='optimizer',
         cause='state lost at resume',
         mentions=('SGD.steps: 3 / ', 'in an_attribute_of_an_optimizer_that_is_lost_at_resume'))
def an_attribute_of_an_optimizer_that_is_lost_at_resume(original, self, *args, **kwargs):
    self.steps = getattr(self, 'steps', 0) + 1
    for parameter in self.param_groups[0]['params'] if self.steps > 3 else ():
        parameter.data.mul_(0.5)
    return original(self, *args, **kwargs)


@planted(tiny.QuietHook, 'before_train_iter', since=0, runs='AB', resume_at=FROM, phase='hook',
         path='QuietHook.before_train_iter', kind='argument', cause='state lost at resume',
         mentions=('QuietHook.steps: 3 / ', ' lr='))
def an_attribute_of_a_hook_that_is_lost_at_resume(original, self, runner, *args, **kwargs):
    self.steps = getattr(self, 'steps', 0) + 1
    runner.optim_wrapper.param_groups[0]['lr'] = 0.1 / self.steps


@fault(ranks=2, rank=1, iteration=1, phase='forward', path='backbone.2',
       operator='aten.relu.default', kind='output')
def noise_on_one_rank(run):
    if os.environ['RANK'] == '1':
        noisy_kernel('relu', since=1)


@planted(torch.optim.SGD, 'step', cause='state changed outside of operators',
         mentions='parameter head.fc.bias')
def weights_that_are_written_through_numpy(original, self, *args, **kwargs):
    result = original(self, *args, **kwargs)
    self.param_groups[0]['params'][-1].detach().numpy()[0] += 0.5
    return result
