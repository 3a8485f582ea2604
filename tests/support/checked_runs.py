"""Trainings of the tiny network whose steps are repeated."""
import copy
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faults import tiny
from harness import digest
from mmengine.registry import MODELS
from small_runs import trained_runner as finish

from mmrepro.errors import StepDiffersError

__all__ = ['RankDiffers', 'bits', 'config', 'finish', 'registered', 'stopped']


def config(work_dir, model='Tiny', checks=1000, **changes):
    """Return a config; ``model`` is a registered class, or a function that changes the config."""
    cfg = tiny.tiny(work_dir)
    if callable(model):
        model(cfg)
    else:
        cfg.model.type = model
    cfg.randomness.self_checks = dict(steps=checks)
    cfg.env_cfg = dict()
    cfg.merge_from_dict(copy.deepcopy(changes))
    return cfg


def bits(runner):
    return [digest(value) for value in (
        runner.model.state_dict(), runner.optim_wrapper.state_dict(), torch.get_rng_state(),
        random.getstate(), np.random.get_state()[1])]


def stopped(cfg):
    with pytest.raises(StepDiffersError) as caught:
        finish(cfg)
    return str(caught.value)


def registered(cls):
    return MODELS.register_module(force=True)(cls)


@registered
class RankDiffers(tiny.Tiny):
    """A loss differs on rank 1, and no gradient: nothing brings it to rank 0."""

    def forward(self, inputs, label, mode='tensor'):
        losses = super().forward(inputs, label, mode)
        number = float(np.random.default_rng().random()) if dist.get_rank() == 1 else 1.
        return dict(losses, loss_noise=losses['loss'].detach() * number)
