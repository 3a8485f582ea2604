"""What loops and hooks draw around a step depends on the iteration only."""
import random

import numpy as np
import pytest
import torch
from loaders import loader, train
from mmengine.hooks import Hook
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

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


@pytest.fixture(autouse=True)
def clean():
    DRAWN.clear()


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
