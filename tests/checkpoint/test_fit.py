"""A resume is refused, by name, where the checkpoint does not fit the run that hooks have made."""
import copy
import importlib
import re

import pytest
import torch
from faults import tiny
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS, MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from mmengine.runner import Runner
from small_runs import finish, warnings_of, weights_of
from torch import nn

from dev.user_setups import loading, reshaping  # noqa: F401  register set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.checkpoint import fit
from mmrepro.errors import ResumeError
from mmrepro.util.scoped import replaced

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


class Observer(nn.Module):
    """Resizes its buffer to what it loads, as observers of torch.ao.quantization do."""

    def __init__(self):
        super().__init__()
        self.register_buffer('largest', torch.ones(0))

    def forward(self, x):
        largest = x.abs().amax((0, 2, 3))
        self.largest = torch.maximum(self.largest, largest) if len(self.largest) else largest

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.largest = torch.ones_like(state_dict[f'{prefix}largest'])
        super()._load_from_state_dict(state_dict, prefix, *args)


@MODELS.register_module(force=True)
class Observed(tiny.Tiny):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.observer = Observer()

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'loss':
            self.observer(inputs)
            inputs = inputs / self.observer.largest[:, None, None]
        return super().forward(inputs, label, mode)


@MODELS.register_module(force=True)
class Grown(tiny.Tiny):
    """Replaces a parameter by the one that it loads: the optimizer has the first."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scales = nn.Parameter(torch.ones(1))

    def forward(self, inputs, label, mode='tensor'):
        if mode == 'loss' and len(self.scales) < 3:
            self.scales.data = torch.ones(3)
        return super().forward(inputs * self.scales.mean(), label, mode)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.scales = nn.Parameter(torch.ones(3))
        super()._load_from_state_dict(state_dict, prefix, *args)


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
    'a parameter that is replaced': (dict(model='Grown'), 5, 'weights.scales .*(3,).*(1,)'),
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
    # what is compared when the checkpoint is loaded, and what after the hooks of the first epoch
    assert ('before_run' if row.startswith(('weights', 'optimizer'))
            else 'runner.epoch >= N, not == N, in before_train_epoch') in text


@pytest.mark.parametrize('changes, iteration', [
    *((dict(hook=hook), iteration) for hook, iterations in dict(
        ReplacesTheActivation=(3, 4), UnfreezesTheBackbone=(3, 4, 6),
        UnfreezesFromAnEpochOn=(4, 6, 8, 9)).items()
      for iteration in iterations),
    (dict(model='Observed'), 3),  # a buffer that is resized when it loads
    (dict(model='Alias'), 3),  # another name for a part is no other model
    *((TWICE, iteration) for iteration in (3, 11))], ids=str)  # the first pass
def test_what_fits_is_the_whole_run(changes, iteration, tmp_path):
    cfg = config(tmp_path / 'whole', **changes)
    expected = finish(cfg)
    assert finish(resumed(cfg, iteration, tmp_path / 'resumed')) == expected
    assert changes.get('model') != 'Alias' or 'head.branches.0.weight' in expected


@HOOKS.register_module(force=True)
class FollowsProgress(Hook):
    """Sets parts of the training by the iteration, in each one."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        runner.model.head.drop.p = .5 * runner.iter / runner.max_iters
        runner.model.backbone[0].requires_grad_(runner.iter % 2 == 0)


@pytest.mark.parametrize('iteration', [6, 8])  # within an epoch, and at its end
def test_what_hooks_set_in_each_iteration_fits(iteration, tmp_path):
    cfg = config(tmp_path / 'whole', custom_hooks=[dict(type='FollowsProgress')],
                 log_level='WARNING')
    cfg.default_hooks.checkpoint.interval = 2
    expected = finish(cfg)
    again = Runner.from_cfg(resumed(cfg, iteration, tmp_path / 'resumed'))
    said = warnings_of(again)
    assert weights_of(again) == expected
    assert sum('module.head.drop' in text and 'changed in each iteration' in text
               for text in said) == 1


def test_resume_strict_false_accepts_what_does_not_fit(tmp_path):
    cfg = config(tmp_path / 'whole', 'ReplacesTheActivation', log_level='WARNING')
    finish(cfg)
    runner = Runner.from_cfg(resumed(cfg, 9, tmp_path / 'resumed', resume_strict=False))
    assert any('module.backbone.2' in line and 'may not be that of the uninterrupted' in line
               for line in warnings_of(runner))


def test_a_loop_with_two_passes_does_not_resume_in_the_second(tmp_path):
    cfg = config(tmp_path / 'whole', **TWICE)
    finish(cfg)
    with pytest.raises(ResumeError, match='pass 2 over the data of epoch 0, and TwoPasses'):
        finish(resumed(cfg, 6, tmp_path / 'resumed'))


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class FromASet:
    """Its groups, or their parameters, are in the order of a set of names in a process."""
    order = 'abc'

    def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
        self.groups = optim_wrapper_cfg.get('accumulative_counts')

    def __call__(self, model):
        layers = dict(zip('abc', (layer for layer in model.modules()
                                  if layer._parameters)))
        parameters = [list(layers[name].parameters()) for name in self.order]
        several = [dict(params=group) for group in parameters]
        return OptimWrapper(torch.optim.SGD(
            several if self.groups == 1 else sum(parameters, []), lr=0.1, momentum=0.9))


@pytest.mark.parametrize('groups', [1, 2])
def test_parameters_of_an_optimizer_in_another_order_are_refused(groups, tmp_path, monkeypatch):
    cfg = config(tmp_path / 'whole')
    cfg.optim_wrapper.constructor, cfg.optim_wrapper.accumulative_counts = 'FromASet', groups
    expected = finish(cfg)
    assert finish(resumed(cfg, 4, tmp_path / 'same')) == expected
    monkeypatch.setattr(FromASet, 'order', 'bac')
    with pytest.raises(ResumeError, match=(
            r"optimizer.parameters +'backbone.0.weight' +'backbone.1.weight'(.|\n)*of a set")):
        finish(resumed(cfg, 4, tmp_path / 'other'))
    # a checkpoint of 0.2 has no names
    parts = torch.load(tmp_path / 'whole' / 'iter_4.pth', weights_only=False)['mmrepro']['parts']
    without = {name: part for name, part in parts.items() if name != 'optimizer.parameters'}
    assert fit.differing(without, parts) == fit.differing(parts, without) == []


@HOOKS.register_module(force=True)
class SavesTheHead(Hook):
    """Freezes what is not the head, and leaves it out of checkpoints."""

    def before_run(self, runner):
        runner.model.backbone.requires_grad_(False)

    def before_save_checkpoint(self, runner, checkpoint):
        for name in [name for name in checkpoint['state_dict'] if name.startswith('backbone')]:
            if 'running' not in name and 'tracked' not in name:
                del checkpoint['state_dict'][name]


@pytest.mark.parametrize('strict', [True, False])
def test_weights_that_neither_file_nor_model_have_are_refused_by_name(strict, tmp_path):
    pretrained = tmp_path / 'pretrained.pth'
    cfg = config(tmp_path / 'first', **{'randomness.seed': 17})
    torch.save(Runner.from_cfg(cfg).model.state_dict(), pretrained)
    cfg = config(tmp_path / 'whole', log_level='WARNING', custom_hooks=[dict(type='SavesTheHead')])
    cfg.load_from = str(pretrained)
    said = warnings_of(Runner.from_cfg(cfg))
    assert len([text for text in said if 'weights of the model are not in the checkpoint' in text]
               ) == 1
    again = Runner.from_cfg(resumed(cfg, 4, tmp_path / 'resumed', resume_strict=strict))
    message = r'iter_4.pth has no weights of backbone.0.weight, .*those of this model are not those'
    if strict:
        with pytest.raises(ResumeError, match=message):
            again.train()
    else:
        assert any(re.search(message, text) for text in warnings_of(again))


@pytest.mark.parametrize('content, absent', [
    ({'other.weight': torch.zeros(1)}, 'all'), ({'state_dict': {}}, 'all'), ({}, 'none')])
def test_the_checkpoint_of_another_model_is_said_in_one_line(content, absent, tmp_path):
    cfg = config(tmp_path / 'run')
    cfg.load_from = str(tmp_path / 'other.pth')
    runner = Runner.from_cfg(cfg)
    count = len([*runner.model.parameters()])
    torch.save(content or runner.model.state_dict(), cfg.load_from)
    texts = []
    with replaced(runner.logger, warning=texts.append):
        runner.load_or_resume()
    said = [text for text in texts if 'keep their initial values' in text]
    assert len(said) == (absent == 'all')
    for text in said:
        assert text.startswith(f'{count} of {count} parameters of the model are not in '
                               f'{cfg.load_from}, and keep their initial values: backbone.0.')


def test_weights_that_a_model_has_when_it_is_built_need_not_be_in_the_file(tmp_path):
    cfg = config(tmp_path / 'whole', custom_hooks=[dict(type='SavesTheHead')])
    expected = finish(cfg)
    assert finish(resumed(cfg, 4, tmp_path / 'resumed')) == expected
    content = torch.load(tmp_path / 'whole' / 'iter_4.pth', weights_only=False)
    assert 'backbone.0.weight' not in content['state_dict']


def test_a_file_of_unknown_origin_without_weights_is_refused(tmp_path):
    cfg = config(tmp_path / 'whole')
    finish(cfg)
    path = tmp_path / 'whole' / 'iter_4.pth'
    content = torch.load(path, weights_only=False)
    del content['state_dict']['head.fc.weight'], content['mmrepro'], content['meta']['mmrepro']
    torch.save(content, path)
    with pytest.raises(ResumeError, match='has no weights of head.fc.weight, '):
        finish(resumed(cfg, 4, tmp_path / 'resumed'))


@pytest.mark.parametrize('line', [
    'a = {}', '@property\n    def a(self): return {}', '@classmethod\n    def a(cls): return {}'])
def test_any_line_of_a_class_counts_as_its_code(line, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for number in (1, 2):
        (tmp_path / f'edited_{number}.py').write_text(f'class A:\n    {line.format(number)}\n')
    codes = {fit._source(importlib.import_module(f'edited_{number}').A) for number in (1, 2)}
    assert len(codes) == 2


@pytest.mark.parametrize('meta', [
    dict(seed=True), dict(iter=True), dict(place=[0, False])], ids=lambda meta: next(iter(meta)))
def test_a_truth_value_is_no_number_of_a_checkpoint(meta):
    assert fit.damage(dict(meta=dict(epoch=0, iter=4, seed=3, place=[0, 4]))) is None
    assert 'is damaged: meta.' in fit.damage(dict(meta={
        'epoch': 0, 'iter': 4, 'seed': 3, 'place': [0, 4], **meta}))
