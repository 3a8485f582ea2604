"""What virtual ranks keep apart matters: without it, the bits depend on the processes."""
from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_pool import shared_pool
from torch import nn
from virtual_faults import FAULTS
from virtual_processes import results_of

from mmrepro.digests import state_digest
from mmrepro.distributed.virtual.gradients import VirtualDataParallel

pytestmark = pytest.mark.filterwarnings('ignore')

RANKS = 4


class Net(nn.Module):
    """Ranks meet in its forward pass; afterwards it draws numbers and uses its weight again."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x):
        hidden = self.norm(x) @ self.weight
        dist.all_reduce(torch.ones(1))
        hidden = hidden * (1 + random.random() + np.random.rand() + torch.rand(1))
        return (hidden @ self.weight).float().square().mean()


def steps():
    """Digests of this rank, by what they are of."""
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    model = VirtualDataParallel(Net(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast('cpu', torch.bfloat16):
            losses.append(model(torch.randn(8, 32)))
        losses[-1].backward()
        optimizer.step()
    return {name: state_digest(value) for name, value in dict(
        losses=losses, weights=dict(model.named_parameters()),
        buffers=dict(model.named_buffers())).items()}


def part(rank, world, fault):
    with FAULTS[fault]() if fault else nullcontext():
        return results_of(rank, world, steps, RANKS)


def differing(fault):
    """What differs between one process and two, on any rank."""
    found = []
    for processes in (1, 2):
        merged = {}
        for own in shared_pool().run(part, processes, fault):
            merged.update(own)
        found.append(merged)
    return {name for rank in range(RANKS) for name in found[0][rank]
            if found[0][rank][name] != found[1][rank][name]}


def test_without_a_fault_nothing_differs():
    assert differing(None) == set()


@pytest.mark.parametrize('fault', FAULTS)
def test_a_fault_is_seen(fault):
    expected = 'buffers' if fault == 'shared buffers' else 'weights'
    assert expected in differing(fault)
