"""A comparison must see a training that is spoiled on purpose; each way to spoil is one."""
import os

import pytest
from faults.tiny import Tiny, tiny
from harness import Child
from mmengine.registry import MODELS
from torch import nn

from dev import control as module
from mmrepro.runs.child import Training, train_here
from mmrepro.runs.config_edits import add_fingerprints

pytestmark = pytest.mark.usefixtures('forked')


@MODELS.register_module(force=True)
class Constant(Tiny):
    """Begins with the same weights whatever the seed, and draws nothing."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.head.drop.p = 0.
        for parameter in self.parameters():
            nn.init.constant_(parameter, .1)


def settings(folder, **changes):
    cfg = tiny(folder)
    cfg.train_dataloader.batch_size, cfg.train_dataloader.dataset.size = 8, 32
    cfg.param_scheduler = dict(type='LinearLR', start_factor=.1, end=9, by_epoch=False)
    cfg.merge_from_dict(changes)
    return cfg


def train(cfg, folder, iterations):
    """Train with fingerprints in a forked child; return the training."""
    add_fingerprints(cfg, 'step')
    cfg.dump(f'{folder}.py')
    training = Training(f'{folder}.py', str(folder), iterations=iterations)
    Child(train_here, training).result()
    return training


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp('reference'))
    cfg = settings(folder)
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=2, by_epoch=False)
    train(cfg, folder, 4)
    return folder


@pytest.mark.parametrize('table, name, iteration', [
    *(('RUNS', name, 0) for name in module.RUNS),
    # a schedule decides on the next iteration
    *(('RESUMES', name, 3 if 'schedules' in name else 2) for name in module.RESUMES)])
def test_what_is_spoiled_is_seen(reference, tmp_path, monkeypatch, table, name, iteration):
    monkeypatch.setattr(module, table, {name: getattr(module, table)[name]})
    training = Training(f'{reference}.py', str(tmp_path), iterations=2)
    if table == 'RESUMES':
        training = training._replace(resume=True, iterations=4,
                                     checkpoint=os.path.join(reference, 'iter_2.pth'))
    found = module.control(training, reference)
    assert found.text == f'control: {name} was seen as different at iteration {iteration}'
    # without it, the same training is equal: nothing but the omission was seen
    monkeypatch.setattr(module, table, {'nothing': {} if table == 'RUNS' else id})
    assert module.control(training, reference).iteration is None


def test_a_control_that_fails_is_not_seen_and_says_why(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(module, 'RUNS', {'a broken run': {'model.type': 'NoSuch'}})
    found = module.control(Training(f'{reference}.py', str(tmp_path), iterations=2), reference)
    assert found.iteration is None and found.text.startswith(
        f'{module.NOT_SEEN}no control came to its end; a broken run failed: the training ended')


def test_an_omission_that_changes_nothing_is_followed_by_the_next(reference, tmp_path):
    """Without momentum and schedules, a lost state of the optimizer cannot be seen."""
    cfg = settings('work', **{'optim_wrapper.optimizer.momentum': 0, 'param_scheduler': None})
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=2, by_epoch=False)
    training = train(cfg, tmp_path / 'plain', 4)
    found = module.control(training._replace(
        resume=True, work_dir=str(tmp_path / 'control'),
        checkpoint=str(tmp_path / 'plain' / 'iter_2.pth')), str(tmp_path / 'plain'))
    assert found.text == ('control: a resume without its random numbers was seen as different at '
                          'iteration 2')


def test_what_no_omission_changes_is_not_verified(tmp_path):
    cfg = settings('work', **{'model.type': 'Constant'})
    cfg.train_dataloader.update(batch_size=3, sampler=dict(type='DefaultSampler', shuffle=False))
    cfg.train_dataloader.dataset.pipeline = [dict(type='TinyLoad'), dict(type='TinyPack')]
    training = train(cfg, tmp_path / 'constant', 2)
    found = module.control(training._replace(work_dir=str(tmp_path / 'control')),
                           str(tmp_path / 'constant'))
    assert found.iteration is None and found.text.startswith(
        'NOT VERIFIED: all bits are equal, but so are those of a run with another seed, a run '
        'with batches of three')
