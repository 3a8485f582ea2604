"""State that no adapter keeps is named, by comparing a run with its own resume."""

import types

import pytest
import torch
from demo_runs import small
from forked_trainings import ForkedTraining
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS, MODELS
from small_runs import config

from mmrepro.checkpoint import adapters
from mmrepro.checkpoint.lost_state import Lost, lost_state, snapshot
from mmrepro.errors import TrainingError
from mmrepro.reports import certificate
from mmrepro.runs import launcher
from mmrepro.verify.state_probe import lost_attributes
from mmrepro.verify.variations import control_of, verify


class Memory:
    """An object that a module holds, as heads hold assigners and samplers."""

    def __init__(self):
        self.seen, self.recent, self.table = 0, [], None

    def see(self, value):
        self.seen += 1
        self.recent.append(value)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.calls, self.cache = torch.nn.Linear(2, 1), 0, None

    def forward(self, x):
        self.calls += 1
        self.cache = torch.ones(3)  # there again after the first call
        return self.line(x) * self.calls


@MODELS.register_module(force=True)
class Forgetful(BaseModel):
    def __init__(self, matters=True):
        super().__init__()
        self.layer, self.memory, self.matters = Layer(), Memory(), matters

    def forward(self, x, mode='tensor'):
        x = torch.stack(x).float()
        self.memory.see(float(x.sum()))
        out = self.layer(x) if self.matters else self.layer.line(x)
        return dict(loss=out.square().mean())


@HOOKS.register_module(force=True)
class Countdown(Hook):
    def __init__(self):
        self.left = 10

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.left -= 1


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    monkeypatch.setattr(launcher, 'LaunchedTraining', ForkedTraining)


def probe(cfg, at, iterations, folder):
    results = verify(cfg, str(folder), ['process', 'resume'], iterations, at, 1, probed=True)
    control = control_of(results, str(folder), at)
    lost = lost_attributes(*(str(folder / name) for name in ('resume', 'reference', 'process')))
    return certificate('', results, [], str(folder), control=control, lost=lost), lost


def settings(tmp_path, **model):
    cfg = config(tmp_path)
    cfg.model = dict(type='Forgetful', **model)
    cfg.custom_hooks = [dict(type='Countdown')]
    cfg.default_hooks.checkpoint = None
    return cfg


class Warm(torch.nn.Linear):
    calls = 0
    noise = torch.Generator()


def test_attributes_that_only_the_class_has_are_seen():
    model = torch.nn.Sequential(Warm(1, 1))
    runner = types.SimpleNamespace(model=model, cfg=None, hooks=[])
    before = snapshot(runner)['model:0']
    assert before['calls'] == '0' and before['noise'].startswith('generator ')
    model[0].calls += 1
    assert set(before.items()) ^ set(snapshot(runner)['model:0'].items()) == {
        ('calls', '0'), ('calls', '1')}


def test_modules_their_parts_and_hooks_are_named(tmp_path):
    report, lost = probe(settings(tmp_path), 3, 6, tmp_path)
    found = {(row.cls, row.attribute): (row.then, row.now) for row in lost}
    assert found.pop(('Forgetful', 'memory.recent'))
    assert found == {('Layer', 'calls'): ('3', '0'), ('Forgetful', 'memory.seen'): ('3', '0'),
                     ('Countdown', 'left'): ('7', '10')}
    text = str(report)
    assert report.exit_code == 1 and 'iteration 3, losses.loss: ' in text
    assert "adapters.register(Layer, 'calls', why='...')" in text


@pytest.fixture
def kept():
    adapters.register(Layer, 'calls')
    adapters.register(Countdown, 'left')
    adapters.register(Forgetful, 'memory.seen', 'memory.recent')
    yield
    for name in ('Layer', 'Countdown', 'Forgetful'):
        adapters.ADAPTERS.pop(name)


def test_what_the_advice_says_is_enough(tmp_path, kept):
    report, lost = probe(settings(tmp_path), 3, 6, tmp_path)
    assert report.exit_code == 0 and not lost, report


def test_state_that_moves_no_bit_is_named_too(tmp_path):
    report, lost = probe(settings(tmp_path, matters=False), 3, 6, tmp_path)
    assert report.exit_code == 1 and 'SAME BITS' in str(report)
    assert {row.cls for row in lost} == {'Forgetful', 'Countdown'}


@pytest.mark.parametrize('model', ['yolox_s', pytest.param('rtmdet_tiny',
                                                          marks=pytest.mark.nightly)])
def test_a_detector_loses_nothing(model, data_root, tmp_path):
    import mmdet.models  # noqa: F401
    cfg = small(model, data_root)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    report, lost = probe(cfg, 2, 3, tmp_path)
    assert report.exit_code == 0 and not lost, report


def test_what_differs_between_two_runs_is_not_lost():
    runs = [{'model:': {'<class>': 'M', 'born': '1', 'count': '5'}},
            {'model:': {'<class>': 'M', 'born': '2', 'count': '5'}}]
    assert lost_state(runs, {'model:': {'<class>': 'M', 'born': '3', 'count': '5'}}) == []
    assert lost_state(runs, {'model:': {'<class>': 'M', 'born': '3'}}) == [
        Lost('model:', 'M', 'count', '5', '(not set)')]


def test_a_run_that_fails_is_told(tmp_path):
    cfg = settings(tmp_path)
    with pytest.raises(TrainingError, match='reference ended before its last iteration'):
        probe(cfg, 3, 60, tmp_path)
