"""Predictions, metrics and hooks of the validation that change something the training reads."""
from __future__ import annotations

import copy
import json
import os
import random
import tempfile

import numpy as np
import torch
from faults.tiny import Tiny, TinyMetric
from mmengine.hooks import Hook
from torch import nn

from .setup import hook, metric, model, setup, use_all

KIND = 'code of a validation'
VARIED = ('again', 'not validated', 'resumed at 12')


class Predicts(Tiny):
    """A detector whose predictions and losses can be told apart."""

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            return self.predict(inputs)
        if mode == 'loss':
            return self.losses(inputs, label)
        return self.scores(inputs)

    def scores(self, inputs):
        return self.head(self.neck(self.backbone(inputs)).mean((2, 3)))

    def predict(self, inputs):
        return self.scores(inputs)

    def losses(self, inputs, label):
        return dict(loss=self.head.loss(self.scores(inputs), label))


# -------------------------------------------------------------------------------- predictions


@setup(KIND, variations=VARIED)
@model
class AdaptsStatisticsToTheTestSet(Predicts):
    """Test-time adaptation: BatchNorm takes the statistics of the images that it predicts."""

    def predict(self, inputs):
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.train()
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class SlowerStatisticsAfterPredictions(Predicts):
    def predict(self, inputs):
        self.backbone[1].momentum = .01
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class WeightOfTheLossCountsPredictions(Predicts):
    """One counter for losses and predictions: the weight of a loss warms up with it."""

    weight = 0.

    def predict(self, inputs):
        self.weight += .1
        return self.scores(inputs)

    def losses(self, inputs, label):
        losses = super().losses(inputs, label)
        losses['loss_scores'] = self.scores(inputs).pow(2).mean() * self.weight
        return losses


@setup(KIND, variations=VARIED)
@model
class PredictsWithoutDropout(Predicts):
    """Lets a module that stays in training mode predict without dropout, and leaves it so."""

    def predict(self, inputs):
        self.head.drop.p = 0.
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class FreezesItsBackboneToPredict(Predicts):
    def predict(self, inputs):
        self.backbone.requires_grad_(False)
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class TurnsGradientsOff(Predicts):
    """The loop turns gradients on again."""

    def predict(self, inputs):
        torch.set_grad_enabled(False)
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class ActivationMaps(Predicts):
    """Grad-CAM: gradients of the best score, which nobody clears before the next step."""

    def predict(self, inputs):
        with torch.enable_grad():
            scores = self.scores(inputs)
            scores.max(1).values.sum().backward()
        self.maps = self.backbone[0].weight.grad.abs().mean()
        return scores.detach()


@setup(KIND, variations=VARIED)
@model
class ForwardHookOfAPicture(Predicts):
    """A picture of the features clips them; its hook stays."""

    seen = None

    def predict(self, inputs):
        if self.seen is None:
            self.seen = True
            self.neck.register_forward_hook(lambda module, args, output: output.clamp(max=.5))
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class ScalesWeightsToPredict(Predicts):
    """Scales weights and puts them back bit for bit."""

    def predict(self, inputs):
        kept = self.head.fc.weight.detach().clone()
        with torch.no_grad():
            self.head.fc.weight.mul_(.7)
            scores = self.scores(inputs)
            self.head.fc.weight.copy_(kept)
        return scores


@setup(KIND, variations=VARIED)
@model
class DividesWeightsBack(Predicts):
    """Scales weights and divides them again, which does not give all bits back."""

    def predict(self, inputs):
        with torch.no_grad():
            self.head.fc.weight.mul_(.7)
            scores = self.scores(inputs)
            self.head.fc.weight.div_(.7)
        return scores


@setup(KIND, variations=VARIED)
@model
class CachesTheGridOfPredictions(Predicts):
    """As anchor generators do; no loss reads it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.grids = {}

    def predict(self, inputs):
        size = tuple(inputs.shape[-2:])
        if size not in self.grids:
            self.grids[size] = torch.arange(float(size[0]))
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class MatrixProductsInLowPrecision(Predicts):
    def predict(self, inputs):
        torch.set_float32_matmul_precision('medium')
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class BenchmarksConvolutionsToPredict(Predicts):
    def predict(self, inputs):
        torch.backends.cudnn.benchmark = True
        return self.scores(inputs)


@setup(KIND, variations=VARIED)
@model
class MoreThreadsToPredict(Predicts):
    """The loss adds up more numbers than torch gives to one thread."""

    def predict(self, inputs):
        torch.set_num_threads(2)
        return self.scores(inputs)

    def losses(self, inputs, label):
        losses = super().losses(inputs, label)
        scores = self.scores(inputs)
        grid = torch.arange(300_000.).sin().mul(scores.sum())
        losses['loss_grid'] = grid.sum().abs() * .1
        return losses


# ------------------------------------------------------------------------------------ metrics


@setup(KIND, variations=VARIED)
@metric
class BootstrapInterval(TinyMetric):
    """Draws random numbers for an interval of confidence."""

    def compute_metrics(self, results):
        means = [np.mean(np.random.choice(results, len(results))) for _ in range(9)]
        noise = random.random() + float(torch.rand(()))
        return dict(largest=max(results), low=min(means), noise=noise)


@setup(KIND, variations=VARIED)
@metric
class SeedsBeforeItSamples(TinyMetric):
    """Seeds all generators, so that the same images are drawn in each validation."""

    def process(self, data_batch, data_samples):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        super().process(data_batch, data_samples)


@setup(KIND, variations=VARIED)
@metric
class MeasuresInDoublePrecision(TinyMetric):
    def compute_metrics(self, results):
        torch.set_default_dtype(torch.float64)
        return dict(largest=float(torch.tensor(results).max()))


@setup(KIND, variations=VARIED)
@metric
class ReportsErrorsOfNumPy(TinyMetric):
    """Divides by the number of objects, which may be zero."""

    def compute_metrics(self, results):
        np.seterr(divide='ignore', invalid='ignore')
        return dict(largest=max(results), recall=float(np.divide(1., 0.)))


WEIGHTS = dict(scores=0.)  # of losses


@model
class WeighsByTheModule(Predicts):
    def losses(self, inputs, label):
        losses = super().losses(inputs, label)
        losses['loss_scores'] = self.scores(inputs).pow(2).mean() * WEIGHTS['scores']
        return losses


@metric
class BalancesLosses(TinyMetric):
    def compute_metrics(self, results):
        WEIGHTS['scores'] = float(np.mean(results))
        return super().compute_metrics(results)


@setup(KIND, variations=VARIED)
def metric_that_balances_losses(cfg):
    """A metric writes weights of losses to a variable of the module."""
    use_all(cfg, WeighsByTheModule, BalancesLosses)


def hard_examples():
    return os.path.join(tempfile.gettempdir(), f'hard-examples-{os.getpid()}.json')


@model
class LearnsHardExamples(Predicts):
    def losses(self, inputs, label):
        losses = super().losses(inputs, label)
        if os.path.exists(hard_examples()):
            with open(hard_examples()) as file:
                losses['loss'] = losses['loss'] * (1 + json.load(file)['mean'])
        return losses


@metric
class WritesHardExamples(TinyMetric):
    def compute_metrics(self, results):
        with open(hard_examples(), 'w') as file:
            json.dump(dict(mean=float(np.mean(results))), file)
        return super().compute_metrics(results)


@setup(KIND, variations=VARIED)
def file_of_hard_examples(cfg):
    """A metric writes a file that the loss reads."""
    use_all(cfg, LearnsHardExamples, WritesHardExamples)


# -------------------------------------------------------------------------------------- hooks


@setup(KIND, variations=VARIED)
@hook
class LowersTheRateAfterABadScore(Hook):
    best = float('-inf')

    def after_val_epoch(self, runner, metrics=None):
        if metrics['largest'] < self.best + .5:
            for group in runner.optim_wrapper.param_groups:
                group['lr'] *= .3
        self.best = max(self.best, metrics['largest'])


@setup(KIND, variations=VARIED)
@hook
class ForgetsMomentaAfterValidation(Hook):
    def after_val_epoch(self, runner, metrics=None):
        runner.optim_wrapper.optimizer.state.clear()


@setup(KIND, variations=VARIED)
@hook
class NormalizesTheClassifierAfterValidation(Hook):
    def after_val_epoch(self, runner, metrics=None):
        weight = runner.model.head.fc.weight
        weight.data.div_(weight.data.norm(dim=1, keepdim=True))


@setup(KIND, variations=VARIED)
@hook
class CalibratesTheTemperature(Hook):
    def after_val_epoch(self, runner, metrics=None):
        runner.model.head.temperature.fill_(1 / (1 + abs(metrics['largest'])))


@setup(KIND, variations=VARIED)
@hook
class BestScoreScalesTheLogits(Hook):
    best = 0.

    def after_val_epoch(self, runner, metrics=None):
        self.best = max(self.best, metrics['largest'])
        runner.model.head.scale = 1 + self.best


@setup(KIND, variations=VARIED)
@hook
class KeepsTheBestScoreInTheModel(Hook):
    """No training reads it."""

    def after_val_epoch(self, runner, metrics=None):
        runner.model.best = max(getattr(runner.model, 'best', 0), metrics['largest'])


@setup(KIND, variations=VARIED)
@hook
class EvaluatesACopy(Hook):
    def before_val_epoch(self, runner):
        self.copy = copy.deepcopy(runner.model).eval()
        with torch.no_grad():
            self.copy(torch.rand(2, 3, 8, 8), None)


@setup(KIND, variations=VARIED)
@hook
class LossOfTheValidationImages(Hook):
    """Computes the losses of a batch of the validation in training mode."""

    def after_val_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        network = runner.model
        network.train()
        network(**network.data_preprocessor(data_batch, True), mode='loss')
        network.eval()


@setup(KIND, variations=VARIED)
@hook
class LeavesTheNeckOut(Hook):
    """Simplifies the model to export it, in place."""

    def after_val_epoch(self, runner, metrics=None):
        runner.model.neck = nn.Identity()


@setup(KIND, variations=VARIED)
@hook
class FoldsStatisticsIntoTheConvolution(Hook):
    """Fuses convolution and BatchNorm for speed, before the first validation."""

    def before_val_epoch(self, runner):
        conv, norm = runner.model.backbone[:2]
        if isinstance(norm, nn.BatchNorm2d):
            runner.model.backbone[0] = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
            runner.model.backbone[1] = nn.Identity()
