"""What hooks and loops draw depends on event and iteration, wherever a run resumed."""
import os
import random
import signal

import numpy as np
import pytest
import torch
from loaders import loader, train
from mmengine.hooks import Hook
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from preempted_runs import settings
from small_runs import finish, hook_with

from mmrepro.errors import Preempted, RandomnessError

pytestmark = pytest.mark.usefixtures('no_pause_between_passes')

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
    loop = {} if by_epoch else dict(train_cfg=dict(by_epoch=False, max_iters=12, val_interval=100))
    expected = finish(each_iteration(tmp_path, **loop), Scales(event))
    for point in points:
        cfg = each_iteration(tmp_path / str(point), **loop)
        cfg.resume, cfg.load_from = True, str(tmp_path / f'iter_{point}.pth')
        assert finish(cfg, Scales(event)) == expected, point


def killed(runner, **kwargs):
    raise KeyboardInterrupt


def test_a_signal_in_the_validation_that_comes_first_changes_no_bit(tmp_path):
    """Killed while it validates; the next process is told to leave while it does so again."""
    def cfg(name, **changes):
        return settings(tmp_path / name, **{'default_hooks.checkpoint.interval': 1, **changes})

    expected = finish(cfg('whole'))
    with pytest.raises(KeyboardInterrupt):
        finish(cfg('killed'), hook_with(before_val_iter=killed))
    with pytest.raises(Preempted):
        finish(cfg('killed', resume=True), hook_with(
            before_val_iter=lambda runner, **kwargs: os.kill(os.getpid(), signal.SIGTERM)))
    assert finish(cfg('killed', resume=True)) == expected


DRAWN = []


def draw():
    return random.random() + np.random.rand() + float(torch.rand(()))


@LOOPS.register_module(force=True)
class DrawingEpochs(EpochBasedTrainLoop):
    """Draws before the hooks of an iteration, as a loop that mixes batches does."""

    def run_iter(self, idx, data_batch):
        DRAWN.append((self.iter, draw()))
        data_batch['x'] = [x * DRAWN[-1][1] for x in data_batch['x']]
        super().run_iter(idx, data_batch)


@LOOPS.register_module(force=True)
class DrawingIterations(IterBasedTrainLoop):
    def run_iter(self, data_batch):
        DRAWN.append((self.iter, draw()))
        super().run_iter(data_batch)


@LOOPS.register_module(force=True)
class OnlyEnds(EpochBasedTrainLoop):
    """A loop written from scratch, in which hooks are called at the end of an iteration only."""

    def run_iter(self, idx, data_batch):
        outputs = self.runner.model.train_step(data_batch, self.runner.optim_wrapper)
        self.runner.call_hook('after_train_iter', batch_idx=idx, outputs=outputs)
        self._iter += 1


@LOOPS.register_module(force=True)
class CallsNoHooks(EpochBasedTrainLoop):
    def run_iter(self, idx, data_batch):
        self.runner.model.train_step(data_batch, self.runner.optim_wrapper)
        self._iter += 1


@pytest.mark.parametrize('loop', ['OnlyEnds', 'CallsNoHooks'])
def test_a_loop_that_does_not_say_where_an_iteration_begins_is_refused(loop, tmp_path):
    with pytest.raises(RandomnessError, match=f'{loop} trains without the hooks of before_train'):
        finish(settings(tmp_path, train_cfg=dict(type=loop, max_epochs=2)))


class DrawsAfterAll(Hook):
    """Registered later than the hooks of the runner, with the same priority."""

    def __init__(self, steps):
        self.steps = steps

    def draw(self, runner, batch_idx=None, **kwargs):
        if runner.iter in self.steps:
            draw()

    before_train_iter = before_val_iter = after_train_iter = before_train_epoch = draw
    after_val = after_train_epoch = before_run = draw


def run(work_dir, loop, *args, steps=(), **kwargs):
    DRAWN.clear()

    def prepare(runner):
        runner.register_hook(DrawsAfterAll(steps), priority='LOWEST')
        runner._train_loop['type'] = dict(epochs='DrawingEpochs', iterations='DrawingIterations')[
            loop]
        runner._train_loop.pop('by_epoch')

    found = train(loader, work_dir, loop, *args, prepare=prepare, **kwargs)
    return found, list(DRAWN)


@pytest.mark.parametrize('loop', ['epochs', 'iterations'])
def test_what_loops_draw_depends_on_the_iteration_only(loop, tmp_path):
    (whole, weights), drawn = run(tmp_path, loop)
    assert len(set(drawn)) == 12
    assert run(tmp_path / 'other', loop, validation=False) == ((whole, weights), drawn)
    assert run(tmp_path / 'hooks', loop, steps=(0, 2, 3, 8)) == ((whole, weights), drawn)
    (seen, again), later = run(tmp_path, loop, 5)
    assert (seen, again, later) == (whole[5:], weights, drawn[5:])
