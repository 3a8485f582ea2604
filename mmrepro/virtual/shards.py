"""Tensors that are divided among the virtual ranks: each keeps some of the rows."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..objects.digests import local_part


def is_sharded(value: Any) -> bool:
    """Whether a tensor is divided among ranks, or is a rank's part of a sum (``DTensor``)."""
    return hasattr(value, 'to_local')


def part_of(whole: Tensor, like: Any) -> Tensor:
    """Return the rows of a tensor that this rank keeps if it is divided as ``like`` is."""
    # as torch.chunk: all ranks but the last ones have the same number of rows
    start = -(-len(whole) // dist.get_world_size()) * dist.get_rank()
    return whole[start:start + len(local_part(like))]


def whole_tensor(value: Any) -> Tensor:
    """Return all of a divided tensor, which the ranks of a process share; others as they are.

    A collective operation. Of a sum that ranks have still to take, it is this rank's part.
    """
    if not is_sharded(value):
        return value
    part = local_part(value).detach()
    if value.placements[0].is_partial():
        return part
    padded = part.new_zeros(-(-len(value) // dist.get_world_size()), *value.shape[1:])
    padded[:len(part)] = part
    group: Any = dist.group.WORLD
    flat: Tensor = group.merged(padded, torch.cat, 'the whole of a tensor')
    return flat[:value.numel()].view(value.shape)
