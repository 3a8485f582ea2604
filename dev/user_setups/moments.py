"""Moments of a run: files open, metrics are known, epochs end, state begins to act."""
from __future__ import annotations

import copy
import functools
import io
import multiprocessing
import os
import zipfile

import numpy as np
import torch
from faults.tiny import Tiny, TinyData, TinyMetric
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import EpochBasedTrainLoop
from torch import nn
from torch.utils.checkpoint import checkpoint

import mmrepro

from .averages import averaged
from .setup import dataset, hook, loop, metric, model, setup, transform, use_all
from .steps import Extra

DATA = 'moments of data'
METRICS = 'training that reacts to metrics'
EPOCHS = 'ends of epochs and intervals'
STEPS = 'steps in parts'
LATE = 'state that acts later'
MEMORIES = 'queues, banks and teachers of a model'


# -------------------------------------------------------------------------------------- data


@dataset
class ArchiveOfEntries(TinyData):
    """Annotations say where a number is in an archive, which the first entry opens."""

    archive = path = None

    def __init__(self, path=None, **kwargs):
        self.path = path
        super().__init__(**kwargs)

    def get_data_info(self, idx):
        if self.archive is None:
            self.archive = zipfile.ZipFile(self.path)
        value = np.load(io.BytesIO(self.archive.read(str(idx))))
        return dict(super().get_data_info(idx), number=float(value))


@setup(DATA)
def archive_that_an_entry_opens(cfg):
    use_all(cfg, ArchiveOfEntries)
    path = os.path.join(os.path.dirname(cfg.first), 'numbers.zip')
    if not os.path.exists(path):
        with zipfile.ZipFile(path, 'w') as archive:
            for number in range(16):
                content = io.BytesIO()
                np.save(content, np.sqrt(number))
                archive.writestr(str(number), content.getvalue())
    cfg.train_dataloader.dataset.path = path


@dataset
class ValueOfAllProcesses(TinyData):
    """Workers that stay read what a hook sets in each epoch."""

    def __init__(self, **kwargs):
        self.level = multiprocessing.Value('d', 0.)
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        gain = 1 + self.level.value * float(torch.rand(()))
        return dict(sample, inputs=sample['inputs'] * gain)


@hook
class LevelOfTheEpoch(Hook):
    def before_train_epoch(self, runner):
        runner.train_dataloader.dataset.level.value = .1 * runner.epoch


@setup(DATA)
def value_of_all_processes(cfg):
    use_all(cfg, ValueOfAllProcesses, LevelOfTheEpoch)
    cfg.train_dataloader.update(num_workers=2, persistent_workers=True)


@functools.lru_cache(maxsize=8)
def ramp_of(number):
    return np.full((3, 8, 8), number / 16, dtype=np.float32)


@setup(DATA)
@transform
class WritesIntoTheCache(BaseTransform):
    """Changes in place what a cached function returns."""

    def transform(self, results):
        ramp = ramp_of(results['number'])
        ramp += np.float32(np.random.rand())
        return dict(results, img=results['img'] + ramp)


STAGE = dict(strength=0.)


@transform
class StrengthOfTheModule(BaseTransform):
    def transform(self, results):
        gain = np.float32(1 + STAGE['strength'] * np.random.rand())
        return dict(results, img=results['img'] * gain)


@hook
class SecondStage(Hook):
    """Begins within an epoch, by a number of the module that transforms read."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 9:
            STAGE['strength'] = .8


@setup(DATA)
def stage_in_a_global(cfg):
    STAGE['strength'] = 0.
    use_all(cfg, StrengthOfTheModule, SecondStage)


# ----------------------------------------------------------------------------------- metrics


@metric
class Rising(TinyMetric):
    """Is better in each of the first two validations only."""

    def compute_metrics(self, results):
        return dict(largest=round(max(results), 1))


def more_workers(cfg):
    cfg.val_dataloader.num_workers = 2


@setup(METRICS, later=more_workers)
def rate_that_waits_for_a_plateau(cfg):
    use_all(cfg, Rising)
    cfg.param_scheduler = dict(type='ReduceOnPlateauLR', monitor='largest', rule='greater',
                               factor=.5, patience=0, threshold=.5)


@setup(METRICS, later=more_workers)
def stops_early_with_patience(cfg):
    use_all(cfg, Rising)
    cfg.train_cfg.max_epochs = 6
    cfg.custom_hooks.append(dict(type='EarlyStoppingHook', monitor='largest', rule='greater',
                                 patience=2, min_delta=5))


# ------------------------------------------------------------------------------------ epochs


@setup(EPOCHS)
@hook
class MeanOfTheLastEpochs(Hook):
    """Adds up the weights of some epochs, and trains on from their mean."""

    def __init__(self):
        self.sum, self.count = None, 0

    def after_train_epoch(self, runner):
        weights = [value.detach().clone() for value in runner.model.parameters()]
        self.sum = weights if self.sum is None else [*map(torch.add, self.sum, weights)]
        self.count += 1
        if self.count == 2:
            with torch.no_grad():
                for value, total in zip(runner.model.parameters(), self.sum):
                    value.copy_(total / self.count)


@setup(EPOCHS)
def stochastic_weight_average(cfg):
    averaged(cfg, ema_type='StochasticWeightAverage', begin_epoch=1)
    del cfg.custom_hooks[-1]['momentum']


@setup(EPOCHS)
def intervals_that_change(cfg):
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=23, val_interval=9,
                         dynamic_intervals=[(12, 4)])
    cfg.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)


@setup(EPOCHS)
def schedules_by_epoch_and_iteration(cfg):
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=.01, end=1, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', T_max=4, begin=1, end=5, convert_to_iter_based=True),
        dict(type='CosineAnnealingMomentum', eta_min=.5, T_max=3)]


@setup(EPOCHS)
@loop
class HardBatchesAgain(EpochBasedTrainLoop):
    """Steps on two batches of an epoch once more at its end; they count as no iteration."""

    def run_epoch(self):
        self.runner.call_hook('before_train_epoch')
        self.runner.model.train()
        hard = []
        for number, batch in enumerate(self.dataloader):
            self.run_iter(number, batch)
            hard += [batch] * (number in (2, 5))
        for batch in hard:
            self.runner.model.train_step(batch, self.runner.optim_wrapper)
        self.runner.call_hook('after_train_epoch')
        self._epoch += 1


# ------------------------------------------------------------------------------------- steps


@model
class TwoOptimizers(Tiny):
    def train_step(self, data, optim_wrapper):
        loss, logged = self.parse_losses(self(**self.data_preprocessor(data, True), mode='loss'))
        wrappers = [*optim_wrapper.values()]
        for each in wrappers:
            each.zero_grad()
        loss.backward()
        for each in wrappers:
            each.step()
        return logged


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OneForTheHead:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        return OptimWrapperDict(
            backbone=OptimWrapper(torch.optim.Adam(model.backbone.parameters(), lr=.01)),
            head=OptimWrapper(torch.optim.SGD(model.head.parameters(), lr=.1, momentum=.9)))


@setup(STEPS)
def two_optimizers(cfg):
    use_all(cfg, TwoOptimizers)
    cfg.optim_wrapper = dict(constructor='OneForTheHead')
    cfg.param_scheduler = dict(backbone=dict(type='StepLR', step_size=1),
                               head=dict(type='MultiStepLR', milestones=[2]))


@setup(STEPS)
@model
class ComputesTheBackboneTwice(Extra):
    """Checkpointed activations behind a dropout."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone = nn.Sequential(nn.Dropout(.2), *self.backbone)

    def extra(self, inputs, label, loss):
        features = checkpoint(self.backbone, inputs.requires_grad_(), use_reentrant=False)
        return features.mean()


@setup(STEPS)
@model
class MaskOfTheStart(Extra):
    """A random mask that the constructor draws into a plain attribute."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mask = torch.rand(3, 4) > .3

    def extra(self, inputs, label, loss):
        return (self.head.fc.weight * self.mask).pow(2).mean()


@model
class StudentOfATeacher(Tiny):
    """A teacher that MMDetection's hook averages."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.student = MODELS.build(dict(type='Tiny'))
        self.teacher = MODELS.build(dict(type='Tiny'))

    def forward(self, inputs, label, mode='tensor'):
        with torch.no_grad():
            target = self.teacher(inputs, label)
        if mode != 'loss':
            return target
        losses = self.student(inputs, label, mode)
        return dict(losses, loss_teacher=(self.student(inputs, label) - target).pow(2).mean())


@setup(STEPS)
def mean_teacher_of_mmdetection(cfg):
    use_all(cfg, StudentOfATeacher)
    cfg.custom_hooks.append(dict(type='mmdet.MeanTeacherHook', momentum=.1))


# -------------------------------------------------------------------------------------- late


def warming_up(steps):
    count = 0

    def factor():
        nonlocal count
        count += 1
        return 1. if count > steps else .5
    return factor


@setup(LATE)
@model
class WarmUpInAClosure(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.factor = warming_up(15)

    def extra(self, inputs, label, loss):
        return self.factor()


@setup(LATE)
@hook
class ScaleOfLoggedLosses(Hook):
    """Reads the history that MMEngine keeps for the log."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        history = runner.message_hub.log_scalars.get('train/loss')
        runner.model.head.scale = 1. if history is None else 1 / (1 + float(history.mean(6)))


# ---------------------------------------------------------------------------------- memories


@setup(MEMORIES)
@model
class MomentumContrast(Extra):
    """A key encoder, and a queue of its features with a pointer, all in the state dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.key = copy.deepcopy(self.backbone).requires_grad_(False)
        self.register_buffer('queue', torch.randn(4, 12))
        self.register_buffer('pointer', torch.zeros((), dtype=torch.long))

    def extra(self, inputs, label, loss):
        query = self.backbone(inputs).mean((2, 3))
        with torch.no_grad():
            for theirs, ours in zip(self.key.parameters(), self.backbone.parameters()):
                theirs.lerp_(ours, .1)
            keys = self.key(inputs).mean((2, 3))
        scores = torch.cat([(query * keys).sum(1, keepdim=True), query @ self.queue.clone()], 1)
        begin = int(self.pointer)
        self.queue[:, begin:begin + len(keys)] = keys.T
        self.pointer.fill_((begin + len(keys)) % 12)
        return nn.functional.cross_entropy(scores, torch.zeros_like(label))


class FollowsFromItsFirstStep(Extra):
    """A teacher that is copied at the first step, and follows the student afterwards."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.teacher = copy.deepcopy(self.backbone).requires_grad_(False)
        self.start()

    def extra(self, inputs, label, loss):
        share = min(1 - 1 / (int(self.steps) + 1), .99)
        self.steps += 1
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.backbone.parameters()):
                theirs.lerp_(ours, 1 - share)
        return (self.teacher(inputs) - self.backbone(inputs)).pow(2).mean()


@setup(MEMORIES)
@model
class TeacherWithALocalIteration(FollowsFromItsFirstStep):
    def start(self):
        self.steps = 0


@setup(MEMORIES)
@model
class TeacherWithAnIterationInABuffer(FollowsFromItsFirstStep):
    def start(self):
        self.register_buffer('steps', torch.zeros((), dtype=torch.long))


@setup(MEMORIES)
@model
class BankOfImages(Extra):
    """Features by image, which the next epoch compares with; checkpoints keep the dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.bank = {}

    def extra(self, inputs, label, loss):
        total = 0.
        for image, feature in zip(inputs, self.backbone(inputs).mean((2, 3))):
            key = round(float(image.abs().sum()))
            total = total + (feature - self.bank.get(key, feature)).pow(2).mean()
            self.bank[key] = feature.detach()
        return total


mmrepro.keep_attributes(BankOfImages, 'bank')


class Grows(Extra):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('queue', torch.zeros(0, 4))

    def extra(self, inputs, label, loss):
        features = self.backbone(inputs).mean((2, 3))
        scores = (features @ self.queue.T).pow(2).sum()
        self.queue = torch.cat([features.detach(), self.queue])[:9]
        return scores


@setup(MEMORIES)
@model
class QueueThatGrows(Grows):
    """A buffer that has another size in the checkpoint than when the model is built."""


@setup(MEMORIES)
@model
class QueueThatGrowsAndLoads(Grows):
    """As the error for the other one says."""

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.queue = torch.zeros_like(state_dict.get(f'{prefix}queue', self.queue))
        super()._load_from_state_dict(state_dict, prefix, *args)


@setup(MEMORIES)
@model
class BankInInferenceMode(Extra):
    """A tensor of inference mode, which can be written in that mode only."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        with torch.inference_mode():
            self.mean = torch.zeros(3)

    def extra(self, inputs, label, loss):
        with torch.inference_mode():
            self.mean.lerp_(inputs.mean((0, 2, 3)), .1)
        return self.mean.clone().sum()
