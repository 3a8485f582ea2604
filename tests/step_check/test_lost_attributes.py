"""Attributes that a resume loses are found as soon as they change a step."""
from __future__ import annotations

import pytest
from faults import tiny
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from virtual_runs import run as on_virtual_ranks

from mmrepro import determinism
from mmrepro.checkpoint import adapters
from mmrepro.errors import StepDiffersError

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(autouse=True)
def clean():
    yield
    determinism.disable()


class Keeping(tiny.Tiny):
    """Keeps something from step to step."""
    steps = 0

    def forward(self, inputs, label, mode='tensor'):
        result = super().forward(inputs, label, mode)
        if mode == 'loss':
            result['kept'] = self.kept(result['loss'], inputs)
            self.steps += 1
        return result


@MODELS.register_module(force=True)
class Threshold(Keeping):
    """An auxiliary loss after a warm-up."""

    def kept(self, loss, inputs):
        return loss * 0.1 if self.steps > 4 else loss * 0


@MODELS.register_module(force=True)
class Smallest(Keeping):
    smallest = 1e9

    def kept(self, loss, inputs):
        self.smallest = min(self.smallest, float(loss.detach()))
        return loss * self.smallest


@MODELS.register_module(force=True)
class FirstBatch(Keeping):
    """Initialized from data."""
    centre = None

    def kept(self, loss, inputs):
        if self.centre is None:
            self.centre = inputs.mean()
        return loss * self.centre


@MODELS.register_module(force=True)
class EveryThird(Keeping):
    """A reference that is renewed now and then."""

    def kept(self, loss, inputs):
        weight = self.head.fc.weight
        if self.steps % 3 == 0:
            self.reference = weight.detach().clone()
        return (weight - self.reference).square().sum()


@MODELS.register_module(force=True)
class Cache(Keeping):
    """What it keeps follows from its inputs: nothing is lost."""

    def kept(self, loss, inputs):
        if getattr(self, 'shape', None) != inputs.shape:
            self.shape, self.grid = inputs.shape, inputs.new_ones(inputs.shape)
        return loss * self.grid.mean()


@MODELS.register_module(force=True)
class ExtraState(Keeping):
    """What it counts is in checkpoints by its own code."""

    def get_extra_state(self):
        return self.steps

    def set_extra_state(self, state):
        self.steps = state

    def kept(self, loss, inputs):
        return loss * self.steps


@MODELS.register_module(force=True)
class Epoch(Keeping):
    """A hook says where the training is, as SetEpochInfoHook does."""
    epoch = 0

    def kept(self, loss, inputs):
        return loss * self.epoch


@HOOKS.register_module(force=True)
class SetEpoch(Hook):
    def before_train_epoch(self, runner):
        getattr(runner.model, 'module', runner.model).epoch = runner.epoch


def config(work_dir, model):
    cfg = tiny.tiny(work_dir)
    cfg.model.type, cfg.custom_hooks = model, [dict(type='SetEpoch')]
    return cfg


# the repeated step that has other bits without the attribute: 1, 2, 4, 8, ..., counted from 0
LOST = {'Threshold': (7, 'model.steps'), 'Smallest': (3, 'model.smallest'),
        'FirstBatch': (1, 'model.centre'), 'EveryThird': (1, 'model.reference')}


@pytest.mark.parametrize('model', LOST)
def test_a_step_that_a_resumed_run_would_not_take_ends_the_run(model, tmp_path):
    iteration, name = LOST[model]
    with pytest.raises(StepDiffersError, match=f'resumes at iteration {iteration} ') as caught:
        Runner.from_cfg(config(tmp_path, model)).train()
    assert name in str(caught.value) and 'adapters.register' in str(caught.value)


@pytest.mark.parametrize('model', ['Cache', 'Epoch', 'ExtraState'])
def test_caches_and_what_hooks_set_are_no_difference(model, tmp_path):
    Runner.from_cfg(config(tmp_path, model)).train()


def test_registered_attributes_are_kept_and_no_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(adapters, 'ADAPTERS', dict(adapters.ADAPTERS))
    adapters.register(Smallest, 'smallest', 'steps')
    Runner.from_cfg(config(tmp_path, 'Smallest')).train()


def test_one_virtual_rank_that_loses_an_attribute_ends_all(tmp_path):
    with pytest.raises(Exception, match='resumes at iteration 1 would take another step'):
        on_virtual_ranks(config(tmp_path, 'FirstBatch'), 2, 1, tmp_path)
