"""Models, losses and kernels."""
from __future__ import annotations

import threading
import time

import numpy as np
import torch
from faults import tiny
from faults.fault import NATIVE, replaced

from .setup import FOUND, SAME, setup


def in_loss(function):
    """A change that adds ``function(head)`` to the loss."""
    def change(cfg):
        @replaced(tiny.Head, 'forward', since=0)
        def shifted(original, self, x):
            found = original(self, x)
            return found + torch.tensor([0., 1., 2.]) * function(self) if self.training else found
    change.__name__ = function.__name__
    return change


@setup(SAME)
@in_loss
def draws_from_the_global_generators(head):
    return float(np.random.rand()) + torch.rand(())


@setup(FOUND, 'head')
@in_loss
def a_generator_that_the_head_makes(head):
    if not hasattr(head, 'rng'):
        head.rng = torch.Generator().manual_seed(0)
    return torch.rand((), generator=head.rng)


GENERATOR = torch.Generator()


@setup(FOUND, 'head')
@in_loss
def a_generator_of_the_module(head):
    return torch.rand((), generator=GENERATOR)


@setup(FOUND, 'head')
@in_loss
def an_unseeded_generator(head):
    return np.random.default_rng().random()


@setup(FOUND, 'head')
@in_loss
def the_clock(head):
    return time.perf_counter_ns() % 1000003 * 1e-6


@setup(FOUND, 'head')
@in_loss
def a_counter_in_a_closure(head, calls=[0]):  # noqa: B006  kept between calls on purpose
    calls[0] += 1
    return calls[0] * .25


@setup(FOUND, 'head')
@in_loss
def a_list_of_earlier_losses(head, kept=[]):  # noqa: B006  kept between calls on purpose
    kept.append(float(head.fc.weight.sum()))
    return sum(kept) * .125


@setup(FOUND, 'head')
@in_loss
def a_thread_that_counts(head, box=[0]):  # noqa: B006  kept between calls on purpose
    def count():
        box[0] += 1
    thread = threading.Thread(target=count)
    thread.start()
    thread.join()
    return box[0] * .25


LIBRARIES = []


def drifting_kernel(operator):
    """A change that lets a kernel of torch add something else at every call, as atomics do."""
    def change(cfg):
        calls = [0]

        def kernel(*args):
            found = NATIVE[operator](*args)
            calls[0] += 1
            found.view(-1)[0] += 1e-5 * calls[0]
            return found

        LIBRARIES.append(torch.library.Library('aten', 'IMPL'))
        LIBRARIES[-1].impl(operator, kernel, 'CPU')
    change.__name__ = f'a_kernel_that_drifts_{operator}'
    return change


setup(FOUND, 'backbone')(drifting_kernel('relu'))
setup(FOUND, 'backbone')(drifting_kernel('threshold_backward'))
