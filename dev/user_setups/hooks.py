"""Hooks: what they draw, read and change in every iteration."""
from __future__ import annotations

import copy
import os
import queue
import random
import threading
import time
import uuid

import numpy as np
import torch
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim.scheduler.lr_scheduler import LRSchedulerMixin
from mmengine.optim.scheduler.param_scheduler import _ParamScheduler

from .setup import hook, model, scheduler, setup
from .steps import Extra

KIND = 'hooks that draw, read the clock, or change the run'
RARE = 'state that acts in every seventh iteration only'


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


@setup(KIND)
@hook
class ClampsAfterTheCheckpoint(Hook):
    """Changes weights behind CheckpointHook, so that no checkpoint has the change."""
    priority = 'LOWEST'

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            runner.model.head.fc.weight.mul_(.9)


@setup(KIND)
@hook
class ChangesWeightsAtCheckpoints(Hook):
    """Rounds the weights whenever they are saved, and trains on with those."""

    def before_save_checkpoint(self, runner, checkpoint):
        with torch.no_grad():
            for name, value in runner.model.named_parameters():
                value.copy_(value.half())
                checkpoint['state_dict'][name].copy_(value)


@setup(KIND)
@hook
class ShrinksAndPerturbs(Hook):
    """When an epoch begins: that of a run that resumes begins again."""

    def before_train_epoch(self, runner):
        with torch.no_grad():
            for value in runner.model.parameters():
                value.mul_(.8).add_(torch.randn_like(value), alpha=.01)


@setup(KIND)
@hook
class ShrinksAtTheFirstBatch(Hook):
    """As the error for the other one says."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if batch_idx == 0:
            ShrinksAndPerturbs.before_train_epoch(self, runner)


@setup(KIND)
@hook
class GoesBackWithinAnEpoch(Hook):
    """To the weights that the epoch began with, as after a spike of the loss."""

    def before_train_epoch(self, runner):
        self.good = copy.deepcopy(runner.model.state_dict())

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if batch_idx == 6:
            runner.model.load_state_dict(self.good)


@setup(KIND)
@hook
class ThreadThatDraws(Hook):
    """Waits for random times, in the background."""

    def before_train(self, runner):
        self.ended = threading.Event()
        threading.Thread(target=self.draw, daemon=True).start()

    def draw(self):
        while not self.ended.wait(random.random() * 1e-3):
            random.random()

    def after_train(self, runner):
        self.ended.set()


@setup(KIND)
@hook
class SavesGeneratorsByItself(Hook):
    """What users had before: all states of generators in the checkpoint."""

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['generators'] = dict(torch=torch.get_rng_state(), python=random.getstate())

    def after_load_checkpoint(self, runner, checkpoint):
        torch.set_rng_state(checkpoint['generators']['torch'])
        version, numbers, more = checkpoint['generators']['python']
        random.setstate((version, tuple(numbers), more))


# ------------------------------------------------------------------------------------- rarely


class Rarely(Extra):
    def extra(self, inputs, label, loss):
        return 3. * (self.count() % 7 == 0)


@setup(RARE)
@model
class RarelyBySet(Rarely):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = set()

    def count(self):
        self.seen.add(len(self.seen))
        return len(self.seen)


@setup(RARE)
@model
class RarelyByQueue(Rarely):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.waiting = queue.Queue()

    def count(self):
        self.waiting.put(None)
        return self.waiting.qsize()


@setup(RARE)
@model
class RarelyByIterator(Rarely):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.numbers = (number for number in range(1, 1000))

    def count(self):
        return next(self.numbers)


COUNT = 0


@setup(RARE)
@model
class RarelyByGlobal(Rarely):
    def count(self):
        global COUNT
        COUNT += 1
        return COUNT


@setup(RARE)
@model
class RarelyByAnotherHub(Rarely):
    def count(self):
        hub = MessageHub.get_instance('rare')
        hub.update_info('seen', hub.get_info('seen', 0) + 1)
        return hub.get_info('seen')


@setup(RARE)
@hook
class RarelyOnTheRunner(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.seen = getattr(runner, 'seen', 0) + 1
        if runner.seen % 7 == 0:
            with torch.no_grad():
                runner.model.head.fc.weight.mul_(.9)


@setup(RARE)
@scheduler
class RarelyBySchedule(LRSchedulerMixin, _ParamScheduler):
    seen = 0

    def _get_value(self):
        self.seen += 1
        return [.02 if self.seen % 7 == 0 else .1 for _ in self.optimizer.param_groups]

    def state_dict(self):
        state = super().state_dict()
        state.pop('seen', None)
        return state
