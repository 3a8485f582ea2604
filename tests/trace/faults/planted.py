"""Faults, each planted in side B of the tiny run (or in both), with what has to be said of it.

A plant runs in the process that trains, before anything is built, and changes what it likes there.
"""
from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Optional

import numpy as np
import torch
from faults import tiny
from torch import nn

FROM = 3  # the iteration from which on most faults show


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        plant: called with the name of the side.
        expect: attributes of the finding that have to be equal; `mentions`, one or several, have
            to be parts of its text.
        sides: 'B', or 'AB' when both runs have the fault, as runs of one code have.
        randomness, config: changes for both sides.
        env: of side B.
        ranks, resume_at, validate_at: of both sides, of side B, of side B.
        fast: belongs to every run of the tests.
        model: a real detector of tests/test_invariance.py in place of the tiny network.
    """
    plant: Callable[[str], None]
    expect: Dict[str, Any]
    sides: str = 'B'
    randomness: Dict[str, Any] = field(default_factory=dict)
    env: Dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    resume_at: Optional[int] = None
    fast: bool = False
    model: Optional[str] = None
    validate_at: Optional[int] = None


FAULTS: Dict[str, Fault] = {}


def fault(fast=False, sides='B', randomness=None, env=None, ranks=1, resume_at=None, model=None,
          validate_at=None, **expect):
    """Register a plant under its name."""
    def register(plant):
        expect.setdefault('iteration', FROM)
        FAULTS[plant.__name__] = Fault(plant, expect, sides, randomness or {}, env or {}, ranks,
                                       resume_at, fast, model, validate_at)
        return plant
    return register


def replaced(owner, name, since=FROM, per_iteration=1):
    """Decorator: the function stands for a method, from an iteration on.

    It is given the original first. ``per_iteration``: calls of the method in an iteration.
    """
    def decorate(function):
        original, calls = getattr(owner, name), [0]

        def method(*args, **kwargs):
            calls[0] += 1
            if calls[0] <= since * per_iteration:
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        setattr(owner, name, method)
        return function
    return decorate


# the same functions by other operators: what stands for torch's own kernel
NATIVE = {
    'relu': lambda x: torch.clamp(x, min=0),
    'threshold_backward': lambda grad, x, limit: grad * (x > limit),
}
_libraries = []


def noisy_kernel(operator, since=FROM):
    """Let torch's own CPU kernel return another result, from an iteration on.

    Nothing above the kernel can tell; so it is with atomic additions on a device.
    """
    calls = [0]

    def kernel(*args):
        found = NATIVE[operator](*args)
        calls[0] += 1
        if calls[0] > since:
            found.view(-1)[0] += 1e-5
        return found

    library = torch.library.Library('aten', 'IMPL')
    library.impl(operator, kernel, 'CPU')
    _libraries.append(library)


# --- operators ------------------------------------------------------------------------------------

@fault(fast=True, phase='forward', path='backbone.2', operator='aten.relu.default', kind='output',
       cause='operator')
def noise_in_a_forward_kernel(side):
    noisy_kernel('relu')


@fault(fast=True, phase='backward', path='backbone.2',
       operator='aten.threshold_backward.default', kind='output', cause='operator')
def noise_in_a_backward_kernel(side):
    noisy_kernel('threshold_backward')


@fault(fast=True, phase='backward', path='neck', operator='aten.mul.Tensor', kind='argument',
       cause='entropy', mentions='in noisy')
def noise_in_a_custom_backward(side):
    @replaced(tiny.Doubled, 'backward')
    def noisy(original, ctx, grad):
        return grad * (2 + random.SystemRandom().random() * 1e-3)
    tiny.Doubled.backward = staticmethod(tiny.Doubled.backward)


@fault(phase='forward', path='neck', operator='aten.add.Tensor', kind='extra',
       cause='extra operator')
def noise_in_a_modules_forward(side):
    @replaced(tiny.Double, 'forward')
    def noisy(original, self, x):
        return original(self, x) + 1e-4


@fault(phase='loss', path='head.loss', operator='aten.mul.Tensor', kind='extra',
       cause='extra operator')
def noise_in_the_loss(side):
    @replaced(tiny.TinyLoss, 'forward')
    def noisy(original, self, logits, label):
        return original(self, logits, label) * 1.0001


@fault(phase='forward', path='neck', operator='aten.mul_.Tensor', kind='extra',
       cause='extra operator')
def an_operator_in_place(side):
    @replaced(tiny.Double, 'forward')
    def noisy(original, self, x):
        return original(self, x).mul_(1.001)


@fault(fast=True, phase='forward', path='backbone.2', operator='aten.relu.default', kind='output',
       cause='operator')
def an_extra_operator_that_is_harmless_and_noise_behind_it(side):
    @replaced(tiny.Tiny, 'forward', since=0)
    def talkative(original, self, inputs, label, mode='tensor'):
        inputs.abs().max().item()
        return original(self, inputs, label, mode=mode)
    noisy_kernel('relu')


@fault(phase='forward', path='backbone.2', kind='replaced', cause='extra operator')
def another_operator(side):
    @replaced(nn.ReLU, 'forward')
    def smooth(original, self, x):
        return nn.functional.gelu(x)


@fault(phase='optimizer', path='backbone.0.weight', operator='aten.add_.Tensor', kind='argument',
       cause='number from Python')
def noise_in_the_optimizer(side):
    import torch.optim.sgd as sgd

    @replaced(sgd, '_single_tensor_sgd')
    def noisy(original, *args, lr, **kwargs):
        return original(*args, lr=lr * 1.001, **kwargs)


@fault(fast=True, sides='AB', iteration=0, phase='forward', path='head', operator='aten.add.Tensor',
       kind='output', cause='uninitialised memory')
def uninitialised_memory(side):
    @replaced(tiny.Head, 'forward', since=0)
    def careless(original, self, x):
        bias = torch.empty(3)
        bias.numpy()[:] = dict(A=(1, 0, 0), B=(0, 1, 0))[side]  # what happened to be there
        return original(self, x) + bias


@fault(sides='AB', iteration=0, phase='forward', path='head.drop', kind='argument',
       cause='generator of its own', operator='aten.bernoulli_.float')
def dropout_with_a_generator_of_its_own(side):
    generator = torch.Generator()
    generator.seed()

    @replaced(nn.Dropout, 'forward', since=0)
    def own(original, self, x):
        return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)


@fault(sides='AB', iteration=0, phase='forward', path='neck', operator='aten.sum.default',
       kind='output', cause='threads')
def a_sum_that_depends_on_threads(side):
    torch.set_num_threads(dict(A=1, B=2)[side])

    @replaced(tiny.Double, 'forward', since=0)
    def summing(original, self, x):
        return original(self, x) + torch.linspace(-1, 1.1, 300007).sin().sum() * 1e-3


# --- values from outside of torch -----------------------------------------------------------------

@fault(fast=True, sides='AB', iteration=0, phase='forward', path='head', kind='argument',
       operator='aten.mul.Tensor', cause='clock', mentions='in late')
def a_value_that_depends_on_the_time(side):
    @replaced(tiny.Head, 'forward', since=0)
    def late(original, self, x):
        return original(self, x) * (time.time() % 1)


@fault(phase='forward', path='head', kind='input', operator='aten.mul.Tensor',
       cause='buffer or parameter changed outside of operators', mentions='head.temperature')
def a_buffer_that_is_changed(side):
    @replaced(tiny.Head, 'forward')
    def careless(original, self, x):
        self.temperature.numpy()[0] = 1.5
        return original(self, x)


@fault(phase='forward', path='head', kind='argument', operator='aten.mul.Tensor',
       cause='value in an attribute', mentions='head.scale')
def a_number_in_an_attribute(side):
    @replaced(tiny.Tiny, 'train_step')
    def scaling(original, self, *args, **kwargs):
        return original(self, *args, **kwargs)

    @replaced(tiny.QuietHook, 'after_train_iter', since=FROM - 1)
    def change(original, self, runner, *args, **kwargs):
        runner.model.head.scale = 1.01


@fault(sides='AB', iteration=0, phase='forward', path='head', cause='entropy',
       mentions='urandom')
def numpys_default_rng_in_a_module(side):
    @replaced(tiny.Head, 'forward', since=0)
    def noisy(original, self, x):
        noise = np.random.default_rng().normal(size=4).astype(np.float32)
        return original(self, x + torch.from_numpy(noise))


@fault(phase='data', path='data_preprocessor', kind='argument', operator='aten.mul.Tensor')
def the_data_preprocessor(side):
    @replaced(tiny.TinyPreprocessor, 'forward')
    def other(original, self, data, training=False):
        data = super(tiny.TinyPreprocessor, self).forward(data, training)
        return dict(inputs=torch.stack(data['inputs']) * 0.501, label=torch.stack(data['label']))


# --- hooks and settings ---------------------------------------------------------------------------

SEQUENTIAL = dict(step_seed=False)


@fault(fast=True, randomness=SEQUENTIAL, phase='forward', path='head.drop', kind='generator',
       operator='aten.bernoulli_.float', cause='other draws before',
       mover='hook QuietHook.before_train_iter aten.randperm.default')
def a_hook_that_draws_random_numbers(side):
    @replaced(tiny.QuietHook, 'before_train_iter')
    def draw(original, self, *args, **kwargs):
        np.random.rand(1), torch.randperm(3)


@fault(iteration=FROM, phase='hook', path='QuietHook.after_train_iter', kind='output',
       cause='hook changes the state', mentions='parameter head.fc.bias')
def a_hook_that_changes_weights(side):
    @replaced(tiny.QuietHook, 'after_train_iter', since=FROM - 1)
    def change(original, self, runner, *args, **kwargs):
        runner.model.head.fc.bias.detach().numpy()[0] += 0.5


@fault(phase='hook', path='QuietHook.before_train_iter', kind='extra',
       operator='aten.mul_.Tensor')
def a_hook_that_changes_weights_by_operators(side):
    @replaced(tiny.QuietHook, 'before_train_iter')
    def change(original, self, runner, *args, **kwargs):
        runner.model.head.fc.weight.data.mul_(0.5)


@fault(iteration=2, kind='argument', cause='another setting', mentions='StepLR 0 gamma=0.5 / 0.25')
def another_schedule(side):
    from mmengine.optim.scheduler import StepLR

    @replaced(StepLR, '__init__', since=0)
    def other(original, self, *args, gamma, **kwargs):
        original(self, *args, gamma=0.25, **kwargs)


@fault(fast=True, sides='AB', iteration=0, phase='hook', path='QuietHook.before_train_iter',
       kind='argument', cause='clock in a hook', mentions=('in by_the_clock', ' lr='))
def a_hook_that_reads_the_clock(side):
    @replaced(tiny.QuietHook, 'before_train_iter', since=0)
    def by_the_clock(original, self, runner, *args, **kwargs):
        runner.optim_wrapper.param_groups[0]['lr'] = 0.1 + time.time_ns() % 1000003 * 1e-9


@fault(sides='AB', iteration=0, phase='hook', path='QuietHook.before_train_iter',
       cause='entropy in a hook', mentions=('in by_chance', ' lr='))
def a_hook_that_draws_from_the_operating_system(side):
    @replaced(tiny.QuietHook, 'before_train_iter', since=0)
    def by_chance(original, self, runner, *args, **kwargs):
        runner.optim_wrapper.param_groups[0]['lr'] = 0.1 + os.urandom(8)[0] * 1e-3 + sum(
            os.urandom(8)) * 1e-6


# --- state ----------------------------------------------------------------------------------------

@fault(sides='AB', resume_at=FROM, phase='forward', path='head', kind='argument',
       cause='state lost at resume', mentions='head.scale')
def an_attribute_that_is_lost_at_resume(side):
    @replaced(tiny.Head, 'forward', since=0)
    def growing(original, self, x):
        self.scale += 0.125
        return original(self, x)


@fault(resume_at=FROM, phase='start', cause='state lost at resume',
       mentions='optimizer momentum_buffer backbone.0.weight')
def momentum_that_is_lost_at_resume(side):
    @replaced(torch.optim.SGD, 'load_state_dict', since=0)
    def forget(original, self, state):
        original(self, dict(state, state={}))


@fault(fast=True, sides='AB', validate_at=FROM, phase='forward', path='head', kind='argument',
       cause='state that a validation leaves', mentions='head.scale')
def an_attribute_that_a_validation_changes(side):
    @replaced(tiny.Head, 'forward', since=0)
    def remembering(original, self, x):
        if not self.training:
            self.scale = 1.25
        return original(self, x)


@fault(sides='AB', validate_at=FROM, phase='start', kind='output',
       cause='state that a validation leaves', mentions='buffer head.temperature')
def a_buffer_that_a_validation_changes(side):
    @replaced(tiny.Head, 'forward', since=0)
    def remembering(original, self, x):
        if not self.training:
            self.temperature += 0.25
        return original(self, x)


# --- the data -------------------------------------------------------------------------------------

@fault(fast=True, sides='AB', iteration=0, phase='data', operator='TinyJitter', kind='output',
       cause='entropy in a transform', mentions='urandom')
def numpys_default_rng_in_a_transform(side):
    @replaced(tiny.TinyJitter, 'transform', since=0)
    def unseeded(original, self, results):
        results['img'] = results['img'] + np.random.default_rng().normal()
        return results


@fault(sides='AB', iteration=0, phase='data', operator='TinyFlip', kind='output',
       cause='generator of its own in a transform', mentions='rng')
def a_transform_with_a_generator_of_its_own(side):
    seed = dict(A=1, B=2)[side]  # from the operating system, in earnest

    @replaced(tiny.TinyFlip, 'transform', since=0)
    def own(original, self, results):
        if not hasattr(self, 'rng'):
            self.rng = np.random.default_rng(seed)
        results['img'] = results['img'] + self.rng.normal()
        return results


@fault(sides='AB', iteration=0, phase='data', operator='TinyFlip', kind='output',
       cause='entropy in a transform', mentions='urandom')
def system_random_in_a_transform(side):
    @replaced(tiny.TinyFlip, 'transform', since=0)
    def entropic(original, self, results):
        results['img'] = results['img'] * random.SystemRandom().random()
        return results


class Word(str):
    """A text whose hash follows from PYTHONHASHSEED as it is now: children of one process share
    the real one."""

    def __hash__(self):
        return sum(map(ord, self)) // (3 if os.environ.get('PYTHONHASHSEED') == '7' else 1)


@fault(sides='AB', env=dict(PYTHONHASHSEED='7'), iteration=0, phase='data', operator='TinyLoad',
       kind='output', cause='hash order in a transform')
def the_order_of_a_set(side):
    @replaced(tiny.TinyLoad, 'transform', since=0)
    def unordered(original, self, results):
        results = original(self, results)
        words = list({Word('car'), Word('dog'), Word('house'), Word('tree'), Word('zebra')})
        results['img'] = results['img'] + sum(i * len(word) for i, word in enumerate(words))
        return results


@fault(fast=True, sides='AB', env=dict(PYTHONHASHSEED='7'), iteration=0, phase='data',
       operator='TinyLoad', kind='input', cause='hash order of the data list',
       mentions=('number', 'environment PYTHONHASHSEED'))
def a_data_list_in_the_order_of_a_set(side):
    @replaced(tiny.TinyData, 'load_data_list', since=0)
    def unordered(original, self):
        entries = {Word(chr(97 + entry['number']) * 5): entry for entry in original(self)}
        return [entries[name] for name in set(entries)]


@fault(fast=True, sides='AB', resume_at=FROM, phase='data', operator='TinyJitter', kind='output',
       cause='state of its own in a transform', mentions='self.seen: 5 /')
def a_transform_that_counts(side):
    @replaced(tiny.TinyJitter, 'transform', since=0)
    def counting(original, self, results):
        self.seen = getattr(self, 'seen', -1) + 1
        results['img'] = results['img'] * (1 - self.seen / 100)
        return original(self, results)


@fault(sides='AB', iteration=0, phase='data', operator='TinyLoad', kind='output',
       cause='directory listing in a transform', mentions='listdir')
def the_order_of_a_directory(side):
    listing = os.listdir

    @replaced(tiny.TinyLoad, 'transform', since=0)
    def unsorted(original, self, results):
        results = original(self, results)
        names = sorted(listing(os.path.dirname(tiny.__file__)), reverse=side == 'B')
        results['img'] = results['img'] + len(names[0])
        return results


@fault(fast=True, iteration=0, phase='data', operator='TinyLoad', kind='input',
       cause='another entry in the data list', mentions='label')
def another_label_in_the_annotations(side):
    @replaced(tiny.TinyData, 'load_data_list', since=0)
    def other(original, self):
        entries = original(self)
        for entry in entries[4:]:
            entry['label'] = (entry['label'] + 1) % 3
        return entries


@fault(iteration=0, phase='data', operator='TinyLoad', kind='input',
       cause='another entry in the data list', mentions='number')
def a_data_list_in_another_order(side):
    @replaced(tiny.TinyData, 'load_data_list', since=0)
    def other(original, self):
        return original(self)[::-1]


@fault(iteration=0, phase='data', operator='TinyData', kind='argument', cause='order of samples')
def another_order_of_samples(side):
    from mmrepro.data import orders

    @replaced(orders, '_permutation', since=0)
    def backwards(original, *args):
        return original(*args)[::-1]


@fault(iteration=0, phase='data', path='batch', cause='collating the batch')
def the_collation(side):
    from mmengine.registry import FUNCTIONS
    collate = FUNCTIONS.get('pseudo_collate')

    def swap(batch):
        found = collate(batch)
        found['label'] = found['label'][::-1]
        return found

    FUNCTIONS.module_dict['pseudo_collate'] = swap


# --- ranks ----------------------------------------------------------------------------------------

@fault(ranks=2, rank=1, iteration=1, phase='forward', path='backbone.2',
       operator='aten.relu.default', kind='output')
def noise_on_one_rank(side):
    if os.environ['RANK'] == '1':
        noisy_kernel('relu', since=1)


# --- real detectors -------------------------------------------------------------------------------

FASTER = 'faster-rcnn_r50_fpn'


@fault(model=FASTER, sides='AB', iteration=0, phase='loss', kind='argument',
       cause='generator of its own', operator='aten.randperm.generator')
def detector_a_sampler_with_a_generator_of_its_own(side):
    from mmdet.models.task_modules.samplers import RandomSampler
    generator = torch.Generator()
    generator.seed()

    @replaced(RandomSampler, 'random_choice', since=0)
    def own(original, self, gallery, num):
        return gallery[torch.randperm(len(gallery), generator=generator)[:num]]
