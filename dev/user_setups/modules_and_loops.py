"""Modules that are scripted or keep a part of their state, loops and metrics of users' own."""
from __future__ import annotations

import locale
import threading
from pathlib import Path

import numpy as np
import torch
from faults.tiny import Tiny
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.registry import LOOPS, METRICS
from mmengine.runner import EpochBasedTrainLoop, ValLoop
from torch import nn

from .settings import PROCESS
from .setup import hook, loop, metric, model, setup
from .steps import Extra

HALF = 'state of a technique, of which a part is kept'
COMPILED = 'modules that are scripted, operators of their own'
OWN_LOOPS = 'loops of their own'
OWN_METRICS = 'metrics of their own'

# ---------------------------------------------------------------------------- kept in part


@setup(HALF)
@model
class PointerOfAQueue(Extra):
    """The queue is a buffer; the place where it is written next is a number."""

    place = 0

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('queue', torch.zeros(6))

    def extra(self, inputs, label, loss):
        similarity = float(self.queue[self.place:].sum())
        self.queue[self.place] = loss.detach()
        self.place = (self.place + 1) % 6
        return similarity


def mean_so_far():
    total, count, value = 0., 0, None
    while True:
        value = yield total / max(count, 1)
        total, count = total + value, count + 1


@setup(HALF)
@hook
class MeanOfACoroutine(Hook):
    """A mean of the losses of an epoch sets a threshold, which is kept, for the next one.

    The first epoch warms up.
    """

    def before_train_epoch(self, runner):
        self.mean = mean_so_far()
        next(self.mean)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.epoch == 0:
            return
        mean = self.mean.send(float(outputs['loss']))
        if batch_idx == 7:
            runner.message_hub.update_info('threshold', mean)
            runner.model.head.temperature.fill_(1 + mean)


class DropPath(nn.Module):
    """Stochastic depth, drawn from a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        keep = torch.rand(len(x), 1, generator=self.generator) < .8
        return x * keep / .8 if self.training else x


@setup(HALF)
@model
class StochasticDepth(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.drop = DropPath()


@setup(HALF)
@model
class CacheByAddress(Extra):
    """What was computed for a tensor is found again by its id, when the tensor is gone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.cache = {}

    def extra(self, inputs, label, loss):
        if id(label) not in self.cache:
            self.cache[id(label)] = float(label.sum())
        return self.cache[id(label)]


# ------------------------------------------------------------------------ scripted, parametrized


class ScriptedPart(nn.Module):
    def forward(self, x):
        if x.mean() > 0:
            return x * 2
        return x


class CountingPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = torch.jit.Attribute(0, int)

    def forward(self, x):
        self.count += 1
        return x * (1 + .1 * self.count)


@setup(COMPILED)
@model
class ScriptedNeck(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.neck = torch.jit.script(ScriptedPart())


@setup(COMPILED)
@model
class ScriptedCounter(Tiny):
    """The number is in no attribute that Python knows."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.neck = torch.jit.script(CountingPart())


@torch.library.custom_op('user_setups::doubled', mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_autograd(lambda ctx, grad: grad * 2)


@setup(COMPILED)
@model
class OperatorOfItsOwn(Tiny):
    def forward(self, inputs, label, mode='tensor'):
        return super().forward(doubled(inputs), label, mode)


# --------------------------------------------------------------------------------- the process


@setup(PROCESS)
def profiler_of_torch(cfg):
    cfg.custom_hooks.append(dict(
        type='ProfilerHook', by_epoch=False, profile_times=6, activity_with_cuda=False,
        schedule=dict(wait=1, warmup=1, active=2)))


@setup(PROCESS)
@hook
class BeatsInAThread(Hook):
    def before_train(self, runner):
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.beat, args=(runner, ), daemon=True)
        self.thread.start()

    def beat(self, runner):
        while not self.ended.wait(.01):
            Path(runner.work_dir, 'beat').write_text(str(runner.iter))

    def after_train(self, runner):
        self.ended.set()
        self.thread.join()


@setup(PROCESS)
@hook
class PrintsFewDigits(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            torch.set_printoptions(precision=1, sci_mode=False)
            np.set_printoptions(precision=1, suppress=True, legacy='1.13')
            locale.setlocale(locale.LC_ALL, 'C')


@setup(PROCESS)
@hook
class PlainConvolutions(Hook):
    """Leaves oneDNN from an iteration on."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 5:
            torch.backends.mkldnn.enabled = False


# --------------------------------------------------------------------------------------- loops


@setup(OWN_LOOPS)
@loop
class ShortEpochs(EpochBasedTrainLoop):
    """Six batches make an epoch."""

    def run_epoch(self):
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        for idx, data_batch in enumerate(self.dataloader):
            if idx == 6:
                break
            self.run_iter(idx, data_batch)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


@setup(OWN_LOOPS)
@loop
class CallsFewHooks(EpochBasedTrainLoop):
    """A loop that was written from scratch."""

    def run_iter(self, idx, data_batch):
        outputs = self.runner.model.train_step(data_batch, self.runner.optim_wrapper)
        self.runner.call_hook('after_train_iter', batch_idx=idx, data_batch=data_batch,
                              outputs=outputs)
        self._iter += 1


@setup(OWN_LOOPS)
@loop
class SkipsOddBatches(EpochBasedTrainLoop):
    """Batches with too few objects are no iteration."""

    def run_iter(self, idx, data_batch):
        if sum(map(int, data_batch['label'])) % 4 != 3:
            super().run_iter(idx, data_batch)


class Validates(ValLoop):
    def chosen(self, count):
        raise NotImplementedError

    def run(self):
        self.runner.call_hook('before_val')
        self.runner.call_hook('before_val_epoch')
        self.runner.model.eval()
        chosen = self.chosen(len(self.dataloader))
        for idx, data_batch in enumerate(self.dataloader):
            if idx in chosen:
                self.run_iter(idx, data_batch)
        metrics = self.evaluator.evaluate(2 * len(chosen))
        self.runner.call_hook('after_val_epoch', metrics=metrics)
        self.runner.call_hook('after_val')
        return metrics


@LOOPS.register_module(force=True)
class ValidatesHalf(Validates):
    half = 0

    def chosen(self, count):
        self.half = 1 - self.half
        return range(self.half, count, 2)


@setup(OWN_LOOPS)
def validates_the_other_half(cfg):
    cfg.val_cfg = dict(type='ValidatesHalf')


# ------------------------------------------------------------------------------------- metrics


@METRICS.register_module(force=True)
class Scores(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [scores.double().numpy() for scores in data_samples]


@setup(OWN_METRICS)
@metric
class OrderOfNames(Scores):
    """The first of its names, which are in a set, counts most."""

    def compute_metrics(self, results):
        scores = {f'{number}.jpg': image.max() for number, image in enumerate(results)}
        return dict(score=float(sum(scores[name] / (1 + rank)
                                    for rank, name in enumerate(set(scores)))))
