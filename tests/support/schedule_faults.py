"""Faults of orders, planted: schedules have to find each."""
from contextlib import contextmanager
from unittest import mock

from mmrepro.distributed.scheduler import Scheduler, VirtualRank
from mmrepro.selfcheck.state import Attributes
from mmrepro.selfcheck.steps import StepCheck
from mmrepro.virtual.shared_weights import Shared


@contextmanager
def _restored_weights():
    """A repeated step puts back the weights of before the step, behind the agreement."""
    init = Attributes.__init__
    agree = StepCheck._compare

    def without(self, model, more, saved, left_out=()):
        init(self, model, more, saved)

    def late(self, *args):
        left, self._left = self._left, None
        agree(self, *args)
        if left is not None:
            left.put_back(gradients=False)

    with mock.patch.object(Attributes, '__init__', without), \
            mock.patch.object(StepCheck, '_compare', late):
        yield


def _without_wait(text):
    """Ranks do not wait where ``text`` says what for."""
    wait = Scheduler.wait

    def hasty(self, ready, where):
        wait(self, (lambda: True) if text in where else ready, where)

    return mock.patch.object(Scheduler, 'wait', hasty)


def _unguarded_conditions():
    """What a rank waits for raises in the thread of the one that asks."""
    def may_run(self):
        return self.scheduler.failed is not None or self.work is None and (
            self.ready is None or self.ready())

    return mock.patch.object(VirtualRank, 'may_run', may_run)


@contextmanager
def _silently_restored_weights():
    """A checkpoint may be written while the owner has not stepped; nothing compares weights."""
    with _restored_weights(), mock.patch.object(Shared, 'check', lambda self: None):
        yield


FAULTS = {
    'restored weights': _restored_weights,
    'restored weights, unchecked': _silently_restored_weights,
    'a step before the owner': lambda: _without_wait('of the optimizer on shared weights'),
    'a start before all have come': lambda: _without_wait('whose ranks share weights'),
    'a change of averages before all have come': lambda: _without_wait('averaged weights'),
    'conditions that raise': _unguarded_conditions,
}
