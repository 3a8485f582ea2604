"""A resume is refused, by name, where the checkpoint does not fit the run that hooks have made."""
import copy
import importlib
import re

import pytest
import torch
from faults import tiny
from mmengine.registry import MODELS
from mmengine.runner import Runner
from small_runs import finish, warnings_of

from dev.user_setups import loading, reshaping  # noqa: F401  register set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.checkpoint import fit
from mmrepro.errors import ResumeError

pytestmark = pytest.mark.filterwarnings('ignore')


@MODELS.register_module(force=True)
class Longer(tiny.Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('means', torch.zeros(1))

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'loss':
            self.means = torch.cat([self.means, inputs.mean().view(1)])[-3:]
        return super().forward(inputs, label, mode)


@MODELS.register_module(force=True)
class Alias(tiny.Tiny):
    """A part gets another name with the first step, as in DDQ's decoder."""

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'loss':
            self.head.branches = self.backbone
            self.backbone[1].others = self.head.fc  # named before the head
        return super().forward(inputs, label, mode)


def config(work_dir, hook=None, model='Tiny', **changes):
    cfg = tiny.tiny(work_dir)
    cfg.model.type, cfg.train_cfg.max_epochs = model, 3
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    cfg.custom_hooks = []
    if hook:
        SETUPS[hook].change(cfg)
    cfg.merge_from_dict(copy.deepcopy(changes))
    return cfg


def resumed(cfg, iteration, folder, **randomness):
    cfg = cfg.copy()
    cfg.load_from, cfg.resume = f'{cfg.work_dir}/iter_{iteration}.pth', True
    cfg.work_dir = str(folder)
    cfg.randomness.update(randomness)
    return cfg


TWICE = dict(hook='TwoPassesPerEpoch')
# what changes when the second epoch begins, where a run resumes, the row that names it
MISFITS = {
    'a buffer of another size': (dict(model='Longer'), 5, 'weights.means .*(3,).*(1,)'),
    'a layer that a hook has added': (
        dict(hook='ReplacesTheHead'), 9, r'weights.head.hidden.weight .*\(not set\)'),
    'another activation': (dict(hook='ReplacesTheActivation'), 9, 'module.backbone.2 .*SiLU.*ReLU'),
    'a setting of a layer': (dict(hook='DropoutGrows'), 9, r'module.head.drop .*p=0.*p=0.3'),
    'frozen parameters': (
        dict(hook='UnfreezesTheBackbone'), 9, r'frozen.backbone.0.weight .*\(not set\).*frozen'),
    'another optimizer': (dict(hook='SwapsTheOptimizer'), 6, 'optimizer.class .*Adam.*SGD'),
    'a group of parameters': (dict(hook='AddsAGroupOfParameters'), 6, 'optimizer.groups .*, 1'),
}


@pytest.mark.parametrize('case', MISFITS)
def test_what_a_resume_does_not_restore_is_refused_by_name(case, tmp_path):
    changes, iteration, row = MISFITS[case]
    cfg = config(tmp_path / 'whole', **changes)
    finish(cfg)
    with pytest.raises(ResumeError, match='does not fit this run') as caught:
        finish(resumed(cfg, iteration, tmp_path / 'resumed'))
    text = str(caught.value)
    assert f'iter_{iteration}.pth' in text and 'resume_strict=False' in text
    assert re.search(row, text), text


@pytest.mark.parametrize('changes, iteration', [
    *((dict(hook=hook), iteration) for hook, iterations in dict(
        ReplacesTheActivation=(3, 4), UnfreezesTheBackbone=(3, 4, 6),
        UnfreezesFromAnEpochOn=(4, 6, 8, 9)).items()
      for iteration in iterations),
    (dict(model='Alias'), 3),  # another name for a part is no other model
    *((TWICE, iteration) for iteration in (3, 11))], ids=str)  # the first pass
def test_what_fits_is_the_whole_run(changes, iteration, tmp_path):
    cfg = config(tmp_path / 'whole', **changes)
    expected = finish(cfg)
    assert finish(resumed(cfg, iteration, tmp_path / 'resumed')) == expected
    assert 'model' not in changes or 'head.branches.0.weight' in expected


def test_resume_strict_false_accepts_what_does_not_fit(tmp_path):
    cfg = config(tmp_path / 'whole', 'ReplacesTheActivation', log_level='WARNING')
    finish(cfg)
    runner = Runner.from_cfg(resumed(cfg, 9, tmp_path / 'resumed', resume_strict=False))
    assert any('module.backbone.2' in line and 'not that of the uninterrupted run' in line
               for line in warnings_of(runner))


def test_a_loop_with_two_passes_does_not_resume_in_the_second(tmp_path):
    cfg = config(tmp_path / 'whole', **TWICE)
    finish(cfg)
    with pytest.raises(ResumeError, match='pass 2 over the data of epoch 0, and TwoPasses'):
        finish(resumed(cfg, 6, tmp_path / 'resumed'))


@pytest.mark.parametrize('line', [
    'a = {}', '@property\n    def a(self): return {}', '@classmethod\n    def a(cls): return {}'])
def test_any_line_of_a_class_counts_as_its_code(line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, 2):
        (tmp_path / f'edited_{number}.py').write_text(f'class A:\n    {line.format(number)}\n')
    codes = {fit._source(importlib.import_module(f'edited_{number}').A) for number in (1, 2)}
    assert len(codes) == 2
