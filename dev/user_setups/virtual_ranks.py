"""What users write for several ranks, on two virtual ranks of one process and of two."""
from __future__ import annotations

import contextvars
import copy
import functools
import os
import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from faults.tiny import Tiny
from mmengine.dist import (
    all_gather_object,
    all_reduce,
    barrier,
    broadcast,
    get_dist_info,
    get_rank,
    get_world_size,
    is_main_process,
    master_only,
)
from mmengine.hooks import Hook
from torch import nn

from .setup import change_of, hook, model, setup, use_all

KIND = 'code on virtual ranks'


def on_ranks(thing: Any) -> Any:
    """Register a set-up that trains on two ranks, for eight iterations an epoch."""
    def sized(cfg: Any) -> None:
        cfg.train_dataloader.dataset.size = 32
        change_of(thing)(cfg)
    sized.__name__ = thing.__name__
    setup(KIND, variations=('again', 'on two processes', 'resumed at 12'), ranks=2)(sized)
    return thing


class Scaled(Tiny):
    """The loss is multiplied by ``factor(logits)``."""

    def forward(self, inputs, label, mode='tensor'):
        logits = self.head(self.neck(self.backbone(inputs)).mean((2, 3)))
        if mode != 'loss':
            return logits
        return dict(loss=self.head.loss(logits, label) * self.factor(logits))


def network(runner):
    return getattr(runner.model, 'module', runner.model)


# ------------------------------------------------------------------- what tells ranks apart


@on_ranks
@model
class RankOfTheEnvironment(Scaled):
    def factor(self, logits):
        return 1 + int(os.environ.get('RANK', 0))


@on_ranks
@model
class DeviceOfTheEnvironment(Scaled):
    """A class of devices, set up once."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.local = int(os.environ.get('LOCAL_RANK', 0))
        self.share = 1 / int(os.environ.get('WORLD_SIZE', 1))

    def factor(self, logits):
        return self.share * (1 + .1 * self.local)


def rank_of_this_process():
    return get_dist_info()[0]


@model
class ReadsACache(Scaled):
    def factor(self, logits):
        return 1 + self.rank()


@on_ranks
def rank_in_a_cache(cfg):
    """One cache for a process; made here, because it is refused wherever the process has one."""
    ReadsACache.rank = staticmethod(functools.lru_cache(None)(rank_of_this_process))
    use_all(cfg, ReadsACache)


STATE: dict = {}


@on_ranks
@hook
class NotesTheRankInTheModule(Hook):
    """A dictionary of the module holds the rank, set up before the training."""

    def before_train(self, runner):
        STATE['rank'] = get_rank()

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = 1 + .1 * STATE['rank']


@on_ranks
@model
class WorldSizeAsScale(Scaled):
    """Undoes the mean of gradients over the ranks."""

    def factor(self, logits):
        return get_world_size()


@on_ranks
@hook
class SeedOfTheRank(Hook):
    """As training scripts do: each rank has numbers of its own."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        np.random.seed(7 + get_rank() + runner.iter)
        network(runner).head.scale = np.random.uniform(.5, 1.5)


@on_ranks
@hook
class GeneratorOfTheRank(Hook):
    def before_train(self, runner):
        self.rng = np.random.default_rng(get_rank())

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = 1 + .1 * self.rng.random()


@on_ranks
@model
class LossOfTheFirstRank(Scaled):
    """Other ranks leave out a part of the model."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.auxiliary = nn.Linear(3, 1)

    def factor(self, logits):
        return 1 + (self.auxiliary(logits).pow(2).mean() if is_main_process() else 0)


# --------------------------------------------------------------- what ranks of a process share


STEPS = 0


@on_ranks
@model
class CounterOfTheModule(Scaled):
    """The loss warms up with a variable of the module."""

    def factor(self, logits):
        global STEPS
        STEPS += self.training
        return 1 + min(STEPS, 9) * .1


RNG = np.random.default_rng(0)


@on_ranks
@hook
class GeneratorOfTheModule(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = 1 + .1 * RNG.random()


@on_ranks
@hook
class AverageOfTheClass(Hook):
    average = 1.

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        cls = type(self)
        cls.average = .8 * cls.average + .2 * float(outputs['loss'].detach())
        network(runner).head.scale = cls.average


class Meter:
    """The one meter of a process."""

    instance = None

    def __init__(self):
        self.total, self.count = 0., 0

    @classmethod
    def get(cls):
        if cls.instance is None:
            cls.instance = cls()
        return cls.instance


@on_ranks
@hook
class OneMeterForAProcess(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        meter = Meter.get()
        meter.total += float(outputs['loss'].detach())
        meter.count += 1
        network(runner).head.scale = meter.total / meter.count


@on_ranks
@hook
class WritesTheEnvironment(Hook):
    def before_train_epoch(self, runner):
        os.environ['USER_LOSS_SCALE'] = str(1 + .2 * get_rank())

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = float(os.environ['USER_LOSS_SCALE'])


SHARE: contextvars.ContextVar[float] = contextvars.ContextVar('share', default=1.)


@on_ranks
@hook
class ContextVariableOfTheRank(Hook):
    def before_train_epoch(self, runner):
        SHARE.set(1 + .1 * get_rank())

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = SHARE.get()


LOCAL = threading.local()


@on_ranks
@hook
class ThreadLocalOfTheRank(Hook):
    def before_train_epoch(self, runner):
        LOCAL.share = 1 + .1 * get_rank()

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        network(runner).head.scale = LOCAL.share


@on_ranks
@hook
class ShrinksWeightsInAHook(Hook):
    """Every rank does, as weights are the same on all of them."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for weight in runner.model.parameters():
                weight.mul_(.99)


@on_ranks
@hook
class TensorHooksOfWeights(Hook):
    def before_train(self, runner):
        for weight in runner.model.parameters():
            weight.register_hook(lambda gradient: gradient.clamp(-.05, .05))


@on_ranks
@hook
class FileOfTheFirstRank(Hook):
    """The first rank writes a file, and all ranks read it."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        path = os.path.join(runner.work_dir, 'scale.npy')
        if is_main_process():
            np.save(path, 1 + .1 * np.random.rand())
        barrier()
        network(runner).head.scale = float(np.load(path))
        barrier()


# ------------------------------------------------------------------------------ communication


@on_ranks
@model
class DoublePrecisionAroundTheSum(Scaled):
    def factor(self, logits):
        torch.set_default_dtype(torch.float64)
        try:
            count = torch.tensor(float(len(logits)))
            if self.training:
                all_reduce(count)
            return 2 / count.float()
        finally:
            torch.set_default_dtype(torch.float32)


@on_ranks
@hook
class CopiesTheWrappedModel(Hook):
    """A teacher, which follows the model."""

    def before_train(self, runner):
        self.teacher = copy.deepcopy(runner.model)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for ours, weight in zip(self.teacher.parameters(), runner.model.parameters()):
                ours.lerp_(weight, .5)


@on_ranks
@model
class SumInAThread(Scaled):
    def factor(self, logits):
        count = torch.ones(1)
        thread = threading.Thread(target=dist.all_reduce, args=(count, ))
        thread.start()
        thread.join()
        return 1 / count


@on_ranks
@hook
class PrintsOnTheFirstRank(Hook):
    @master_only
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        print(runner.iter, float(outputs['loss']))


@on_ranks
@hook
class BarrierInAHook(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        dist.barrier()


@on_ranks
@hook
class GathersObjects(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        rows = [None] * get_world_size()
        dist.all_gather_object(rows, dict(rank=get_rank(), loss=float(outputs['loss'])))
        rows += all_gather_object(dict(rank=get_rank(), loss=1.))
        network(runner).head.scale = 1 + .1 * sum(row['loss'] * row['rank'] for row in rows)


@on_ranks
@hook
class GroupOfItsOwn(Hook):
    def before_train(self, runner):
        self.group = dist.new_group([0, 1])

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        value = outputs['loss'].detach().clone()
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        network(runner).head.scale = 1 + .1 * float(value)


@on_ranks
@model
class MeanOfPositives(Scaled):
    """As heads of MMDetection do: the number of positives is a mean over the ranks."""

    def factor(self, logits):
        positives = (logits.detach() > 0).sum().float()
        if self.training and dist.is_initialized():
            positives = positives.div_(dist.get_world_size())
            dist.all_reduce(positives)
        return 1 / positives.clamp(min=1)


@on_ranks
@model
class WaitsForTheSum(Scaled):
    """Starts a sum, computes something else, and waits."""

    def factor(self, logits):
        total = logits.detach().pow(2).mean()
        work = dist.all_reduce(total, async_op=True)
        other = logits.detach().abs().mean()
        work.wait()
        return 1 + total + other


@on_ranks
@model
class GathersLogitsWithGradients(Scaled):
    """A contrastive loss over the samples of all ranks."""

    def factor(self, logits):
        if not self.training:
            return 1
        rows = torch.cat(torch.distributed.nn.functional.all_gather(logits))
        return 1 + (rows @ rows.T).pow(2).mean()


class MeansOfAllRanks(nn.BatchNorm2d):
    """A BatchNorm of the user's own over all ranks, for CPUs."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        sums = torch.stack([x.mean((0, 2, 3)), x.pow(2).mean((0, 2, 3))])
        mean, square = torch.distributed.nn.functional.all_reduce(sums) / get_world_size()
        variance = (square - mean**2).clamp(min=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean, .1)
            self.running_var.lerp_(variance, .1)
        shape = (1, -1, 1, 1)
        x = (x - mean.view(shape)) / (variance.view(shape) + self.eps).sqrt()
        return x * self.weight.view(shape) + self.bias.view(shape)


@on_ranks
@model
class NormalizesOverAllRanks(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone[1] = MeansOfAllRanks(4)


@on_ranks
def averages_of_weights(cfg):
    """MMEngine's EMAHook, buffers included."""
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=.1, update_buffers=True))


@on_ranks
@model
class QueueOfLogits(Tiny):
    """As MoCo does: a buffer of the last features of all ranks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('queue', torch.zeros(12, 3))
        self.register_buffer('place', torch.zeros(1, dtype=torch.long))

    def forward(self, inputs, label, mode='tensor'):
        logits = self.head(self.neck(self.backbone(inputs)).mean((2, 3)))
        if mode != 'loss':
            return logits
        loss = self.head.loss(logits, label) + (logits @ self.queue.clone().T).pow(2).mean()
        rows = [torch.empty_like(logits) for _ in range(get_world_size())]
        dist.all_gather(rows, logits.detach())
        place = int(self.place)
        self.queue[place:place + 4] = torch.cat(rows)
        self.place[0] = (place + 4) % 12
        return dict(loss=loss)


@on_ranks
@hook
class FirstRankChangesAWeight(Hook):
    """Prunes on the first rank, and sends the weight to the others."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        weight = network(runner).head.fc.weight.data
        if get_rank() == 0:
            weight[weight.abs() < .05] = 0
        broadcast(weight, 0)


@on_ranks
@hook
class SendsToTheNext(Hook):
    """Point to point, in a ring."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss, other = outputs['loss'].detach().clone().view(1), torch.zeros(1)
        if get_rank() == 0:
            dist.send(loss, 1)
            dist.recv(other, 1)
        else:
            dist.recv(other, 0)
            dist.send(loss, 0)
        network(runner).head.scale = 1 + .1 * float(other)


@on_ranks
@hook
class AveragesStatisticsEachEpoch(Hook):
    """As SyncNormHook does, by hand."""

    def after_train_epoch(self, runner):
        for name, buffer in network(runner).named_buffers():
            if name.endswith(('running_mean', 'running_var')):
                dist.all_reduce(buffer)
                buffer /= get_world_size()
