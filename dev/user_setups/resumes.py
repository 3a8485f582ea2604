"""Runs that resume with other code or another config than the run that they continue."""
from __future__ import annotations

import json
import os
import shutil
from typing import Any, Callable

import torch
from faults.tiny import Head, Tiny, TinyData, TinyJitter
from mmengine.hooks import Hook
from torch import nn

from .setup import REGISTRIES, hook, setup, use_all

KIND = 'a resume that does not fit'
HARMLESS = 'a resume with harmless changes'


def resumed(kind: str, change: Callable[[Any], None] = lambda cfg: None) -> Callable:
    """Register a function that changes the config of the resumed run only.

    Args:
        kind: of the set-up.
        change: changes the config of both runs.
    """
    def register(later: Callable[[Any], None]) -> Callable[[Any], None]:
        def first(cfg: Any) -> None:
            change(cfg)
        first.__name__ = later.__name__
        setup(kind, variations=('resumed at 12', ), later=later)(first)
        return later
    return register


def edited(name: str, registry: str, first: type, then: type,
           use: Callable[[Any], None]) -> None:
    """Register a set-up whose user has edited a class, which keeps its name, between the runs."""
    def build(cls: type) -> Callable[[Any], None]:
        def register(cfg: Any) -> None:
            # no other process can import it
            cfg.randomness.self_checks.witness = False
            edition = type('Edited', (cls, ), dict(__module__=__name__))
            REGISTRIES[registry].register_module(module=edition, force=True)
            use(cfg)
        register.__name__ = name
        return register

    resumed(KIND, build(first))(build(then))


# ------------------------------------------------------------------------- code that was edited


def use_model(cfg):
    cfg.model.type = 'Edited'


class Wider(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
        self.head.fc = nn.Linear(6, 3)


edited('wider_layers', 'model', Tiny, Wider, use_model)


class Deeper(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone.append(nn.Conv2d(4, 4, 3))


edited('one_layer_more', 'model', Tiny, Deeper, use_model)
edited('one_layer_fewer', 'model', Deeper, Tiny, use_model)


class Renamed(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.roi_head = self.head
        del self.head

    def forward(self, inputs, label, mode='tensor'):
        logits = self.roi_head(self.neck(self.backbone(inputs)).mean((2, 3)))
        return dict(loss=self.roi_head.loss(logits, label)) if mode == 'loss' else logits


edited('renamed_module', 'model', Tiny, Renamed, use_model)


class Leaky(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone[2] = nn.LeakyReLU(.1)


edited('other_activation', 'model', Tiny, Leaky, use_model)


class Smoothed(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.loss = nn.CrossEntropyLoss(label_smoothing=.1)


edited('other_loss', 'model', Tiny, Smoothed, use_model)


class Scaled(Tiny):
    """Nothing but the code of its forward pass is another one."""

    def forward(self, inputs, label, mode='tensor'):
        return super().forward(inputs * 1.1, label, mode)


edited('other_forward_pass', 'model', Tiny, Scaled, use_model)


class MoreDropout(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.drop.p = .4


edited('other_dropout', 'model', Tiny, MoreDropout, use_model)


class Sharper(Tiny):
    """A number in an attribute of a class of the user."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.scale = 2.


edited('other_attribute', 'model', Tiny, Sharper, use_model)


class Frozen(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.backbone[0].requires_grad_(False)


edited('frozen_stage', 'model', Tiny, Frozen, use_model)
edited('thawed_stage', 'model', Frozen, Tiny, use_model)


class MoreClasses(Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head = Head()
        self.head.fc = nn.Linear(4, 5)
        self.head.register_buffer('temperature', torch.ones(5))


edited('more_classes', 'model', Tiny, MoreClasses, use_model)


class Unsaved(Tiny):
    """The same parameters; a buffer is no longer saved."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.register_buffer('temperature', torch.full((3, ), 1.5), persistent=False)


edited('buffer_no_longer_saved', 'model', Tiny, Unsaved, use_model)


def use_data(cfg):
    cfg.train_dataloader.dataset.type = 'Edited'


class OtherLabels(TinyData):
    """As many entries, with labels of their own."""

    def load_data_list(self):
        return [dict(number=i, label=(i + 1) % 3) for i in range(self.size)]


edited('other_labels', 'data', TinyData, OtherLabels, use_data)


class Backwards(TinyData):
    """The same entries in another order, as a folder lists its files."""

    def load_data_list(self):
        return super().load_data_list()[::-1]


edited('other_order_of_entries', 'data', TinyData, Backwards, use_data)


class Named(TinyData):
    """Entries with the path of an image, as those of detection data."""

    def load_data_list(self):
        return [dict(entry, img_path=f'/data/train/{entry["number"]}.jpg')
                for entry in super().load_data_list()]


class NamedBackwards(Named):
    def load_data_list(self):
        return super().load_data_list()[::-1]


edited('other_order_of_images', 'data', Named, NamedBackwards, use_data)


class Fewer(TinyData):
    """Leaves out an image that could not be read."""

    def load_data_list(self):
        return super().load_data_list()[:-1]


edited('one_sample_fewer', 'data', TinyData, Fewer, use_data)


def use_transform(cfg):
    cfg.train_dataloader.dataset.pipeline.insert(2, dict(type='Edited'))


class StrongerJitter(TinyJitter):
    def transform(self, results):
        return super().transform(super().transform(results))


edited('other_code_of_a_transform', 'transform', TinyJitter, StrongerJitter, use_transform)


class Annotated(TinyData):
    """Reads its labels from a file."""

    def load_data_list(self):
        with open(self.ann_file) as file:
            return [dict(number=i, label=label) for i, label in enumerate(json.load(file))]


def annotate(cfg, labels):
    REGISTRIES['data'].register_module(module=Annotated, force=True)
    path = os.path.join(os.path.dirname(cfg.first), 'labels.json')
    with open(path, 'w') as file:
        json.dump(labels, file)
    for loader in (cfg.train_dataloader, cfg.val_dataloader):
        loader.dataset.update(type='Annotated', ann_file=path)


@resumed(KIND, lambda cfg: annotate(cfg, [i % 3 for i in range(16)]))
def corrected_annotations(cfg):
    """A label of the annotation file was corrected."""
    annotate(cfg, [i % 3 for i in range(15)] + [1])


# ----------------------------------------------------------------------------- another config


@resumed(KIND)
def other_optimizer(cfg):
    cfg.optim_wrapper.optimizer = dict(type='Adam', lr=.01)


@resumed(KIND)
def more_groups_of_parameters(cfg):
    cfg.optim_wrapper.paramwise_cfg = dict(norm_decay_mult=0.)


@resumed(KIND)
def other_learning_rate(cfg):
    cfg.optim_wrapper.optimizer.lr = .05


@resumed(KIND)
def clips_gradients(cfg):
    cfg.optim_wrapper.clip_grad = dict(max_norm=.1)


@resumed(KIND)
def other_schedule(cfg):
    cfg.param_scheduler = dict(type='ExponentialLR', gamma=.8, by_epoch=False)


@resumed(KIND)
def one_schedule_more(cfg):
    cfg.param_scheduler = [cfg.param_scheduler,
                           dict(type='LinearLR', start_factor=.5, end=20, by_epoch=False)]


@resumed(KIND)
def other_step_of_the_schedule(cfg):
    cfg.param_scheduler.step_size = 3


def cosine(cfg):
    cfg.param_scheduler = dict(type='CosineAnnealingLR', by_epoch=True, convert_to_iter_based=True)


@resumed(KIND, cosine)
def cosine_over_more_epochs(cfg):
    """The schedule ends where the training ends."""
    cfg.train_cfg.max_epochs = 5


@resumed(KIND)
def larger_dataset(cfg):
    cfg.train_dataloader.dataset.size = 20


@resumed(KIND)
def other_batch_size(cfg):
    cfg.train_dataloader.batch_size = 4


@resumed(KIND)
def other_seed(cfg):
    cfg.randomness.seed = 4


@resumed(KIND)
def accumulates_gradients(cfg):
    cfg.optim_wrapper.accumulative_counts = 2


def averages(cfg):
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=.1))


@resumed(KIND)
def averages_added(cfg):
    averages(cfg)


@resumed(KIND, averages)
def averages_removed(cfg):
    cfg.custom_hooks.pop()


@resumed(KIND)
def loop_of_iterations(cfg):
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=24, val_interval=8)


@resumed(KIND)
def other_class_names(cfg):
    """The dataset keeps other classes of the same annotations."""
    cfg.train_dataloader.dataset.metainfo = dict(classes=('car', 'bus'))


@resumed(KIND)
def weights_without_an_optimizer(cfg):
    """Resumes from a published checkpoint."""
    content = torch.load(cfg.load_from, weights_only=False)
    path = os.path.join(cfg.first, 'published.pth')
    torch.save({name: content[name] for name in ('meta', 'state_dict', 'message_hub')}, path)
    cfg.load_from = path


# ------------------------------------------------------------------------------ harmless changes


@resumed(HARMLESS)
def other_interval_of_the_log(cfg):
    cfg.default_hooks.logger = dict(type='LoggerHook', interval=1)
    cfg.log_processor = dict(window_size=3)


@hook
class LogsTheNorm(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        norm = sum(float(weight.detach().norm()) for weight in runner.model.parameters())
        runner.message_hub.update_scalar('train/norm', norm)


@resumed(HARMLESS)
def another_logging_hook(cfg):
    use_all(cfg, LogsTheNorm)


@resumed(HARMLESS)
def checkpoints_at_other_intervals(cfg):
    cfg.default_hooks.checkpoint.update(interval=2, max_keep_ckpts=3)


@resumed(HARMLESS)
def keeps_the_best_checkpoint(cfg):
    cfg.default_hooks.checkpoint.update(save_best='largest', rule='greater')


def constant(cfg):
    cfg.custom_hooks = []  # one of the user may count from the end of the training
    cfg.param_scheduler = dict(type='ConstantLR', factor=.5, end=3, by_epoch=False)
    cfg.train_cfg.max_epochs = 5


@resumed(HARMLESS, constant)
def constant_rate_for_fewer_epochs(cfg):
    cfg.train_cfg.max_epochs = 4


@resumed(HARMLESS)
def renamed_experiment(cfg):
    cfg.experiment_name = 'second'


@resumed(HARMLESS)
def validates_less_often(cfg):
    cfg.train_cfg.val_interval = 2


@resumed(HARMLESS)
def notes_in_the_config(cfg):
    """Keys that nothing reads."""
    cfg.description = 'second try'
    cfg.tags = ['baseline', 'resumed']


@resumed(HARMLESS)
def workers_that_stay(cfg):
    cfg.train_dataloader.update(num_workers=2, persistent_workers=True, prefetch_factor=4)


@resumed(HARMLESS)
def moved_work_directory(cfg):
    moved = f'{cfg.first}-moved'
    shutil.copytree(cfg.first, moved)
    cfg.load_from = os.path.join(moved, os.path.basename(cfg.load_from))


def branch_off(cfg, *more):
    """Copy the work directory of the first run, and delete checkpoints of the copy."""
    shutil.rmtree(cfg.work_dir, ignore_errors=True)
    shutil.copytree(cfg.first, cfg.work_dir)
    for name in (*(f'iter_{iteration}.pth' for iteration in range(13, 25)), *more):
        os.remove(os.path.join(cfg.work_dir, name))
    cfg.load_from = None


@resumed(HARMLESS)
def copy_without_the_last_checkpoints(cfg):
    """Branches off at iteration 12; a hidden file holds the last checkpoint still."""
    branch_off(cfg)


@resumed(HARMLESS)
def copy_without_the_last_checkpoints_and_the_hidden_one(cfg):
    branch_off(cfg, '.last_good.pth')
