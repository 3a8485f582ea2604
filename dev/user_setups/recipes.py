"""Recipes: what hooks set in each iteration, adversaries, rewritten checkpoints, values, stages."""
from __future__ import annotations

import copy
import random
from contextlib import contextmanager

import numpy as np
import torch
from faults.tiny import Tiny, TinyData
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import LOOPS, OPTIM_WRAPPER_CONSTRUCTORS, TRANSFORMS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts

from .setup import dataset, hook, loop, model, setup, use_all, wrapper
from .steps import Extra

EACH = 'what hooks set in each iteration'
STEPS = 'steps of adversaries and of two passes'
FILES = 'checkpoints that a hook rewrites'
VALUES = 'values in batches'
STAGES = 'data and validations in stages'

# ------------------------------------------------------------------------------ each iteration


@setup(EACH)
@hook
class FreezesInTurn(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.backbone.requires_grad_(runner.iter % 2 == 0)


@setup(EACH)
@hook
class DropoutByProgress(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.head.drop.p = .5 * runner.iter / runner.max_iters


@setup(EACH)
@hook
class SlowerStatistics(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.backbone[1].momentum = .5 / (1 + runner.iter)


@setup(EACH)
@hook
class ClipsLessAndLess(Hook):
    def before_train(self, runner):
        runner.optim_wrapper.clip_grad_kwargs = dict(max_norm=1.)
        runner.optim_wrapper.clip_func = nn.utils.clip_grad_norm_
        runner.optim_wrapper.grad_name = 'grad_norm'

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.optim_wrapper.clip_grad_kwargs['max_norm'] = .01 * (1 + runner.iter)


@setup(EACH)
@hook
class StepsAScheduleOfTorch(Hook):
    """Saves it, and forgets that making it sets the rate."""

    def before_train(self, runner):
        self.schedule = CosineAnnealingWarmRestarts(runner.optim_wrapper.optimizer, 5)
        if hasattr(self, 'loaded'):
            self.schedule.load_state_dict(self.loaded)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.schedule.step()

    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['schedule_of_torch'] = self.schedule.state_dict()

    def after_load_checkpoint(self, runner, checkpoint):
        self.loaded = checkpoint['schedule_of_torch']


# --------------------------------------------------------------------------------------- steps


@model
class Adversaries(Tiny):
    """A generator that steps in every second iteration, and what tells its features from real ones.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = nn.Linear(4, 4)
        self.critic = nn.Sequential(nn.Linear(4, 4), nn.Dropout(.1), nn.Linear(4, 1))

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        real = self.backbone(data['inputs']).mean((2, 3))
        fake = self.generator(torch.randn(len(real), 4))
        scores = self.critic(fake.detach()) - self.critic(real.detach())
        losses = dict(critic=nn.functional.softplus(scores).mean())
        optim_wrapper['critic'].update_params(losses['critic'])
        if MessageHub.get_current_instance().get_info('iter') % 2:
            self.critic.requires_grad_(False)
            scores = self.critic(self.generator(torch.randn(len(real), 4)))
            losses['rest'] = (nn.functional.softplus(-scores).mean()
                              + self.head.loss(self.head(self.neck(real)), data['label']))
            optim_wrapper['rest'].update_params(losses['rest'])
            self.critic.requires_grad_(True)
        return {f'loss_{name}': loss.detach() for name, loss in losses.items()}


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class OneForTheCritic:
    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        pass

    def __call__(self, model):
        rest = [value for name, value in model.named_parameters()
                if not name.startswith('critic')]
        return OptimWrapperDict(
            rest=OptimWrapper(torch.optim.Adam(rest, lr=.01), accumulative_counts=2),
            critic=OptimWrapper(torch.optim.Adam(model.critic.parameters(), lr=.02),
                                clip_grad=dict(max_norm=1.)))


@setup(STEPS)
def adversaries(cfg):
    use_all(cfg, Adversaries)
    cfg.optim_wrapper = dict(constructor='OneForTheCritic')
    cfg.param_scheduler = dict(rest=dict(type='StepLR', step_size=1),
                               critic=dict(type='MultiStepLR', milestones=[2]))


@model
class SharpnessAware(Tiny):
    """Takes the gradients a little uphill."""

    def train_step(self, data, optim_wrapper):
        data = self.data_preprocessor(data, True)
        loss, logged = self.parse_losses(self(**data, mode='loss'))
        loss.backward()
        parameters = [value for value in self.parameters() if value.grad is not None]
        norm = torch.stack([value.grad.norm() for value in parameters]).norm()
        ahead = [.05 * value.grad / norm for value in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, ahead)
        optim_wrapper.zero_grad()
        self.parse_losses(self(**data, mode='loss'))[0].backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ahead)
        optim_wrapper.step()
        optim_wrapper.zero_grad()
        return logged


@setup(STEPS)
def sharpness_aware(cfg):
    use_all(cfg, SharpnessAware)


@setup(STEPS, ranks=2, variations=('again', 'resumed at 3', 'resumed at 8', 'on two processes'))
def sharpness_aware_on_virtual_ranks(cfg):
    use_all(cfg, SharpnessAware)


@setup(STEPS)
@model
class GradientsOfEachSample(Extra):
    """By a vectorized map, with a dropout of its own for each."""

    def extra(self, inputs, label, loss):
        def one(weights, x):
            x = nn.functional.dropout(x, .5)
            return torch.func.functional_call(self.head.fc, weights, (x, )).pow(2).sum()
        gradients = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0), randomness='different')
        features = self.backbone(inputs).mean((2, 3))
        return gradients(dict(self.head.fc.named_parameters()), features)['weight'].norm()


@wrapper
class HalfPrecision(OptimWrapper):
    @contextmanager
    def optim_context(self, model):
        with super().optim_context(model), torch.autocast('cpu', torch.bfloat16):
            yield


@setup(STEPS)
def half_precision_accumulated_and_averaged(cfg):
    use_all(cfg, HalfPrecision)
    cfg.optim_wrapper.update(accumulative_counts=3, clip_grad=dict(max_norm=.5))
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=.1, update_buffers=True))


@loop
class AccumulatesByHand(IterBasedTrainLoop):
    def run_iter(self, data_batch):
        runner, model = self.runner, self.runner.model
        runner.call_hook('before_train_iter', batch_idx=self._iter, data_batch=data_batch)
        data = model.data_preprocessor(data_batch, True)
        loss, logged = model.parse_losses(model(**data, mode='loss'))
        (loss / 4).backward()
        if (self._iter + 1) % 4 == 0:
            runner.optim_wrapper.optimizer.step()
            runner.optim_wrapper.optimizer.zero_grad()
        runner.call_hook('after_train_iter', batch_idx=self._iter, data_batch=data_batch,
                         outputs=logged)
        self._iter += 1


@setup(STEPS)
def accumulates_by_hand(cfg):
    use_all(cfg, AccumulatesByHand)
    cfg.train_cfg = dict(type='AccumulatesByHand', max_iters=24, val_interval=8)
    cfg.train_dataloader = dict(cfg.train_dataloader, sampler=dict(type='InfiniteSampler'))


# --------------------------------------------------------------------------------- checkpoints


@setup(FILES)
@hook
class SavesInHalfPrecision(Hook):
    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['state_dict'] = {
            name: value.half() if value.is_floating_point() else value
            for name, value in checkpoint['state_dict'].items()}


@setup(FILES)
@hook
class SavesUnderOtherNames(Hook):
    def before_save_checkpoint(self, runner, checkpoint):
        checkpoint['state_dict'] = {name.replace('backbone.', 'encoder.'): value
                                    for name, value in checkpoint['state_dict'].items()}

    def after_load_checkpoint(self, runner, checkpoint):
        checkpoint['state_dict'] = {name.replace('encoder.', 'backbone.'): value
                                    for name, value in checkpoint['state_dict'].items()}


@setup(FILES)
@hook
class NewHeadWhenItLoads(Hook):
    """Meant for pretrained weights; a resume loads a checkpoint as well."""

    def after_load_checkpoint(self, runner, checkpoint):
        checkpoint['state_dict']['head.fc.bias'] = torch.zeros(3)


# -------------------------------------------------------------------------------------- values


@setup(VALUES)
@dataset
class SparseSamples(TinyData):
    def prepare_data(self, idx):
        return dict(super().prepare_data(idx), edges=torch.eye(3).to_sparse(),
                    rows=torch.eye(3).to_sparse_csr(), blocks=torch.eye(4).to_sparse_bsr((2, 2)))


@setup(VALUES)
@dataset
class NestedSamples(TinyData):
    def prepare_data(self, idx):
        ragged = [torch.rand(2), torch.rand(3)]
        return dict(super().prepare_data(idx), ragged=torch.nested.nested_tensor(ragged),
                    jagged=torch.nested.nested_tensor(ragged, layout=torch.jagged))


# -------------------------------------------------------------------------------------- stages


@setup(STAGES)
@hook
class LargerBatches(Hook):
    def before_train_epoch(self, runner):
        runner.train_dataloader.batch_sampler.batch_size = 4 if runner.epoch else 2


@setup(STAGES)
@loop
class UnlabelledImagesToo(EpochBasedTrainLoop):
    """Adds batches of a second loader, which goes on from epoch to epoch."""

    def __init__(self, runner, dataloader, max_epochs, **kwargs):
        super().__init__(runner, dataloader, max_epochs, **kwargs)
        settings = copy.deepcopy(runner.cfg.train_dataloader)
        settings.batch_size = 3
        self.others = runner.build_dataloader(settings)
        self.stream = self.endless()

    def endless(self):
        while True:
            yield from self.others

    def run_iter(self, idx, data_batch):
        more = next(self.stream)
        super().run_iter(idx, {name: value + more[name] for name, value in data_batch.items()})


@TRANSFORMS.register_module(force=True)
class MixesTwo(BaseTransform):
    def get_indexes(self, dataset):
        return random.randrange(len(dataset))

    def transform(self, results):
        other, = results['mix_results']
        return dict(results, img=np.float32(.5) * (results['img'] + other['img']))


@hook
class EndsTheMixing(Hook):
    def before_train_epoch(self, runner):
        if runner.epoch >= 2:
            runner.train_dataloader.dataset.update_skip_type_keys(['MixesTwo'])


@setup(STAGES)
def mixing_that_ends(cfg):
    use_all(cfg, EndsTheMixing)
    single = dict(cfg.train_dataloader.dataset, pipeline=[dict(type='TinyLoad')])
    cfg.train_dataloader = dict(
        cfg.train_dataloader, num_workers=2, persistent_workers=True, dataset=dict(
            type='mmdet.MultiImageMixDataset', dataset=single, pipeline=[
                dict(type=name) for name in ('MixesTwo', 'TinyFlip', 'TinyPack')]))


@setup(STAGES)
@hook
class FreezesByTheScore(Hook):
    def after_val_epoch(self, runner, metrics=None):
        if metrics['largest'] > 0:
            runner.model.backbone.requires_grad_(False)


@LOOPS.register_module(force=True)
class PredictsTwice(ValLoop):
    """With all weights, then with smaller ones."""

    def run(self):
        super().run()
        before = copy.deepcopy(self.runner.model.state_dict())
        with torch.no_grad():
            for weight in self.runner.model.parameters():
                weight.mul_(.9)
        metrics = super().run()
        self.runner.model.load_state_dict(before)
        return metrics


@setup(STAGES)
def validates_twice(cfg):
    cfg.val_cfg = dict(type='PredictsTwice')


@setup(STAGES, variations=('again', 'resumed at 8', 'not validated'))
@model
class ObservesPredictions(Tiny):
    """Quantization-aware training, whose observer also sees what is predicted."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('largest', torch.ones(()))

    def forward(self, inputs, label, mode='tensor'):
        with torch.no_grad():
            self.largest.lerp_(inputs.abs().max(), .01)
        step = self.largest / 127
        rounded = inputs + ((inputs / step).round() * step - inputs).detach()
        return super().forward(rounded, label, mode)


@setup(STAGES)
@hook
class MeasuresStatisticsAnew(Hook):
    """Passes over the training data once more at the end of each epoch."""

    def after_train_epoch(self, runner):
        norm = runner.model.backbone[1]
        norm.reset_running_stats()
        norm.momentum, before = None, norm.momentum
        with torch.no_grad():
            for batch in runner.build_dataloader(runner.cfg.train_dataloader):
                runner.model.backbone(runner.model.data_preprocessor(batch, True)['inputs'])
        norm.momentum = before
