"""What hooks draw is a function of the event, whatever ran before and wherever a run resumed."""
import os
import signal

import pytest
import torch
from mmengine.hooks import Hook
from preempted_runs import settings
from small_runs import finish

from mmrepro.errors import Preempted

EVENTS = ('before_train_epoch', 'after_train_epoch')


class Scales(Hook):
    """Draws at one event of an epoch, and scales all batches that follow by it."""

    def __init__(self, event):
        self.scale = torch.ones(1)
        setattr(self, event, self._draw)

    def _draw(self, runner):
        self.scale = torch.rand(1) + 0.5

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['x'] = [x * self.scale for x in data_batch['x']]


def each_iteration(work_dir, **changes):
    cfg = settings(work_dir, **changes)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)
    return cfg


@pytest.mark.parametrize('event', EVENTS)
def test_validation_does_not_matter_to_what_hooks_draw_at_epochs(event, tmp_path):
    with_it = finish(settings(tmp_path / 'a'), Scales(event))
    cfg = settings(tmp_path / 'b')
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    assert with_it == finish(cfg, Scales(event))


# the checkpoint of an epoch's last iteration: its end comes in the resumed run
@pytest.mark.parametrize('by_epoch, event, points', [
    (True, 'before_train_epoch', (2, 4, 5)), (False, 'before_train_epoch', (2, 4, 5)),
    (True, 'after_train_epoch', (4, ))])
def test_a_hook_draws_the_same_where_an_epoch_goes_on_or_ends(by_epoch, event, points, tmp_path):
    loop = {} if by_epoch else dict(
        train_cfg=dict(by_epoch=False, max_iters=12, val_interval=100))
    expected = finish(each_iteration(tmp_path, **loop), Scales(event))
    for point in points:
        cfg = each_iteration(tmp_path / str(point), **loop)
        cfg.resume, cfg.load_from = True, str(tmp_path / f'iter_{point}.pth')
        assert finish(cfg, Scales(event)) == expected, point


class InValidation(Hook):
    def __init__(self, act):
        self.act = act

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.act()


def killed():
    raise KeyboardInterrupt


def test_a_signal_in_the_validation_that_comes_first_changes_no_bit(tmp_path):
    """Killed while it validates; the next process is told to leave while it does so again."""
    def cfg(name, **changes):
        return settings(tmp_path / name, **{
            'default_hooks.checkpoint.interval': 1, **changes})

    expected = finish(cfg('whole'))
    with pytest.raises(KeyboardInterrupt):
        finish(cfg('killed'), InValidation(killed))
    with pytest.raises(Preempted):
        finish(cfg('killed', resume=True),
                InValidation(lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert finish(cfg('killed', resume=True)) == expected
