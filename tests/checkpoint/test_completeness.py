"""A run resumes only from a file that holds all of it, and says which file does not."""
import collections
import datetime
import pathlib

import numpy as np
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from small_runs import config, warnings_of
from validated_runs import everything, killed, trained, validated

from mmrepro.checkpoint import files
from mmrepro.checkpoint.choosing import newest_good
from mmrepro.checkpoint.completeness import check_readable, has_schedules, lacks
from mmrepro.errors import CheckpointError, RandomnessError, ResumeError


def settings(work_dir, **checkpoint):
    """Five epochs of four iterations; the error is lower than ever after each of the first."""
    cfg = validated(work_dir, True)
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.2)]
    cfg.optim_wrapper.optimizer = dict(type='Adam', lr=0.05)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', **{**dict(save_best='error', rule='less'), **checkpoint})
    return cfg


def again(cfg, path=None):
    cfg.resume, cfg.load_from = True, path and str(path)
    return cfg


def test_a_best_checkpoint_is_never_what_a_run_resumes_from(tmp_path):
    """The only file: no checkpoint of the run had been due."""
    expected = trained(settings(tmp_path / 'whole', interval=2))
    killed(settings(tmp_path / 'killed', interval=2), iteration=5)
    assert list((tmp_path / 'killed').glob('best_*')) and not newest_good(
        str(tmp_path / 'killed'))[0]
    assert trained(again(settings(tmp_path / 'killed', interval=2))) == expected


def test_the_last_good_file_is_not_given_up_for_a_best_checkpoint(tmp_path):
    """CheckpointHook has removed the old checkpoint, written the best, and not yet the new one."""
    options = dict(interval=2, max_keep_ckpts=1)
    expected = trained(settings(tmp_path / 'whole', **options))
    # written: best of 1; epoch 2, best of 2, epoch 2 again; best of 3; killed before epoch 3
    killed(settings(tmp_path / 'killed', **options), write=6)
    good = torch.load(tmp_path / 'killed' / '.last_good.pth', weights_only=False)
    assert lacks(good) is None and good['meta']['iter'] == 8
    assert trained(again(settings(tmp_path / 'killed', **options))) == expected


@pytest.mark.parametrize('option, missing', [('save_optimizer', 'optimizer'),
                                             ('save_param_scheduler', 'schedules')])
def test_an_incomplete_checkpoint_is_refused_and_announced(option, missing, tmp_path, caplog):
    cfg = settings(tmp_path, interval=1, **{option: False})
    cfg.train_cfg.max_epochs = 1
    runner = Runner.from_cfg(cfg)
    assert any(f'{option}=False of CheckpointHook: a run cannot be resumed' in text
               for text in warnings_of(runner))
    assert not (tmp_path / '.last_good.pth').exists()
    cfg = again(settings(tmp_path, interval=1, **{option: False}), tmp_path / 'epoch_1.pth')
    cfg.train_cfg.max_epochs = 1
    with pytest.raises(ResumeError, match=f'epoch_1.pth holds no {missing}.*not resumed'):
        Runner.from_cfg(cfg)
    cfg.randomness.resume_strict = False
    assert any('not that of the uninterrupted run' in line
               for line in Runner.from_cfg(cfg).lifecycle.resume.passed_over)
    runner = Runner.from_cfg(again(cfg))
    resuming = runner.lifecycle.resume
    assert resuming.point is None and f'no {missing}' in resuming.passed_over[0]
    assert 'begins at the beginning' in resuming.passed_over[-1]
    runner.train()
    assert runner.iter == 4


def test_a_best_checkpoint_that_is_named_is_refused(tmp_path):
    cfg = settings(tmp_path, interval=1)
    cfg.train_cfg.max_epochs = 1
    trained(cfg)
    best, = tmp_path.glob('best_*')
    with pytest.raises(ResumeError, match='best_.* holds no optimizer .* and no schedules'):
        Runner.from_cfg(again(settings(tmp_path, interval=1), best))


def test_a_run_without_schedules_lacks_none(tmp_path):
    cfg = config(tmp_path)
    cfg.pop('param_scheduler', None)
    runner = Runner.from_cfg(cfg)
    runner.train()
    content = files.load(str(tmp_path / '.last_good.pth'))
    assert 'param_schedulers' not in content and lacks(content) is None


def test_schedules_of_a_checkpoint_of_stock_mmengine_are_known_from_its_config():
    for text, expected in (("param_scheduler = [dict(type='LinearLR')]", True),
                           ("param_scheduler = dict(a=dict(type='LinearLR'))", True),
                           ('param_scheduler = []', False), ('param_scheduler = None', False),
                           ('x = 1', False), ('', False)):
        assert has_schedules(dict(cfg=text)) is expected, text


def test_the_folder_of_checkpoints_is_searched_too(tmp_path):
    """``out_dir``, one file kept, killed while the next one was written."""
    options = dict(interval=1, max_keep_ckpts=1, save_best=None)
    expected = trained(settings(tmp_path / 'whole', **options))
    options['out_dir'] = str(tmp_path / 'elsewhere')
    cfg = settings(tmp_path / 'killed', **options)
    killed(cfg, write=3)
    assert not list((tmp_path / 'killed').glob('*.pth'))
    point = Runner.from_cfg(again(cfg)).lifecycle.resume.point
    assert point.path.endswith('.last_good.pth') and point.iteration == 8
    assert trained(again(cfg)) == expected


@pytest.mark.parametrize('content', [dict(weight=torch.zeros(1)), dict(state_dict={}),
                                     dict(meta=dict(epoch=1)), [1]])
def test_other_files_are_passed_over_by_name(content, tmp_path):
    torch.save(content, tmp_path / 'export.pth')
    runner = Runner.from_cfg(again(settings(tmp_path)))
    assert runner.lifecycle.resume.point is None
    assert 'export.pth is no checkpoint of a run' in runner.lifecycle.resume.passed_over[0]
    with pytest.raises(CheckpointError, match='export.pth is no checkpoint of a run'):
        Runner.from_cfg(again(settings(tmp_path), tmp_path / 'export.pth'))


def test_two_averages_of_weights_are_refused_by_name(tmp_path):
    """MMEngine keeps one of them in a checkpoint, and swaps them with each other."""
    cfg = settings(tmp_path)
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1),
                        dict(type='EMAHook', ema_type='StochasticWeightAverage')]
    runner = Runner.from_cfg(cfg)
    with pytest.raises(RandomnessError, match=r"EMAHook\(.*'momentum': 0.1.* and "
                                              r"EMAHook\(.*StochasticWeightAverage.*"
                                              'One EMAHook is allowed'):
        runner.train()
    assert runner.iter == 0


UNREADABLE = {
    'path': pathlib.PurePosixPath('/x'), 'date': datetime.datetime(2020, 1, 1),
    'default': collections.defaultdict(int, a=1), 'frozen': frozenset([1]),
    'complex': np.complex64(1)}


@pytest.mark.parametrize('name', UNREADABLE)
def test_what_no_resume_could_read_is_refused_when_it_is_written(name, tmp_path):
    class Keeps(Hook):
        def before_save_checkpoint(self, runner, checkpoint):
            checkpoint['mine'] = dict(fine=torch.ones(2), mine=[1, UNREADABLE[name]])

    runner = Runner.from_cfg(settings(tmp_path, interval=1))
    runner.register_hook(Keeps())
    with pytest.raises(CheckpointError, match=r"checkpoint\['mine'\]\['mine'\]\[1\] is a .*"
                                              f"{type(UNREADABLE[name]).__name__}"):
        runner.train()
    assert not list(tmp_path.glob('*.pth')) and not list(tmp_path.glob('.*partial'))


def test_what_can_be_read_is_written():
    check_readable(dict(a=torch.ones(1), b=[np.float64(1), np.ones(2), collections.Counter('a')],
                        c=collections.OrderedDict(a=torch.Size([1])), d={1, 2}, e=torch.float32))


def test_what_lies_far_away_is_for_mmengine_to_fetch(tmp_path, monkeypatch):
    """``last_checkpoint`` names a remote file: none of the local ones is taken instead."""
    cfg = settings(tmp_path, interval=1)
    cfg.train_cfg.max_epochs = 2
    expected = trained(cfg)
    monkeypatch.setattr(Runner, 'load_checkpoint', lambda self, name, **kwargs: fetched(self, name))
    content = {name: files.load(str(path)) for name, path in (
        ('s3://kept/epoch_1.pth', tmp_path / 'epoch_1.pth'),
        ('s3://kept/best.pth', next(tmp_path.glob('best_*'))))}

    def fetched(runner, name):
        checkpoint = content[name]
        runner.call_hook('after_load_checkpoint', checkpoint=checkpoint)
        runner.model.load_state_dict(checkpoint['state_dict'])
        return checkpoint

    for name in content:
        (tmp_path / 'last_checkpoint').write_text(name)
        runner = Runner.from_cfg(again(cfg))
        assert runner._resume and runner.lifecycle.resume.point is None
        if 'best' in name:
            with pytest.raises(ResumeError, match='holds no optimizer'):
                runner.train()
        else:
            runner.train()
            assert everything(runner) == expected


@pytest.mark.parametrize('pointer, said', [
    (None, '{} has no checkpoint to resume from'), ('', '{} has no checkpoint to resume from'),
    ('epoch_7.pth', 'nothing is left to resume from')])
def test_without_a_checkpoint_a_resume_begins_at_the_beginning_and_says_so(pointer, said, tmp_path):
    if pointer is not None:
        (tmp_path / 'last_checkpoint').write_text(pointer)
    cfg = again(settings(tmp_path))
    cfg.train_cfg.max_epochs = 1
    runner = Runner.from_cfg(cfg)
    assert runner.lifecycle.resume.passed_over[-1] == (
        f'{said.format(tmp_path)}: the run begins at the beginning')
    assert not runner._resume
    runner.train()
    assert runner.iter == 4
