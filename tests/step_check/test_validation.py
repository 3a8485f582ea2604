"""A validation that changes the training is found, and what it has changed is named."""
from __future__ import annotations

import pytest
import torch
from faults import tiny
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner

from mmrepro import determinism
from mmrepro.errors import ValidationChangesError

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(autouse=True)
def clean():
    yield
    torch.set_default_dtype(torch.float32)
    determinism.disable()


class Predicting(tiny.Tiny):
    def forward(self, inputs, label, mode='tensor'):
        if mode == 'predict':
            self.predicted()
        return super().forward(inputs, label, mode)


@MODELS.register_module(force=True)
class Adapts(Predicting):
    """Adapts its BatchNorm to what it predicts."""

    def predicted(self):
        self.backbone[1].train()


@MODELS.register_module(force=True)
class Writes(Predicting):
    @torch.no_grad()
    def predicted(self):
        self.head.fc.bias += 0.1


@MODELS.register_module(force=True)
class Counts(Predicting):
    """The training reads what predictions count."""

    def predicted(self):
        self.head.scale += 0.1


@MODELS.register_module(force=True)
class Renames(Predicting):
    """Gives a part a second name."""

    def predicted(self):
        self.head.features = self.backbone


@HOOKS.register_module(force=True)
class LeavesDtype(Hook):
    def after_val_epoch(self, runner, metrics=None):
        torch.set_default_dtype(torch.float64)


def runner_of(work_dir, model='Tiny', hook=None, deterministic=True):
    cfg = tiny.tiny(work_dir)
    tiny.validating(cfg)
    cfg.model.type, cfg.train_cfg.val_interval = model, 1
    cfg.randomness.deterministic, cfg.log_level = deterministic, 'WARNING'
    cfg.custom_hooks = [dict(type='EMAHook'), *([dict(type=hook)] if hook else [])]
    runner = Runner.from_cfg(cfg)
    runner.said = []
    runner.logger.warning = runner.said.append
    return runner


@pytest.mark.parametrize('changes, name', [
    # EMAHook has put its averages into the model, and their BatchNorm adapts
    (dict(model='Writes'), 'head.fc.bias'),
    (dict(hook='LeavesDtype'), 'the default dtype (torch.float32 -> torch.float64)'),
])
def test_changed_weights_and_settings_end_the_run(changes, name, tmp_path):
    runner = runner_of(tmp_path, **changes)
    with pytest.raises(ValidationChangesError, match='the validation at iteration 4') as caught:
        runner.train()
    assert name in str(caught.value)


def test_changed_buffers_are_named(tmp_path):
    runner = runner_of(tmp_path, 'Adapts')
    runner._hooks = [hook for hook in runner.hooks if type(hook).__name__ != 'EMAHook']
    with pytest.raises(ValidationChangesError, match='backbone.1.running_mean'):
        runner.train()


def test_changed_attributes_are_a_warning_once(tmp_path):
    runner = runner_of(tmp_path, 'Counts')
    runner.train()
    assert len([line for line in runner.said if 'has changed head.scale' in line]) == 1


def test_a_run_that_only_warns_goes_on(tmp_path):
    runner = runner_of(tmp_path, 'Writes', deterministic='warn')
    runner.train()
    assert any('head.fc.bias' in line for line in runner.said)


@pytest.mark.parametrize('model', ['Tiny', 'Renames'])
def test_an_ordinary_validation_changes_nothing(tmp_path, model):
    runner = runner_of(tmp_path, model)
    runner.train()
    assert not [line for line in runner.said if 'the validation' in line]
