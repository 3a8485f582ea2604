"""Settings that hooks change once, or in every epoch, and state of hooks."""
from __future__ import annotations

import time

import numpy as np
import torch
from faults.tiny import Tiny, TinyData
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from torch.utils.data import Sampler

import mmrepro

from .reshaping import AtEpoch
from .setup import dataset, hook, model, sampler, setup, transform, use_all
from .validations import VARIED, Predicts

ONCE = 'settings that a hook changes once'
ALWAYS = 'settings that a hook changes in each epoch'
WEIGHTS = 'samplers that a hook reweights'
HOOKS = 'state of hooks'
CLOCKS = 'clocks and numbers of logs and checkpoints'


# ------------------------------------------------------------------ transforms and datasets


@transform
class Darkens(BaseTransform):
    """With a probability, which hooks change."""

    probability = 0.

    def transform(self, results):
        if np.random.rand() < self.probability:
            results['img'] = results['img'] * np.float32(.5)
        return results


def darkening(runner):
    return next(each for each in runner.train_dataloader.dataset.pipeline.transforms
                if isinstance(each, Darkens))


@hook
class DarkensFromAnEpochOn(AtEpoch):
    def change(self, runner):
        darkening(runner).probability = .7


@hook
class DarkensByEpoch(Hook):
    def before_train_epoch(self, runner):
        darkening(runner).probability = .3 * runner.epoch


@setup(ONCE)
def probability_of_a_transform(cfg):
    use_all(cfg, Darkens, DarkensFromAnEpochOn)


@setup(ALWAYS)
def probability_by_epoch(cfg):
    use_all(cfg, Darkens, DarkensByEpoch)


@transform
class DarkensAndIsKept(Darkens):
    pass


mmrepro.keep_attributes(DarkensAndIsKept, 'probability')


@setup(ONCE)
def probability_that_is_kept(cfg):
    use_all(cfg, DarkensAndIsKept, DarkensFromAnEpochOn)


@dataset
class Levels(TinyData):
    """As many levels as a real dataset has images."""

    def __init__(self, **kwargs):
        self.levels = [0] * 100
        super().__init__(**kwargs)

    def prepare_data(self, idx):
        sample = super().prepare_data(idx)
        return dict(sample, inputs=sample['inputs'] * (1 + .1 * self.levels[idx]))


@hook
class Curriculum(Hook):
    def before_train_epoch(self, runner):
        levels = runner.train_dataloader.dataset.levels
        levels[:] = [runner.epoch] * len(levels)


@hook
class CurriculumThatAdds(Hook):
    """Makes each epoch harder than it was."""

    def before_train_epoch(self, runner):
        levels = runner.train_dataloader.dataset.levels
        levels[:] = [level + 1 for level in levels]


@setup(ALWAYS)
def curriculum_by_epoch(cfg):
    use_all(cfg, Levels, Curriculum)


@setup(ONCE)
def curriculum_that_adds(cfg):
    use_all(cfg, Levels, CurriculumThatAdds)


# ------------------------------------------------------------------------------------ models


class Assigner:
    """Like those of MMDetection, no module."""

    threshold = 0.


@model
class Assigned(Tiny):
    """Samples whose score is below a threshold count less."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.assigner = Assigner()

    def forward(self, inputs, label, mode='tensor'):
        logits = self.head(self.neck(self.backbone(inputs)).mean((2, 3)))
        if mode != 'loss':
            return logits
        share = (logits.detach().max() > self.assigner.threshold).float()
        return dict(loss=self.head.loss(logits, label) * (.5 + share))


@hook
class ThresholdOnce(AtEpoch):
    def change(self, runner):
        runner.model.assigner.threshold = 5.


@hook
class ThresholdByEpoch(Hook):
    def before_train_epoch(self, runner):
        runner.model.assigner.threshold = 5. * (runner.epoch % 2)


@hook
class ThresholdOfLastScores(Hook):
    """Follows the losses, as that of Dynamic R-CNN does."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        assigner = runner.model.assigner
        assigner.threshold = .9 * assigner.threshold + .1 * float(outputs['loss'])


@setup(ONCE)
def threshold_of_an_assigner(cfg):
    use_all(cfg, Assigned, ThresholdOnce)


@setup(ALWAYS)
def threshold_by_epoch(cfg):
    use_all(cfg, Assigned, ThresholdByEpoch)


@setup(ONCE)
def threshold_of_last_scores(cfg):
    use_all(cfg, Assigned, ThresholdOfLastScores)


@setup(ONCE)
@hook
class FreezesAStageOnce(AtEpoch):
    def change(self, runner):
        runner.model.backbone[0].requires_grad_(False)


@setup(ONCE)
@hook
class RateOfOneEpoch(AtEpoch):
    """The optimizer has it, and schedules multiply it; checkpoints keep both."""

    def change(self, runner):
        for group in runner.optim_wrapper.param_groups:
            group['lr'] *= 10


@setup(ONCE)
@hook
class DropoutOnce(AtEpoch):
    def change(self, runner):
        runner.model.head.drop.p = .6


# ---------------------------------------------------------------------------------- samplers


class Weighted(Sampler):
    """Draws samples by weights that hooks change."""

    def __init__(self, dataset, shuffle=True, seed=None):
        self.weights, self.epoch = torch.ones(len(dataset)), 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.weights)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.multinomial(self.weights, len(self), True, generator=generator).tolist())


@sampler
class ByWeights(Weighted):
    pass


@sampler
class ByWeightsThatAreKept(Weighted):
    pass


mmrepro.keep_attributes(ByWeightsThatAreKept, 'weights', why='a hook changes them')


@hook
class WeighsByLosses(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        runner.train_dataloader.sampler.weights[batch_idx] += 5 * float(outputs['loss'])


@hook
class WeighsByTheModel(Hook):
    """When an epoch begins, from the weights that the model has then."""

    def before_train_epoch(self, runner):
        weights = runner.train_dataloader.sampler.weights
        weights[::2] = 1 + 20 * float(runner.model.head.fc.weight.detach().abs().mean())


@hook
class WeighsByEpoch(Hook):
    def before_train_epoch(self, runner):
        runner.train_dataloader.sampler.weights[::2] = 1 + runner.epoch


@setup(WEIGHTS)
def weights_by_losses(cfg):
    use_all(cfg, ByWeights, WeighsByLosses)


@setup(WEIGHTS)
def weights_by_losses_kept(cfg):
    use_all(cfg, ByWeightsThatAreKept, WeighsByLosses)


@setup(WEIGHTS)
def weights_by_the_model(cfg):
    use_all(cfg, ByWeights, WeighsByTheModel)


@setup(WEIGHTS)
def weights_by_epoch(cfg):
    use_all(cfg, ByWeights, WeighsByEpoch)


# ------------------------------------------------------------------------------------- hooks


class Patience(Hook):
    """Halves the rate when the loss was not the smallest for three iterations."""

    best, waited = float('inf'), 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        loss = float(outputs['loss'])
        self.waited = 0 if loss < self.best else self.waited + 1
        self.best = min(self.best, loss)
        if self.waited == 3:
            self.waited = 0
            for group in runner.optim_wrapper.param_groups:
                group['lr'] *= .5


@setup(HOOKS)
@hook
class PatienceThatIsLost(Patience):
    pass


@setup(HOOKS)
@hook
class PatienceThatIsKept(Patience):
    pass


mmrepro.keep_attributes(PatienceThatIsKept, 'best', 'waited')


@setup(HOOKS)
@hook
class SavesItsStateByItself(Hook):
    """Writes its counter into checkpoints, and reads it from them."""

    count = 0

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.count += 1
        runner.model.head.scale = 1 + .05 * self.count

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['counter'] = self.count

    def after_load_checkpoint(self, runner, checkpoint):
        self.count = checkpoint['counter']
        runner.model.head.scale = 1 + .05 * self.count


@setup(HOOKS)
@hook
class KeepsItsStateInTheHub(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.head.scale = 1 + runner.message_hub.get_info('user_mean', 0.)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        before = runner.message_hub.get_info('user_mean', 0.)
        runner.message_hub.update_info('user_mean', .9 * before + .1 * float(outputs['loss']))


@setup(HOOKS)
@hook
class GradientHookWithAMemory(Hook):
    """Registered when the training begins; divides by the largest norm so far."""

    def before_train(self, runner):
        self.largest = 0.
        runner.model.head.fc.weight.register_hook(self.divided)

    def divided(self, gradient):
        self.largest = max(self.largest, float(gradient.norm()))
        return gradient / (1 + self.largest)


@setup(HOOKS)
@hook
class WarmsUpFromTheHub(Hook):
    """Reads the iteration where MMEngine writes it."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        iteration = MessageHub.get_current_instance().get_info('iter', 0)
        runner.model.head.scale = min(1., (1 + iteration) / 10)


# ------------------------------------------------------------------------------------ clocks


@setup(CLOCKS)
@hook
class TimesInTheVisualizer(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.begun = time.perf_counter()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        took = time.perf_counter() - self.begun
        runner.visualizer.add_scalar('took', took, runner.iter)
        runner.message_hub.update_scalar('train/took', took)


@setup(CLOCKS)
@hook
class TimeInCheckpoints(Hook):
    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['meta']['written_at'] = time.time()
        checkpoint['host'] = dict(seconds=time.process_time())


@setup(CLOCKS)
@hook
class RemainingTime(Hook):
    """A mean of times in attributes, for a line that it prints."""

    mean = 0.

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.begun = time.perf_counter()

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.mean = .9 * self.mean + .1 * (time.perf_counter() - self.begun)
        runner.logger.info(f'{self.mean * (runner.max_iters - runner.iter):.1f} s remain')


# ------------------------------------------------------------------------------- validations


@model
class StrengthOfPredictions(Predicts):
    """A score of the last validation weighs a loss."""

    strength = 0.

    def losses(self, inputs, label):
        losses = super().losses(inputs, label)
        losses['loss_scores'] = self.scores(inputs).pow(2).mean() * self.strength
        return losses


@hook
class SetsTheStrength(Hook):
    def after_val_epoch(self, runner, metrics=None):
        runner.model.strength = metrics['largest']


@setup(HOOKS, variations=VARIED)
def validation_weighs_a_loss(cfg):
    use_all(cfg, StrengthOfPredictions, SetsTheStrength)
