"""What trainings use, on virtual ranks: the same bits for every number of processes."""
from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from rank_pool import shared_pool
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_processes import same_for_every_number

from mmrepro.digests import state_digest
from mmrepro.distributed.virtual.gradients import VirtualDataParallel
from mmrepro.ops.aten import sync_bn

pytestmark = pytest.mark.filterwarnings('ignore')


@pytest.fixture(scope='module')
def pool():
    return shared_pool()


class TwiceUsed(nn.Module):
    """Uses its weight before and after a collective operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        hidden = x @ self.weight
        dist.all_reduce(torch.ones(1))
        return (hidden @ self.weight).float().square().mean()


def scaled(dtype):
    """Autocast and loss scaling; in step 1 the gradients of rank 1 overflow."""
    model = VirtualDataParallel(TwiceUsed(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler('cpu', init_scale=256., growth_interval=2)
    torch.manual_seed(dist.get_rank())
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast('cpu', dtype):
            loss = model(torch.randn(4, 16))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float('inf')
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), norm.item().hex()))
    return scales, state_digest(model.state_dict())


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_loss_scaling_and_clipping(pool, dtype):
    found = same_for_every_number(pool, functools.partial(scaled, dtype), 3, (1, 2, 3))
    # all ranks leave out the step in which one of them overflowed
    assert found == found[:1] * 3
    assert [scale for scale, _ in found[0][0]] == [256., 128., 128., 256.]


class Recomputed(nn.Module):
    """Its first part, with a collective operation and dropout, runs again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.Dropout(0.3))
        self.second, self.reentrant = nn.Conv2d(4, 1, 3), reentrant

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.second(hidden).square().mean()


def recomputed(reentrant):
    torch.manual_seed(0)
    model = VirtualDataParallel(Recomputed(reentrant), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    losses = []
    with sync_bn.enabled():
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(model(torch.randn(2, 3, 8, 8, requires_grad=True)))
            losses[-1].backward()
            optimizer.step()
    return state_digest(losses), state_digest(model.state_dict()), torch.rand(1).item()


@pytest.mark.parametrize('reentrant', [True, False])
def test_activation_checkpointing(pool, reentrant):
    found = same_for_every_number(pool, functools.partial(recomputed, reentrant), 3)
    assert len({weights for _, weights, _ in found}) == 1
    assert len({losses for losses, _, _ in found}) == 3
