"""A validation that changes the training is found, and what it has changed is named."""
import collections
import copy

import pytest
import torch
from faults import tiny
from mmengine.hooks import Hook
from mmengine.registry import MODELS
from mmengine.runner import Runner
from small_runs import warnings_of

from mmrepro.errors import ValidationChangesError
from mmrepro.objects.digests import state_digest

pytestmark = [pytest.mark.filterwarnings('ignore'),
              pytest.mark.usefixtures('no_pause_between_passes')]


# what a model does when it predicts
PREDICTING = {
    'nothing': lambda model: None,
    'writes': lambda model: model.head.fc.bias.data.add_(0.1),
    # the training reads what predictions count
    'counts': lambda model: setattr(model.head, 'scale', model.head.scale + 0.1),
    'renames': lambda model: setattr(model.head, 'features', model.backbone),
    'makes equal ones': lambda model: vars(model.head).update(
        kinds=frozenset([1, 2]), last=collections.deque([0.5], 3)),
    'in double precision': lambda model: torch.set_default_dtype(torch.float64),
    'with more threads': lambda model: torch.set_num_threads(2)}


@MODELS.register_module(force=True)
class Predicting(tiny.Tiny):
    def __init__(self, does, **kwargs):
        super().__init__(**kwargs)
        self.does = does
        PREDICTING['makes equal ones'](self)

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            PREDICTING[self.does](self)
        found = super().forward(inputs, label, mode)
        if mode == 'loss' and self.does.startswith(('with', 'in')):
            numbers = torch.arange(300_000.).sin()  # more than torch gives to one thread
            found['loss_numbers'] = (numbers * self.head.fc.bias.sum()).sum().abs() * 1e-3
        return found


def runner_of(work_dir, does, deterministic=True, **changes):
    cfg = tiny.tiny(work_dir)
    tiny.validating(cfg)
    cfg.model.update(type='Predicting', does=does)
    cfg.train_cfg.val_interval = 1
    cfg.randomness.deterministic, cfg.log_level = deterministic, 'WARNING'
    cfg.custom_hooks = [dict(type='EMAHook')]
    cfg.merge_from_dict(copy.deepcopy(changes))
    return Runner.from_cfg(cfg)


def test_changed_weights_end_the_run(tmp_path):
    """EMAHook has put its averages into the model, and these change."""
    with pytest.raises(ValidationChangesError, match='the validation at iteration 4.*head.fc.bias'):
        runner_of(tmp_path, 'writes').train()


@pytest.mark.parametrize('does, said', [
    ('in double precision', 'the default dtype (torch.float32 -> torch.float64)'),
    ('with more threads', 'the number of threads (1 -> 2)')])
def test_settings_of_the_process_are_those_of_a_run_without_the_validation(does, said, tmp_path):
    runner = runner_of(tmp_path / 'with', does)
    warned = warnings_of(runner)
    assert len([line for line in warned if said in line]) == 2  # validations
    assert (torch.get_default_dtype(), torch.get_num_threads()) == (torch.float32, 1)
    without = runner_of(tmp_path / 'without', does, train_cfg=dict(val_interval=99))
    without.train()
    assert state_digest(runner.model.state_dict()) == state_digest(without.model.state_dict())


@pytest.mark.parametrize('does, mode, said, times', [
    ('counts', True, 'has changed head.scale', 1), ('writes', 'warn', 'head.fc.bias', 2),
    ('nothing', True, 'the validation', 0), ('renames', True, 'the validation', 0),
    ('makes equal ones', True, 'the validation', 0)])
def test_what_a_validation_has_changed_is_a_warning(tmp_path, does, mode, said, times):
    """Attributes once, weights at both validations where asked for; an ordinary one, nothing."""
    warned = warnings_of(runner_of(tmp_path, does, mode))
    assert len([line for line in warned if said in line]) == times


@MODELS.register_module(force=True)
class Merging(tiny.Tiny):
    """Merges weights in ``eval()``, as re-parametrized models do; ``train()`` puts them back."""

    def __init__(self, puts_back, **kwargs):
        super().__init__(**kwargs)
        self.puts_back, self.kept = puts_back, None

    def train(self, mode=True):
        weight = self.head.fc.weight
        if mode and self.kept is not None:
            weight.data = self.kept + (0 if self.puts_back else 1e-3)
            self.kept = None
        elif not mode and self.kept is None:
            self.kept, weight.data = weight.data, weight.data * 2
        return super().train(mode)


@pytest.mark.parametrize('loop', [
    dict(max_epochs=2), dict(_delete_=True, by_epoch=False, max_iters=6, val_interval=2)])
@pytest.mark.parametrize('puts_back', [True, False])
def test_weights_are_compared_when_the_training_goes_on(loop, puts_back, tmp_path):
    runner = runner_of(tmp_path, 'nothing', **{
        'model': dict(_delete_=True, type='Merging', puts_back=puts_back,
                      data_preprocessor=dict(type='TinyPreprocessor')),
        'train_cfg': loop, 'custom_hooks': []})
    if puts_back:
        assert not [line for line in warnings_of(runner) if 'the validation' in line]
    else:
        with pytest.raises(ValidationChangesError, match='head.fc.weight'):
            runner.train()


@pytest.mark.parametrize('puts_back', [True, False])
def test_the_last_validation_counts_as_if_the_training_went_on(puts_back, tmp_path):
    runner = runner_of(tmp_path, 'nothing', **{
        'model': dict(_delete_=True, type='Merging', puts_back=puts_back,
                      data_preprocessor=dict(type='TinyPreprocessor')),
        'train_cfg.max_epochs': 1, 'custom_hooks': []})
    runner.lifecycle.validation._raises = False
    said = [line for line in warnings_of(runner) if 'head.fc.weight' in line]
    assert len(said) == (not puts_back)
    assert not runner.model.training


@pytest.mark.parametrize('held', [None, {}])
def test_a_hook_may_make_its_average_later(held, tmp_path):
    runner = runner_of(tmp_path, 'nothing', custom_hooks=[])
    hook = Hook()
    hook.ema_model = held
    runner.register_hook(hook)
    runner.train()
    assert runner.iter == runner.max_iters


class FreezesAgain(tiny.Tiny):
    """As a backbone with ``frozen_stages``, which freezes them in ``eval()`` as well."""

    def train(self, mode=True):
        self.backbone.requires_grad_(False)
        return super().train(mode)


class FreezesInPredictions(tiny.Tiny):

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            self.backbone.requires_grad_(False)
        return super().forward(inputs, label, mode)


class Unfreezes(Hook):
    def __init__(self, at=None):
        self.at = at  # None: in each iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.at in (None, runner.iter):
            runner.model.backbone.requires_grad_(True)


@pytest.mark.parametrize('model, at, ends', [
    (FreezesAgain, None, False), (FreezesAgain, 1, False), (FreezesInPredictions, None, True)])
def test_what_train_freezes_again_is_no_change_of_the_validation(model, at, ends, tmp_path):
    runner = runner_of(tmp_path, 'nothing')
    runner.model.__class__ = model
    runner.register_hook(Unfreezes(at))
    if ends:
        with pytest.raises(ValidationChangesError, match='frozen.backbone'):
            runner.train()
    else:
        runner.train()
        assert runner.epoch == runner.max_epochs


@pytest.mark.parametrize('validation, times', [('warn', 2), (False, 0)])
def test_the_check_can_warn_or_be_off(validation, times, tmp_path):
    warned = warnings_of(runner_of(tmp_path, 'writes', **{
        'randomness.self_checks': dict(validation=validation)}))
    assert len([line for line in warned if 'head.fc.bias' in line]) == times


def test_a_validation_alone_is_followed_by_no_training(tmp_path):
    runner_of(tmp_path, 'writes').val()
