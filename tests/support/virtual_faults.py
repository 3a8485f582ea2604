"""Faults planted in virtual ranks: each makes the bits depend on the number of processes."""
import random
from contextlib import contextmanager, nullcontext
from unittest import mock

import numpy as np
import torch

from mmrepro.distributed.ordered_sums import ReductionTree
from mmrepro.distributed.scheduler import ProcessState
from mmrepro.virtual import entry
from mmrepro.virtual.gradients import VirtualDataParallel


def _order_of_processes():
    """Each process reduces its own ranks, and then the processes' results are reduced."""
    def add(self, node):
        if self.nodes:
            last = self.nodes[-1]
            self.nodes[-1] = last._replace(value=self._combine(last.value, node.value))
        else:
            self.nodes.append(node)

    return mock.patch.object(ReductionTree, 'add', add)


@contextmanager
def _shared_buffers():
    """The ranks of a process have one set of buffers."""
    shared = {}
    make = VirtualDataParallel.__init__

    def init(self, module, *args, **kwargs):
        make(self, module, *args, **kwargs)
        for name, buffer in module.named_buffers():
            buffer.set_(shared.setdefault(name, buffer.detach()))

    with mock.patch.object(VirtualDataParallel, '__init__', init):
        yield


def _one_generator(get, put):
    """A generator that stays where the last rank has left it."""
    restore = ProcessState.restore

    def restore_others(self):
        before = get()
        restore(self)
        put(before)

    return lambda: mock.patch.object(ProcessState, 'restore', restore_others)


FAULTS = {
    'collectives in the order of processes': _order_of_processes,
    'shared buffers': _shared_buffers,
    'one generator of Python': _one_generator(random.getstate, random.setstate),
    'one generator of NumPy': _one_generator(np.random.get_state, np.random.set_state),
    'one generator of torch': _one_generator(torch.get_rng_state, torch.set_rng_state),
    'autocast drops its cache': lambda: mock.patch.object(entry, 'autocast_cache', nullcontext),
}
