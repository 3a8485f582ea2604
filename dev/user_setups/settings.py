"""Settings of the process, variables of the environment, and objects in configs."""
from __future__ import annotations

import copy
import functools
import logging
import os
import random
import sys
import warnings

import numpy as np
import torch
from faults.tiny import Tiny
from mmcv.transforms import BaseTransform
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

from .setup import REGISTRIES, hook, model, setup, transform

PROCESS = 'settings of the process'
CONFIG = 'objects and spellings in configs'


@setup(PROCESS)
@hook
class DefaultDtype(Hook):
    """Leaves another default dtype behind from the second epoch on."""

    def before_train_epoch(self, runner):
        if runner.epoch == 1:
            torch.set_default_dtype(torch.float64)


@setup(PROCESS)
@hook
class TurnsDeterminismOff(Hook):
    def before_train(self, runner):
        torch.use_deterministic_algorithms(False)


@setup(PROCESS)
@hook
class TurnsBenchmarkOn(Hook):
    def before_train(self, runner):
        torch.backends.cudnn.benchmark = True


@setup(PROCESS)
@hook
class MoreThreads(Hook):
    def before_train_epoch(self, runner):
        torch.set_num_threads(1 + runner.epoch % 2)


@setup(PROCESS)
@hook
class LowPrecision(Hook):
    def before_train(self, runner):
        torch.set_float32_matmul_precision('medium')


@setup(PROCESS)
@hook
class FlushesDenormals(Hook):
    def before_train(self, runner):
        torch.set_flush_denormal(True)


@setup(PROCESS)
@hook
class DetectsAnomalies(Hook):
    def before_train(self, runner):
        torch.autograd.set_detect_anomaly(True)


@setup(PROCESS)
@hook
class ChangesTheFolder(Hook):
    """Paths that are relative follow it."""

    def before_train(self, runner):
        os.chdir('/')


@setup(PROCESS)
@hook
class WritesToTheLog(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        logging.getLogger('user').warning('%s', runner.iter)
        warnings.warn('as always', stacklevel=1)
        print(runner.iter, file=sys.stderr)


@setup(PROCESS)
@hook
class LargerRecursionLimit(Hook):
    def before_run(self, runner):
        sys.setrecursionlimit(5000)


@setup(PROCESS)
@hook
class TracesCalls(Hook):
    """A profiler that users leave on."""

    def before_train(self, runner):
        sys.setprofile(lambda *event: None)

    def after_train(self, runner):
        sys.setprofile(None)


@setup(PROCESS)
@model
class SizeFromTheEnvironment(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.drop.p = float(os.environ.get('DROPOUT', '.2'))


@setup(PROCESS)
@model
class CurrentDeviceAsDefault(Tiny):
    def forward(self, inputs, label, mode='tensor'):
        torch.set_default_device('cpu')
        return super().forward(inputs, label, mode)


@setup(PROCESS)
@transform
class ThreadsOfOpenCV(BaseTransform):
    def transform(self, results):
        import cv2
        cv2.setNumThreads(2)
        results['img'] = np.stack([cv2.GaussianBlur(channel, (3, 3), 0)
                                   for channel in results['img']])
        return results


@setup(PROCESS)
@transform
class ErrorsOfNumPy(BaseTransform):
    def transform(self, results):
        np.seterr(all='ignore')
        results['img'] = results['img'] / np.float32(3)
        return results


# ----------------------------------------------------------------------------------- configs


def darker(items, factor=.5):
    return dict(inputs=[item['inputs'] * factor for item in items],
                label=[item['label'] for item in items])


@setup(CONFIG)
def a_function_as_collate(cfg):
    cfg.train_dataloader.collate_fn = darker


@setup(CONFIG)
def a_partial_as_collate(cfg):
    cfg.train_dataloader.collate_fn = functools.partial(darker, factor=.25)


class Darker:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, items):
        return darker(items, self.factor)


@setup(CONFIG)
def a_callable_object_as_collate(cfg):
    cfg.train_dataloader.collate_fn = Darker(.75)


@setup(CONFIG)
def a_lambda_as_collate(cfg):
    cfg.train_dataloader.collate_fn = lambda items: darker(items, 2.)


@setup(CONFIG)
def a_class_as_type(cfg):
    cfg.model.type = Tiny


@setup(CONFIG)
def a_hook_object(cfg):
    class Darkens(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            data_batch['inputs'] = [x * .5 for x in data_batch['inputs']]
    cfg.custom_hooks.append(Darkens())


@setup(CONFIG)
def numbers_of_numpy(cfg):
    cfg.optim_wrapper.optimizer.lr = np.float32(.1)
    cfg.optim_wrapper.optimizer.momentum = np.float64(.9)


@setup(CONFIG)
def a_path_object(cfg):
    from pathlib import Path
    cfg.work_dir = str(Path(cfg.work_dir))
    cfg.path = Path('/tmp')


@setup(CONFIG)
def a_dataset_object(cfg):
    dataset = REGISTRIES['data'].build(copy.deepcopy(cfg.train_dataloader.dataset))
    cfg.train_dataloader.dataset = dataset


@setup(CONFIG)
def no_hooks_at_all(cfg):
    cfg.custom_hooks = None


@setup(CONFIG)
def a_scheduler_by_epoch(cfg):
    cfg.param_scheduler = dict(type='MultiStepLR', milestones=[1, 2], by_epoch=True)


@setup(CONFIG)
def iterations_instead_of_epochs(cfg):
    cfg.train_cfg = dict(by_epoch=False, max_iters=24, val_interval=8)
    cfg.train_dataloader.sampler = dict(type='InfiniteSampler', shuffle=True)


@setup(CONFIG)
def initialized_by_a_function(cfg):
    class Initialized(Tiny):
        def init_weights(self):
            nn.init.normal_(self.head.fc.weight, std=.1 + random.random())
    MODELS.register_module(module=Initialized, force=True)
    cfg.model.type = 'Initialized'


class Quiet(Runner):
    """A runner of a user's own that draws before it trains."""

    def train(self):
        random.random(), np.random.rand(), torch.rand(3)
        return super().train()


@setup(CONFIG)
def a_runner_that_draws(cfg):
    REGISTRIES['runner'].register_module(module=Quiet, force=True)
    cfg.runner_type = 'Quiet'


@setup(CONFIG)
def no_default_scope(cfg):
    cfg.default_scope = None
