"""Trainings of the tiny network, or a set-up of dev/user_setups, whose steps are repeated."""
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

from dev.user_setups import steps  # noqa: F401  registers set-ups
from dev.user_setups.setup import SETUPS
from mmrepro.errors import StepDiffersError

__all__ = ['RankDiffers', 'bits', 'config', 'finish', 'registered', 'stopped']


def config(work_dir, model='Tiny', checks=1000, **changes):
    cfg = tiny.tiny(work_dir)
    if model in SETUPS:
        SETUPS[model].change(cfg)
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
