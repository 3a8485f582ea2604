"""Virtual ranks of one process that share weights have the bits of ranks that do not."""
from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from demo_runs import changed, small
from detector_runs import shallow
from faults import tiny as tiny_run
from harness import Child
from mmengine.hooks import Hook
from virtual_runs import run

from mmrepro import on_virtual_ranks

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    """Momentum, statistics of batch norm that differ between ranks, and validation."""
    cfg = tiny_run.tiny(tmp_path_factory.mktemp('tiny'))
    tiny_run.validating(cfg)
    cfg.train_cfg.val_interval = 1
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=1, by_epoch=False)
    cfg.custom_hooks = []
    return cfg


def averages(cfg):
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1, update_buffers=True)]


def averages_of_parameters(cfg):
    cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1, begin_iter=1)]


def clipping(cfg):
    cfg.optim_wrapper.update(accumulative_counts=2, clip_grad=dict(max_norm=0.1))


def adam(cfg):
    cfg.optim_wrapper.optimizer = dict(type='AdamW', lr=1e-3)


def seldom(cfg):
    """Autocast and loss scaling need a GPU in MMEngine; a schedule does not."""
    cfg.param_scheduler = [dict(type='MultiStepLR', by_epoch=False, milestones=[2])]


CHANGES = [averages, averages_of_parameters, clipping, adam, seldom]


def shared(change, memory='shared'):
    def both(cfg):
        change(cfg)
        cfg.randomness['virtual_ranks_memory'] = memory
    return both


@pytest.mark.parametrize('change', CHANGES)
def test_shared_weights_have_the_bits_of_separate_ones(cfg, change, tmp_path):
    mine = changed(cfg, shared(change))
    expected = run(changed(cfg, shared(change, 'separate')), 3, 1, tmp_path / '1')
    assert any('metrics' in line for line in expected[0])
    assert run(mine, 3, 1, tmp_path / '2') == expected
    # two ranks share, one has its own
    assert run(mine, 3, 2, tmp_path / '3') == expected
    found = run(mine, 3, 1, tmp_path / '4', resume=tmp_path / '3' / 'iter_1.pth')
    assert found == [lines[1:] for lines in expected]
