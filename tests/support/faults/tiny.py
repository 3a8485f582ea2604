"""A training run of a second: small images, a pipeline of transforms, a network with all parts."""
import random

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.dataset import BaseDataset
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, TRANSFORMS
from torch import nn
from unformatted import Unformatted

ITERATIONS = 4  # an epoch of tiny()


@DATASETS.register_module(force=True)
class TinyData(BaseDataset):
    """Noise images of 8 x 8, three classes."""

    def __init__(self, size=8, **kwargs):
        self.size = size
        super().__init__(**kwargs)

    def load_data_list(self):
        return [dict(number=i, label=i % 3) for i in range(self.size)]


@TRANSFORMS.register_module(force=True)
class TinyLoad(BaseTransform):
    def transform(self, results):
        grid = np.arange(192, dtype=np.float32).reshape(3, 8, 8)
        results['img'] = np.sin(grid * (1 + results['number']))
        return results


@TRANSFORMS.register_module(force=True)
class TinyFlip(BaseTransform):
    def transform(self, results):
        if random.random() < 0.5:
            results['img'] = results['img'][..., ::-1]
        return results


@TRANSFORMS.register_module(force=True)
class TinyJitter(BaseTransform):
    def transform(self, results):
        results['img'] = results['img'] + np.random.uniform(-0.1, 0.1, 1).astype(np.float32)
        return results


@TRANSFORMS.register_module(force=True)
class TinyPack(BaseTransform):
    def transform(self, results):
        return dict(inputs=torch.from_numpy(np.ascontiguousarray(results['img'])),
                    label=torch.tensor(results['label']))


@MODELS.register_module(force=True)
class TinyPreprocessor(BaseDataPreprocessor):
    def forward(self, data, training=False):
        data = super().forward(data, training)
        return dict(inputs=torch.stack(data['inputs']) * 0.5, label=torch.stack(data['label']))


class Doubled(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Double(nn.Module):
    def forward(self, x):
        return Doubled.apply(x)


class TinyLoss(nn.Module):
    def forward(self, logits, label):
        return nn.functional.cross_entropy(logits, label)


class Head(nn.Module):
    """Scores of three classes; ``scale`` is a number that no state_dict holds."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(4, 3)
        self.loss = TinyLoss()
        self.scale = 1.0
        self.register_buffer('temperature', torch.ones(3))

    def forward(self, x):
        return self.fc(self.drop(x)) * self.scale * self.temperature


@MODELS.register_module(force=True)
class Tiny(BaseModel):
    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.neck = Double()
        self.head = Head()

    def forward(self, inputs, label, mode='tensor'):
        features = self.neck(self.backbone(inputs)).mean((2, 3))
        logits = self.head(features)
        return dict(loss=self.head.loss(logits, label)) if mode == 'loss' else logits


@HOOKS.register_module(force=True)
class QuietHook(Hook):
    """Does nothing; faults are planted in it."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        pass

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        pass


@METRICS.register_module(force=True)
class TinyMetric(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [float(scores.max()) for scores in data_samples]

    def compute_metrics(self, results):
        return dict(largest=max(results))


def validating(cfg):
    """Let a run of :func:`tiny` validate, when it is asked to."""
    cfg.train_cfg.val_interval = 100
    cfg.val_cfg = dict()
    cfg.val_dataloader = dict(cfg.train_dataloader, sampler=dict(
        type='DefaultSampler', shuffle=False))
    cfg.val_evaluator = dict(type='TinyMetric')


def validating_and_saving(work_dir):
    """The config of a run that validates after every epoch and saves after every iteration."""
    cfg = tiny(work_dir)
    validating(cfg)
    cfg.train_cfg.val_interval = 1
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    return cfg


def tiny(work_dir, **changes):
    return Unformatted(dict(
        model=dict(type='Tiny', data_preprocessor=dict(type='TinyPreprocessor')),
        work_dir=str(work_dir), experiment_name='tiny',
        train_dataloader=dict(
            batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=True),
            # packing the entries collects garbage, which is most of the time of a child
            dataset=dict(type='TinyData', serialize_data=False, pipeline=[
                dict(type=name) for name in ('TinyLoad', 'TinyFlip', 'TinyJitter', 'TinyPack')])),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
        param_scheduler=dict(type='StepLR', step_size=2, gamma=0.5, by_epoch=False),
        default_hooks=dict(checkpoint=None), custom_hooks=[dict(type='QuietHook')],
        randomness=dict(seed=3, deterministic=True), log_level='ERROR', **changes))
