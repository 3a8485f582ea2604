"""Faults in operators, and values that come in from outside of torch."""
import os
import random
import threading
import time

import numpy as np
import torch
import torch.optim.sgd as sgd
from faults import tiny
from faults.fault import FROM, SEQUENTIAL, fault, noisy_kernel, planted, replaced
from faults.in_data import Word
from torch import nn


@fault(phase='forward', path='backbone.2', operator='aten.relu.default', kind='output',
       cause='operator')
def noise_in_a_forward_kernel(run):
    noisy_kernel('relu')


@fault(fast=True, phase='backward', path='backbone.2',
       operator='aten.threshold_backward.default', kind='output', cause='operator')
def noise_in_a_backward_kernel(run):
    noisy_kernel('threshold_backward')


@fault(phase='backward', path='neck', operator='aten.mul.Tensor', kind='argument',
       cause='entropy', mentions='in noisy')
def noise_in_a_custom_backward(run):
    @replaced(tiny.Doubled, 'backward')
    def noisy(original, ctx, grad):
        return grad * (2 + random.SystemRandom().random() * 1e-3)
    tiny.Doubled.backward = staticmethod(tiny.Doubled.backward)


@planted(tiny.Double, 'forward', phase='forward', path='neck', operator='aten.add.Tensor',
         kind='extra', cause='extra operator')
def noise_in_a_modules_forward(original, self, x):
    return original(self, x) + 1e-4


@planted(tiny.TinyLoss, 'forward', phase='loss', path='head.loss', operator='aten.mul.Tensor',
         kind='extra', cause='extra operator')
def noise_in_the_loss(original, self, logits, label):
    return original(self, logits, label) * 1.0001


@planted(tiny.Double, 'forward', phase='forward', path='neck', operator='aten.mul_.Tensor',
         kind='extra', cause='extra operator')
def an_operator_in_place(original, self, x):
    return original(self, x).mul_(1.001)


@fault(fast=True, phase='forward', path='backbone.2', operator='aten.relu.default', kind='output',
       cause='operator')
def an_extra_operator_that_is_harmless_and_noise_behind_it(run):
    @replaced(tiny.Tiny, 'forward', since=0)
    def talkative(original, self, inputs, label, mode='tensor'):
        inputs.abs().max().item()
        return original(self, inputs, label, mode=mode)
    noisy_kernel('relu')


@planted(nn.ReLU, 'forward', phase='forward', path='backbone.2', kind='replaced',
         cause='extra operator')
def another_operator(original, self, x):
    return nn.functional.gelu(x)


@planted(sgd, '_single_tensor_sgd', phase='optimizer', path='backbone.0.weight',
         operator='aten.add_.Tensor', kind='argument', cause='number from Python')
def noise_in_the_optimizer(original, *args, lr, **kwargs):
    return original(*args, lr=lr * 1.001, **kwargs)


@fault(fast=True, runs='AB', iteration=0, phase='forward', path='head', operator='aten.add.Tensor',
       kind='output', cause='uninitialized memory')
def uninitialized_memory(run):
    @replaced(tiny.Head, 'forward', since=0)
    def careless(original, self, x):
        bias = torch.empty(3)
        bias.numpy()[:] = dict(A=(1, 0, 0), B=(0, 1, 0))[run]  # what happened to be there
        return original(self, x) + bias


@fault(runs='AB', iteration=0, phase='forward', path='head.drop', kind='argument',
       cause='generator of its own', operator='aten.bernoulli_.float')
def dropout_with_a_generator_of_its_own(run):
    generator = torch.Generator()
    generator.seed()

    @replaced(nn.Dropout, 'forward', since=0)
    def own(original, self, x):
        return x * torch.empty_like(x).bernoulli_(0.5, generator=generator)


@fault(runs='AB', iteration=0, phase='forward', path='neck', operator='aten.sum.default',
       kind='output', cause='threads')
def a_sum_that_depends_on_threads(run):
    torch.set_num_threads(dict(A=1, B=2)[run])

    @replaced(tiny.Double, 'forward', since=0)
    def summing(original, self, x):
        return original(self, x) + torch.linspace(-1, 1.1, 300007).sin().sum() * 1e-3


@planted(tiny.Head, 'forward', since=0, fast=True, runs='AB', iteration=0, phase='forward',
         path='head', kind='argument', operator='aten.mul.Tensor', cause='clock',
         mentions='in a_value_that_depends_on_the_time')
def a_value_that_depends_on_the_time(original, self, x):
    return original(self, x) * (time.time() % 1)


@planted(tiny.Head, 'forward', since=0, runs='AB', env=dict(TINY_GAIN='1.5'),
         iteration=0, phase='forward', path='head', kind='argument', operator='aten.mul.Tensor',
         cause='environment variable',
         mentions=('TINY_GAIN is not set in A, 1.5 in B; read at ', 'in_operators.py:'))
def a_variable_of_the_environment(original, self, x):
    return original(self, x) * float(os.environ.get('TINY_GAIN', 1))


@planted(tiny.Head, 'forward', phase='forward', path='head', kind='input',
         operator='aten.mul.Tensor', cause='buffer or parameter changed outside of operators',
         mentions='head.temperature')
def a_buffer_that_is_changed(original, self, x):
    self.temperature.numpy()[0] = 1.5
    return original(self, x)


@planted(tiny.QuietHook, 'after_train_iter', since=FROM - 1, phase='forward', path='head',
         kind='argument', operator='aten.mul.Tensor', cause='value in an attribute',
         mentions='head.scale')
def a_number_in_an_attribute(original, self, runner, *args, **kwargs):
    runner.model.head.scale = 1.01


@planted(tiny.Head, 'forward', since=0, runs='AB', iteration=0, phase='forward', path='head',
         cause='entropy', mentions='urandom')
def numpys_default_rng_in_a_module(original, self, x):
    noise = np.random.default_rng().normal(size=4).astype(np.float32)
    return original(self, x + torch.from_numpy(noise))


@planted(tiny.TinyPreprocessor, 'forward', phase='data', path='data_preprocessor', kind='argument',
         operator='aten.mul.Tensor')
def the_data_preprocessor(original, self, data, training=False):
    data = super(tiny.TinyPreprocessor, self).forward(data, training)
    return dict(inputs=torch.stack(data['inputs']) * 0.501, label=torch.stack(data['label']))


FASTER = 'faster-rcnn_r50_fpn'


@fault(model=FASTER, runs='AB', iteration=0, phase='loss', kind='argument',
       cause='generator of its own', operator='aten.randperm.generator')
def detector_a_sampler_with_a_generator_of_its_own(run):
    from mmdet.models.task_modules.samplers import RandomSampler
    generator = torch.Generator()
    generator.seed()

    @replaced(RandomSampler, 'random_choice', since=0)
    def own(original, self, gallery, num):
        return gallery[torch.randperm(len(gallery), generator=generator)[:num]]


@fault(runs='AB', phase='forward', kind='input', cause='same tensors in another order')
def tensors_in_a_set(run):
    @replaced(tiny.Tiny, 'forward')
    def unordered(original, self, inputs, label, mode='tensor'):
        # forked runs have the same addresses, and with them the same order of a real set
        parts = [inputs[:, i:i + 1] * (i + 1) for i in range(3)]
        total = torch.zeros_like(parts[0])
        for part in parts if run == 'A' else parts[::-1]:
            total = total + part
        return original(self, inputs + total, label, mode)


@fault(runs='AB', phase='forward', cause='threads', mentions='in threaded')
def a_thread_that_makes_a_number(run):
    @replaced(tiny.Tiny, 'forward')
    def threaded(original, self, inputs, label, mode='tensor'):
        found = []
        thread = threading.Thread(target=lambda: found.append(1. if run == 'A' else 2.))
        thread.start()
        thread.join()
        return original(self, inputs * found[0], label, mode)


@fault(runs='AB', iteration=0, phase='forward', path='head', kind='argument',
       cause='directory listing', mentions='listdir')
def a_value_by_the_order_of_a_directory(run):
    listing = os.listdir

    @replaced(tiny.Head, 'forward', since=0)
    def unsorted(original, self, x):
        names = sorted(listing(os.path.dirname(tiny.__file__)), reverse=run == 'B')
        return original(self, x * len(names[0]))


@fault(runs='AB', randomness=SEQUENTIAL, phase='forward', path='head', kind='argument',
       cause='foreign generator', mentions='numpy')
def a_hook_that_draws_from_the_generator_of_a_value(run):
    @replaced(tiny.Head, 'forward', since=0)
    def noisy(original, self, x):
        return original(self, x * np.random.rand())

    if run == 'B':
        @replaced(tiny.QuietHook, 'before_train_iter')
        def drawing(original, self, *args, **kwargs):
            np.random.rand()


@planted(tiny.Head, 'forward', since=0, runs='AB', env=dict(PYTHONHASHSEED='7'), iteration=0,
         phase='forward', path='head', kind='argument', cause='hash order',
         mentions='environment PYTHONHASHSEED')
def a_value_by_the_order_of_a_set(original, self, x):
    words = list({Word('car'), Word('dog'), Word('house'), Word('tree'), Word('zebra')})
    return original(self, x * sum(i * len(word) for i, word in enumerate(words)))


@fault(runs='AB', iteration=0, phase='forward', path='head', kind='input',
       cause='value from outside')
def a_tensor_that_a_library_makes(run):
    @replaced(tiny.Head, 'forward', since=0)
    def given(original, self, x):
        return original(self, x + torch.from_numpy(np.full(4, dict(A=1, B=2)[run], np.float32)))


@fault(env=dict(ONEDNN_MAX_CPU_ISA='DEFAULT'), phase='forward', path='backbone.2',
       operator='aten.relu.default', kind='output', cause='processor',
       mentions='environment ONEDNN_MAX_CPU_ISA')
def a_kernel_for_another_instruction_set(run):
    noisy_kernel('relu')


@fault(runs='AB', phase='forward', path='head', operator='aten.index_add.default', kind='output',
       cause='order of additions on the device')
def a_sum_in_the_order_of_arrival(run):
    @replaced(tiny.Head, 'forward', since=0)
    def adding(original, self, x):
        return original(self, torch.index_add(x, 0, torch.arange(len(x)), x))

    if run == 'B':
        noisy_kernel('index_add')


@fault(runs='AB', iteration=0, phase='forward', path='head', kind='argument',
       cause='generator of its own', mentions='head.rng')
def a_module_with_a_generator_of_its_own(run):
    @replaced(tiny.Head, '__init__', since=0)
    def made(original, self):
        original(self)
        self.rng = np.random.default_rng(dict(A=1, B=2)[run])

    @replaced(tiny.Head, 'forward', since=0)
    def drawing(original, self, x):
        return original(self, x * self.rng.normal())


@planted(tiny.Head, 'forward', since=0, runs='AB', iteration=0, phase='forward', path='head',
         kind='argument', cause='clock', mentions='in a_time_that_is_used_later')
def a_time_that_is_used_later(original, self, x):
    now = time.time() % 1
    return original(self, (x + 1) * now)


@planted(tiny.Head, 'forward', since=0, runs='AB', iteration=0, phase='forward', path='head',
         kind='argument', cause='entropy', mentions='in a_draw_that_is_used_later')
def a_draw_that_is_used_later(original, self, x):
    drawn = int.from_bytes(os.urandom(4), 'little')
    return original(self, (x + 1) * (drawn / 2 ** 32))
