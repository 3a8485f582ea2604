"""Hooks that change the model, its optimizer, its loss or its data while it trains."""
from __future__ import annotations

import copy
import functools
import os

import torch
from faults.tiny import Tiny
from mmengine.dataset import Compose
from mmengine.hooks import Hook
from mmengine.optim import ExponentialLR
from torch import nn
from torch.nn.utils import prune

from .setup import VARIATIONS, hook, model, use_all
from .setup import setup as any_setup

KIND = 'hooks that change the model or its optimizer'


def resumed_in_the_last_epoch(cfg):
    cfg.update(resume=True, load_from=os.path.join(cfg.first, 'iter_20.pth'))


VARIATIONS['resumed at 20'] = resumed_in_the_last_epoch
# an epoch after the one that begins with the change, too
setup = functools.partial(
    any_setup, variations=('again', 'workers', 'resumed at 3', 'resumed at 12', 'resumed at 20'))


def optimize_all(runner):
    """Give the optimizer the parameters that the model has now."""
    optimizer = runner.optim_wrapper.optimizer
    parameters = optimizer.param_groups[0]['params'] = [*runner.model.parameters()]
    for old in optimizer.state.keys() - set(parameters):
        del optimizer.state[old]


class AtEpoch(Hook):
    """Calls ``change(runner)`` once, when epoch 1 begins."""

    epoch = 1

    def before_train_epoch(self, runner):
        if runner.epoch == self.epoch:
            self.change(runner)


class FromEpoch(AtEpoch):
    """The same, and again in a run that resumes later."""

    changed = False

    def before_train_epoch(self, runner):
        if runner.epoch >= self.epoch and not self.changed:
            self.changed = True
            self.change(runner)


# -------------------------------------------------------------------------- what is trained


@setup(KIND)
@hook
class UnfreezesTheBackbone(AtEpoch):
    def before_train(self, runner):
        runner.model.backbone.requires_grad_(False)

    def change(self, runner):
        runner.model.backbone.requires_grad_(True)


@setup(KIND)
@hook
class UnfreezesFromAnEpochOn(FromEpoch):
    """As UnfreezesTheBackbone, by a condition that a resumed run meets as well."""

    def before_train(self, runner):
        runner.model.backbone.requires_grad_(False)

    def change(self, runner):
        runner.model.backbone.requires_grad_(True)


@setup(KIND)
@hook
class FreezesBiases(Hook):
    def before_train(self, runner):
        for name, weight in runner.model.named_parameters():
            weight.requires_grad_(not name.endswith('bias'))


@setup(KIND)
@hook
class UnfreezesLayerByLayer(Hook):
    """One more layer in each epoch."""

    def before_train_epoch(self, runner):
        layers = [runner.model.head.fc, runner.model.backbone[1], runner.model.backbone[0]]
        for number, layer in enumerate(layers):
            layer.requires_grad_(number <= runner.epoch)


@setup(KIND)
@hook
class BatchNormInEvaluation(AtEpoch):
    """Once, when epoch 1 begins; the loop trains them again in the next epoch."""

    def change(self, runner):
        runner.model.backbone[1].eval()


@setup(KIND)
@hook
class KeepsStatisticsFromAnEpochOn(AtEpoch):
    """Overwrites ``train`` of the layers, as some repositories do."""

    def change(self, runner):
        norm = runner.model.backbone[1].eval()
        norm.train = lambda mode=True: norm


# ------------------------------------------------------------------------------- modules


@setup(KIND)
@hook
class ReplacesTheActivation(AtEpoch):
    def change(self, runner):
        runner.model.backbone[2] = nn.SiLU()


class OtherHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.fc = nn.Linear(4, 4), nn.Linear(4, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x):
        return self.fc(self.hidden(x).relu())


@setup(KIND)
@hook
class ReplacesTheHead(AtEpoch):
    """The optimizer gets the parameters of the new head."""

    def change(self, runner):
        runner.model.head = OtherHead()
        runner.optim_wrapper.optimizer.add_param_group(
            dict(params=list(runner.model.head.parameters())))


@setup(KIND)
@hook
class ReplacesTheHeadAtTheStart(Hook):
    """For a fine-tuning with other classes: in every run, before a checkpoint is loaded."""

    def before_run(self, runner):
        runner.model.head = OtherHead()
        runner.optim_wrapper.optimizer.add_param_group(
            dict(params=list(runner.model.head.parameters())))


@setup(KIND)
@hook
class GrowsTheClassifier(AtEpoch):
    """One class more, with the weights of the others."""

    def change(self, runner):
        old = runner.model.head.fc
        new = runner.model.head.fc = nn.Linear(4, 4)
        with torch.no_grad():
            new.weight[:3], new.bias[:3] = old.weight, old.bias
        runner.model.head.temperature = torch.ones(4)
        optimize_all(runner)


@setup(KIND)
@hook
class NormsOfWeights(AtEpoch):
    def change(self, runner):
        nn.utils.parametrizations.weight_norm(runner.model.head.fc)
        optimize_all(runner)


@setup(KIND)
@hook
class SpectralNorm(Hook):
    """At the start of every run; power iterations in its buffers."""

    def before_run(self, runner):
        nn.utils.parametrizations.spectral_norm(runner.model.head.fc)
        optimize_all(runner)


@setup(KIND)
@hook
class OldSpectralNorm(Hook):
    """With hooks before the forward pass."""

    def before_run(self, runner):
        nn.utils.spectral_norm(runner.model.head.fc)
        optimize_all(runner)


# ----------------------------------------------------------------------------- the optimizer


@setup(KIND)
@hook
class SwapsTheOptimizer(AtEpoch):
    def change(self, runner):
        runner.optim_wrapper.optimizer = torch.optim.Adam(runner.model.parameters(), .01)


@setup(KIND)
@hook
class AddsAGroupOfParameters(AtEpoch):
    def change(self, runner):
        runner.model.late = nn.Parameter(torch.zeros(4))
        runner.model.backbone[1].register_forward_hook(
            lambda module, args, output: output + runner.model.late.view(1, 4, 1, 1))
        runner.optim_wrapper.optimizer.add_param_group(dict(params=[runner.model.late], lr=.1))


@setup(KIND)
@hook
class ChangesWeightDecay(AtEpoch):
    def change(self, runner):
        for group in runner.optim_wrapper.param_groups:
            group['weight_decay'] = .05


@setup(KIND)
@hook
class ChangesMomentum(AtEpoch):
    def change(self, runner):
        for group in runner.optim_wrapper.param_groups:
            group['momentum'] = .5


@setup(KIND)
@hook
class ClipsFromAnEpochOn(AtEpoch):
    """Gradients are clipped by a setting of the wrapper."""

    def change(self, runner):
        runner.optim_wrapper.clip_grad_kwargs = dict(max_norm=.05)
        runner.optim_wrapper.clip_func = nn.utils.clip_grad_norm_
        runner.optim_wrapper.grad_name = 'grad_norm'


@setup(KIND)
@hook
class AccumulatesFromAnEpochOn(AtEpoch):
    def change(self, runner):
        runner.optim_wrapper._accumulative_counts = 2


@setup(KIND)
@hook
class SchedulesAnew(AtEpoch):
    """Another schedule of the rate from epoch 1 on."""

    def change(self, runner):
        runner.param_schedulers = [
            ExponentialLR(runner.optim_wrapper, gamma=.7, by_epoch=False)]


# ------------------------------------------------------------------------ losses and passes


@setup(KIND)
@hook
class ChangesTheLoss(AtEpoch):
    """As YOLOX adds an L1 loss."""

    def change(self, runner):
        runner.model.head.loss = nn.CrossEntropyLoss(label_smoothing=.1)


@setup(KIND)
@hook
class WeightOfTheLoss(AtEpoch):
    def change(self, runner):
        runner.model.head.scale = 2.


@setup(KIND)
@hook
class WeightOfTheLossByEpoch(Hook):
    def before_train_epoch(self, runner):
        runner.model.head.scale = 1 + .5 * runner.epoch


@setup(KIND)
@hook
class DropoutByEpoch(Hook):
    def before_train_epoch(self, runner):
        runner.model.head.drop.p = .1 * (1 + runner.epoch)


@any_setup(KIND, variations=('resumed at 16', ))
@hook
class DropoutOfEachEpoch(Hook):
    """Never that of the config, and another one in the checkpoint of the end of an epoch."""

    def before_train_epoch(self, runner):
        runner.model.head.drop.p = .15 * (1 + runner.epoch)


@setup(KIND)
@hook
class DropoutGrows(Hook):
    """From what it was."""

    def before_train_epoch(self, runner):
        runner.model.head.drop.p = min(.9, runner.model.head.drop.p * 1.5)


@setup(KIND)
@hook
class WrapsTheForwardPass(AtEpoch):
    def change(self, runner):
        forward = runner.model.neck.forward

        @functools.wraps(forward)
        def wrapped(x):
            return forward(x).clamp(max=1.)

        runner.model.neck.forward = wrapped


@setup(KIND)
@hook
class HooksOfGradients(AtEpoch):
    """Gradients of a layer are clamped."""

    def change(self, runner):
        for weight in runner.model.head.parameters():
            weight.register_hook(lambda gradient: gradient.clamp(-.01, .01))


@setup(KIND)
@hook
class ForwardHookFromAnEpochOn(AtEpoch):
    """Noise on features."""

    def change(self, runner):
        runner.model.neck.register_forward_hook(
            lambda module, args, output: output + .1 * torch.randn_like(output))


@setup(KIND)
@hook
class PrunesWeights(Hook):
    """Small weights are set to zero after each step."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for weight in runner.model.parameters():
                weight[weight.abs() < .02] = 0


@setup(KIND)
@hook
class PrunesOnce(AtEpoch):
    """A mask of torch's own pruning, from epoch 1 on."""

    def change(self, runner):
        prune.l1_unstructured(runner.model.head.fc, 'weight', amount=.4)
        optimize_all(runner)


@setup(KIND)
@hook
class KeepsAMaskOfTheFirstWeights(Hook):
    """The lottery ticket: weights that were small at the start stay zero."""

    def before_train(self, runner):
        self.masks = [weight.detach().abs() > .1 for weight in runner.model.parameters()]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        with torch.no_grad():
            for weight, mask in zip(runner.model.parameters(), self.masks):
                weight.mul_(mask)


@setup(KIND)
@hook
class PullsTowardsItsAverages(Hook):
    """Averages weights by hand, and trains on from the average in every epoch."""

    def before_train(self, runner):
        self.average = [weight.detach().clone() for weight in runner.model.parameters()]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for average, weight in zip(self.average, runner.model.parameters()):
            average.lerp_(weight.detach(), .2)

    def after_train_epoch(self, runner):
        for average, weight in zip(self.average, runner.model.parameters()):
            weight.data.copy_(average)


@model
class Distilled(Tiny):
    """Learns from a teacher that a hook gives it."""

    def forward(self, inputs, label, mode='tensor'):
        logits = self.head(self.neck(self.backbone(inputs)).mean((2, 3)))
        if mode != 'loss':
            return logits
        losses = dict(loss=self.head.loss(logits, label))
        if getattr(self, 'teacher', None):
            losses['loss_teacher'] = (logits - self.teacher[0](inputs, None)).pow(2).mean()
        return losses


@hook
class TeachesFromAnEpochOn(AtEpoch):
    """The model of epoch 1 teaches the later one; a list hides it from the state dict."""

    def change(self, runner):
        runner.model.teacher = [copy.deepcopy(runner.model).eval().requires_grad_(False)]


def _with_a_teacher(cfg):
    use_all(cfg, Distilled, TeachesFromAnEpochOn)


_with_a_teacher.__name__ = 'TeachesFromAnEpochOn'
setup(KIND)(_with_a_teacher)


# --------------------------------------------------------------------------------- the data


@setup(KIND)
@hook
class SwitchesThePipeline(AtEpoch):
    """As PipelineSwitchHook of MMDetection does."""

    restarted = False

    def before_train_epoch(self, runner):
        loader = runner.train_dataloader
        if runner.epoch >= self.epoch and not self.restarted:
            loader.dataset.pipeline = Compose([
                dict(type=name) for name in ('TinyLoad', 'TinyJitter', 'TinyPack')])
            if getattr(loader, 'persistent_workers', False):
                loader._DataLoader__initialized = False
                loader._iterator = None
                self.restarted = True


@setup(KIND)
@hook
class SwitchesThePipelineOnce(AtEpoch):
    def change(self, runner):
        runner.train_dataloader.dataset.pipeline = Compose([
            dict(type=name) for name in ('TinyLoad', 'TinyJitter', 'TinyPack')])


@setup(KIND)
@hook
class StrongerAugmentationOnce(AtEpoch):
    """One transform more."""

    def change(self, runner):
        transforms = runner.train_dataloader.dataset.pipeline.transforms
        transforms.insert(2, transforms[2])
