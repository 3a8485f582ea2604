"""Runners, models, and what is called in which order."""
from __future__ import annotations

import json
import os
import shutil

import torch
from faults.tiny import TinyData, validating
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS, MODELS, RUNNERS
from mmengine.runner import Runner
from torch import nn

from .setup import REFUSED, SAME, SAVED, WARNED, hook, setup

# --- models that were there before the seed, or are not initialised -----------------------------

def _built_before(cfg):
    settings = dict(cfg._cfg_dict)
    settings['model'] = MODELS.build(cfg.model)
    return Runner(**settings)


@setup(WARNED, 'model', variations=(), build=_built_before)
def a_model_that_was_built_before_the_seed(cfg):
    pass


@setup(REFUSED, 'head.extra', variations=())
def a_parameter_that_is_uninitialised_memory(cfg):
    from faults import tiny
    from faults.fault import replaced

    @replaced(tiny.Head, '__init__', since=0)
    def with_extra(original, self):
        original(self)
        self.extra = nn.Parameter(torch.empty(1000))

    @replaced(tiny.Head, 'forward', since=0)
    def using_it(original, self, x):
        return original(self, x) + self.extra.sum() * 0


# --- settings -----------------------------------------------------------------------------------

@setup(SAME)
def cudnn_benchmark_in_env_cfg(cfg):
    cfg.env_cfg = dict(cudnn_benchmark=True)


@setup(REFUSED, 'compile.dynamic', variations=())
def compiled_for_all_sizes_at_once(cfg):
    cfg['compile'] = dict(dynamic=True)


class NoInit(Runner):
    """Does not pass its arguments on by ``super().__init__``."""

    def __init__(self, *args, **kwargs):
        Runner.__init__(self, *args, **kwargs)


@setup(SAME)
def a_runner_of_ones_own(cfg):
    RUNNERS.register_module(module=NoInit, force=True)
    cfg.runner_type = 'NoInit'


# --- orders of calls ----------------------------------------------------------------------------

def _validate_first(runner):
    runner.val()
    runner.train()


@setup(SAME, drive=_validate_first)
def validation_before_training(cfg):
    validating(cfg)


class Interrupt(Hook):
    """Ctrl-C once, in the middle of the second epoch."""
    done = False

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 5 and not self.done:
            self.done = True
            raise KeyboardInterrupt


def _train_again(runner):
    try:
        runner.train()
    except KeyboardInterrupt:
        runner.train()


@setup(REFUSED, 'train()', variations=(), drive=_train_again)
def training_again_after_an_interrupt(cfg):
    hook(Interrupt)(cfg)


class SavesEarly(Hook):
    def before_run(self, runner):
        runner.save_checkpoint(runner.work_dir, 'early.pth')


@setup(SAME)
def saving_before_the_optimizer_is_built(cfg):
    hook(SavesEarly)(cfg)


@setup(SAME)
def published_keys(cfg):
    cfg.default_hooks.checkpoint.published_keys = ['meta', 'state_dict']


class CountsTrainingSets(TinyData):
    built = 0

    def __init__(self, *args, **kwargs):
        type(self).built += 1
        super().__init__(*args, **kwargs)


def _only_validate(runner):
    runner.val()
    assert CountsTrainingSets.built == 0, 'validation has built the training dataset'
    runner.train()


@setup(SAME, variations=('workers', ), drive=_only_validate)
def validation_alone_loads_no_training_data(cfg):
    DATASETS.register_module(module=CountsTrainingSets, force=True)
    validating(cfg)
    cfg.val_dataloader.dataset = dict(cfg.train_dataloader.dataset)
    cfg.train_dataloader.dataset.type = 'CountsTrainingSets'


# --- resumes ------------------------------------------------------------------------------------

def _differently(change):
    """Build the resumed run from a config that differs."""
    def build(cfg):
        if cfg.get('resume'):
            change(cfg)
        return Runner.from_cfg(cfg)
    return build


@setup(SAME, variations=('resume', ), build=_differently(
    lambda cfg: cfg.custom_hooks.append(dict(type='PreemptHook'))))
def a_pre_emption_hook_is_added(cfg):
    pass


def _more_hooks(cfg):
    cfg.custom_hooks.append(dict(type='EmptyCacheHook'))
    cfg.custom_hooks.append(dict(type='OperatorGuardHook'))


@setup(SAME, variations=('resume', ), build=_differently(_more_hooks))
def a_cache_hook_and_an_operator_guard_are_added(cfg):
    pass


def _longer(cfg):
    cfg.train_cfg.max_epochs = 2


@setup(SAME, variations=('resume', ), build=_differently(_longer))
def longer_training_with_a_constant_learning_rate(cfg):
    cfg.param_scheduler, cfg.custom_hooks = None, []
    cfg.train_cfg.max_epochs = 2 if cfg.get('resume') else 1


@DATASETS.register_module(force=True)
class FromAFile(TinyData):
    """Labels from an annotation file."""

    def load_data_list(self):
        with open(self.ann_file) as file:
            return [dict(entry, label=label) for entry, label in zip(
                super().load_data_list(), json.load(file))]


def _annotated(cfg, labels, folder='data'):
    folder = os.path.join(cfg.work_dir, folder)
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, 'labels.json')
    with open(path, 'w') as file:
        json.dump(labels, file)
    cfg.train_dataloader.dataset.update(type='FromAFile', ann_file=path)


LABELS = [0, 1, 2, 0, 1, 2, 0, 1]


@setup(REFUSED, 'train_annotations', variations=('resume', ),
       build=_differently(lambda cfg: _annotated(cfg, LABELS[::-1])))
def other_annotations_of_the_same_length(cfg):
    _annotated(cfg, LABELS)


@setup(SAME, variations=('resume', ),
       build=_differently(lambda cfg: _annotated(cfg, LABELS, 'moved')))
def the_same_annotations_in_another_folder(cfg):
    _annotated(cfg, LABELS)


def _copied(cfg):
    """Resume, by itself, in a copy of the work directory; the first one has gone on since."""
    if cfg.get('resume'):
        original, cfg.work_dir = cfg.work_dir, cfg.work_dir + '-copy'
        shutil.copytree(original, cfg.work_dir, dirs_exist_ok=True)
        shutil.copy(os.path.join(original, 'iter_6.pth'), os.path.join(original, 'iter_3.pth'))
        with open(os.path.join(cfg.work_dir, 'last_checkpoint'), 'w') as file:
            file.write(os.path.join(original, 'iter_3.pth'))
        cfg.load_from = None
    return Runner.from_cfg(cfg)


@setup(SAME, variations=('resume', ), build=_copied)
def a_copied_work_directory(cfg):
    pass


@HOOKS.register_module(force=True)
class ChangesTheRate(Hook):
    """Changes the learning rate by itself."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.optim_wrapper.param_groups[0]['lr'] = .1 / (1 + runner.iter)


@setup(SAME)
def a_hook_that_sets_the_learning_rate(cfg):
    hook(ChangesTheRate)(cfg)
    cfg.param_scheduler = None


assert SAVED < 4, 'resumes begin inside the first epoch'
