"""Averages of weights, adapters whose checkpoints hold trained weights only, and teachers."""
from __future__ import annotations

import copy
import os
from collections import deque

import torch
from faults.tiny import Tiny
from mmengine.hooks import Hook
from mmengine.model import BaseAveragedModel
from torch import nn

import mmrepro

from .reshaping import AtEpoch
from .setup import average, hook, model, setup, use_all

AVERAGES = 'averages of weights'
ADAPTERS = 'checkpoints that a hook reduces'
TEACHERS = 'teachers'


def average_of(runner):
    return next(each.ema_model for each in runner.hooks if hasattr(each, 'ema_model'))


# ---------------------------------------------------------------------------------- averages


class Ramp(BaseAveragedModel):
    """The momentum follows from ``count()``."""

    def avg_func(self, averaged_param, source_param, steps):
        averaged_param.lerp_(source_param, 1 / (2 + self.count(steps)))


@setup(AVERAGES)
@average
class RampOfUpdates(Ramp):
    """Counts its updates in an attribute."""

    updates = 0

    def count(self, steps):
        return self.updates

    def update_parameters(self, model):
        super().update_parameters(model)
        self.updates += 1


@setup(AVERAGES)
@average
class RampOfUpdatesKept(RampOfUpdates):
    """The same, and checkpoints keep the attribute."""


mmrepro.keep_attributes(RampOfUpdatesKept, 'updates', why='the momentum follows from it')


@setup(AVERAGES)
@average
class RampOfSteps(Ramp):
    """By the counter that every average has in a buffer."""

    def count(self, steps):
        return int(steps)


@setup(AVERAGES)
@average
class CountsInABufferOfItsOwn(Ramp):
    def __init__(self, model, **kwargs):
        super().__init__(model, **kwargs)
        self.register_buffer('seen', torch.zeros((), dtype=torch.long))

    def count(self, steps):
        return int(self.seen)

    def update_parameters(self, model):
        super().update_parameters(model)
        self.seen += 1


@setup(AVERAGES)
@average
class MomentumByTheLastDistances(BaseAveragedModel):
    """Follows faster when the model moves faster than before."""

    def __init__(self, model, **kwargs):
        super().__init__(model, **kwargs)
        self.distances = deque(maxlen=20)

    def avg_func(self, averaged_param, source_param, steps):
        distance = float((averaged_param - source_param).norm())
        self.distances.append(distance)
        averaged_param.lerp_(source_param, distance / (1e-6 + 2 * max(self.distances)))


@setup(AVERAGES)
@average
class MomentumByTheDistance(BaseAveragedModel):
    """From the two weights alone."""

    def avg_func(self, averaged_param, source_param, steps):
        distance = float((averaged_param - source_param).norm())
        averaged_param.lerp_(source_param, 1 / (2 + distance))


class ByHand(BaseAveragedModel):
    """Updates all parameters at once, with ``follow(model)``."""

    def avg_func(self, averaged_param, source_param, steps):
        pass

    def update_parameters(self, model):
        super().update_parameters(model)
        with torch.no_grad():
            self.follow(model)


@setup(AVERAGES)
@average
class AverageOfThreeStepsAgo(ByHand):
    """A queue of weights."""

    def __init__(self, model, **kwargs):
        super().__init__(model, **kwargs)
        self.queue = deque(maxlen=3)

    def follow(self, model):
        self.queue.append([value.detach().clone() for value in model.parameters()])
        for ours, theirs in zip(self.module.parameters(), self.queue[0]):
            ours.lerp_(theirs, .3)


@setup(AVERAGES)
@average
class AveragesInDoublePrecision(ByHand):
    """Precise averages beside those that are saved, in a list."""

    precise = None

    def follow(self, model):
        if self.precise is None:
            self.precise = [value.detach().double() for value in self.module.parameters()]
        for precise, ours, theirs in zip(
                self.precise, self.module.parameters(), model.parameters()):
            precise.lerp_(theirs.double(), .1)
            ours.copy_(precise)


def averaged(cfg, **options):
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=.1, **options))


@hook
class SecondPhase(AtEpoch):
    def change(self, runner):
        average_of(runner).momentum = .5


@setup(AVERAGES)
def another_momentum_once(cfg):
    """From epoch 1 on, set once."""
    use_all(cfg, SecondPhase)
    averaged(cfg)


@hook
class MomentumByEpoch(Hook):
    def before_train_epoch(self, runner):
        average_of(runner).momentum = .1 * (1 + runner.epoch)


@setup(AVERAGES)
def another_momentum_in_each_epoch(cfg):
    use_all(cfg, MomentumByEpoch)
    averaged(cfg)


@hook
class TrainsOnFromTheAverage(Hook):
    def after_train_epoch(self, runner):
        with torch.no_grad():
            for ours, theirs in zip(runner.model.parameters(), average_of(runner).parameters()):
                ours.copy_(theirs)


@setup(AVERAGES)
def epochs_that_begin_with_the_average(cfg):
    """The average of EMAHook, which checkpoints have."""
    use_all(cfg, TrainsOnFromTheAverage)
    averaged(cfg)


@setup(AVERAGES)
def average_of_buffers(cfg):
    averaged(cfg, update_buffers=True)


@setup(AVERAGES)
def average_that_begins_later(cfg):
    averaged(cfg, begin_epoch=1)


@setup(AVERAGES)
def average_with_annealing(cfg):
    averaged(cfg, ema_type='MomentumAnnealingEMA', gamma=10)


@setup(AVERAGES)
def average_every_three_iterations(cfg):
    averaged(cfg, interval=3)


# ---------------------------------------------------------------------------------- adapters


class LowRank(nn.Module):
    """A layer whose weight is frozen, and a product of two small matrices that is trained."""

    def __init__(self, layer):
        super().__init__()
        self.base = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, layer.in_features) * .1)
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


@model
class Adapted(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone[0].requires_grad_(False)
        self.head.fc = LowRank(self.head.fc)


def pretrained(cfg):
    """Return the path of a file of weights, which all runs of a set-up read."""
    path = os.path.join(os.path.dirname(cfg.first), 'pretrained.pth')
    if not os.path.exists(path):
        generator = torch.Generator().manual_seed(1)
        weights = {name: torch.randn(value.shape, generator=generator) * .3
                   for name, value in Adapted().named_parameters() if not value.requires_grad}
        torch.save(dict(state_dict=weights), path)
    return path


@hook
class SavesTrainedWeights(Hook):
    """Checkpoints of a few megabytes: what is frozen is in the file of the base model."""

    def before_save_checkpoint(self, runner, checkpoint):
        frozen = {name for name, value in runner.model.named_parameters()
                  if not value.requires_grad}
        checkpoint['state_dict'] = {name: value for name, value
                                    in checkpoint['state_dict'].items() if name not in frozen}


@hook
class ReadsTheBaseAgain(Hook):
    """Completes a checkpoint that is loaded with the weights of the base model."""

    def __init__(self, path):
        self.path = path

    def after_load_checkpoint(self, runner, checkpoint):
        base = torch.load(self.path)['state_dict']
        checkpoint['state_dict'] = {**base, **checkpoint['state_dict']}


@setup(ADAPTERS)
def adapters_without_their_base(cfg):
    """The base model is loaded once, by load_from."""
    use_all(cfg, Adapted, SavesTrainedWeights)
    cfg.load_from = pretrained(cfg)


@setup(ADAPTERS)
def adapters_that_read_their_base_again(cfg):
    use_all(cfg, Adapted, SavesTrainedWeights, ReadsTheBaseAgain)
    cfg.load_from = cfg.custom_hooks[-1]['path'] = pretrained(cfg)


@setup(ADAPTERS)
def adapters_saved_as_a_whole(cfg):
    use_all(cfg, Adapted)
    cfg.load_from = pretrained(cfg)


@model
class AdaptsItsBase(Adapted):
    """The constructor reads the base model."""

    def __init__(self, base, **kwargs):
        super().__init__(**kwargs)
        self.load_state_dict(torch.load(base)['state_dict'], strict=False)


@setup(ADAPTERS)
def adapters_whose_constructor_reads_the_base(cfg):
    use_all(cfg, AdaptsItsBase, SavesTrainedWeights)
    cfg.model.base = pretrained(cfg)


# ---------------------------------------------------------------------------------- teachers


class Student(Tiny):
    """Learns from ``teach(inputs)`` as well."""

    def forward(self, inputs, label, mode='tensor'):
        logits = self.head(self.neck(self.backbone(inputs)).mean((2, 3)))
        if mode != 'loss':
            return logits
        target = self.teach(inputs).detach()
        return dict(loss=self.head.loss(logits, label),
                    loss_teacher=(logits - target).pow(2).mean())


def follow(teacher, student, share=.1):
    with torch.no_grad():
        for theirs, ours in zip(teacher.parameters(), student.parameters()):
            theirs.lerp_(ours, share)


@setup(TEACHERS)
@model
class TeacherInAList(Student):
    """A list hides it from the state dict; it follows the student."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = [Tiny().eval()]

    def teach(self, inputs):
        follow(self.teacher[0], self)
        return self.teacher[0](inputs, None)


@setup(TEACHERS)
@model
class TeacherAsSubmodule(Student):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = Tiny().eval().requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def teach(self, inputs):
        own = [value for name, value in self.named_parameters() if 'teacher' not in name]
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), own):
                theirs.lerp_(ours, .1)
        return self.teacher(inputs, None)


@setup(TEACHERS)
@model
class FrozenTeacherInATuple(Student):
    """Its weights come from the seed, and nothing changes them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = (Tiny().eval().requires_grad_(False), )

    def teach(self, inputs):
        return self.teacher[0](inputs, None)


@model
class TaughtByAHook(Student):
    taught = None

    def teach(self, inputs):
        return self.taught(inputs, None)


@hook
class TeacherOfTheHook(Hook):
    """A copy of the model that follows it, as MeanTeacher does; the hook has it."""

    def before_train(self, runner):
        self.teacher = copy.deepcopy(runner.model).eval().requires_grad_(False)
        object.__setattr__(runner.model, 'taught', self.teacher)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        follow(self.teacher, runner.model)


@setup(TEACHERS)
def teacher_of_a_hook(cfg):
    use_all(cfg, TaughtByAHook, TeacherOfTheHook)


@hook
class TeacherThatIsKept(TeacherOfTheHook):
    """Checkpoints keep it."""


mmrepro.keep_attributes(TeacherThatIsKept, 'teacher', why='the student learns from it')


@setup(TEACHERS)
def teacher_of_a_hook_kept(cfg):
    use_all(cfg, TaughtByAHook, TeacherThatIsKept)


@hook
class TeacherIsTheAverage(Hook):
    """The average of EMAHook teaches."""

    def before_train(self, runner):
        object.__setattr__(runner.model, 'taught', average_of(runner).module)


@setup(TEACHERS)
def average_as_teacher(cfg):
    use_all(cfg, TaughtByAHook, TeacherIsTheAverage)
    averaged(cfg)


@hook
class TeacherFromAFile(Hook):
    def __init__(self, path):
        self.path = path

    def before_train(self, runner):
        teacher = Tiny().eval().requires_grad_(False)
        teacher.load_state_dict(torch.load(self.path)['state_dict'], strict=False)
        object.__setattr__(runner.model, 'taught', teacher)


@setup(TEACHERS)
def teacher_from_a_file(cfg):
    """All its weights are in the file."""
    use_all(cfg, TaughtByAHook, TeacherFromAFile)
    path = os.path.join(os.path.dirname(cfg.first), 'teacher.pth')
    if not os.path.exists(path):
        generator = torch.Generator().manual_seed(2)
        torch.save(dict(state_dict={name: torch.rand(value.shape, generator=generator)
                                    for name, value in Tiny().named_parameters()}), path)
    cfg.custom_hooks[-1]['path'] = path
