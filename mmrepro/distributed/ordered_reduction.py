"""Gradients summed in the order of the ranks, whatever DistributedDataParallel's buckets are.

An all-reduce may add up an element in an order that depends on its offset in the buffer. DDP
rebuilds its buckets after the first backward pass, so a resumed run adds up its first step in a
different order than an uninterrupted run, and with three or more ranks that changes bits. (Two
terms give the same sum in either order.) Here every element is

    (((g[0] / n) + (g[1] / n)) + (g[2] / n)) + ...      n ranks, g[r] the gradient of rank r

with each operation rounded to the type of the gradient, so no layout can matter. The factor 1/n is
multiplied in before the sum, as DDP does; hence with two ranks the bits are those of plain DDP.

Each rank sums one n-th of the bucket: an all-to-all brings the pieces, an all-gather spreads the
sums. That is the traffic of a ring all-reduce; the extra memory is one bucket. The communication
does not overlap with the backward pass.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ORDER_MATTERS_FROM = 3  # ranks; a sum of two is the same in either order

# torch 2.13 gives it another name and warns of the old one
all_gather_single = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor


def ordered_mean(flat: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean of ``flat`` over the ranks, added up in the order of the ranks.

    Args:
        flat: One-dimensional, contiguous, of the same length on every rank. Overwritten.
        group: The process group; None: the default one.

    Returns:
        Tensor: ``flat``, with the same bits on every rank. They do not depend on the offset of an
        element.
    """
    world = dist.get_world_size(group)
    flat.mul_(1.0 / world)
    size = flat.numel() // world
    main, rest = flat[:size * world], flat[size * world:]
    if size:
        pieces = torch.empty_like(main)
        dist.all_to_all_single(pieces, main, group=group)
        all_gather_single(main, _sum_rows(pieces, size), group=group)
    if rest.numel():  # fewer elements than ranks
        pieces = rest.new_empty(world * rest.numel())
        all_gather_single(pieces, rest, group=group)
        rest.copy_(_sum_rows(pieces, rest.numel()))
    return flat


def _sum_rows(pieces: Tensor, size: int) -> Tensor:
    """Sum the pieces of ``size`` elements, from the first to the last, in the first."""
    first, *others = pieces.split(size)
    for piece in others:
        first += piece
    return first


# Without annotations: DDP compares them with its own types, and here they would be strings.
def ordered_mean_hook(group, bucket):
    """Take :func:`ordered_mean` of a bucket, as a communication hook of DistributedDataParallel.

    The hook blocks: collectives that are started from callbacks would be queued in an order that
    differs between ranks.
    """
    flat = bucket.buffer()
    devices = [] if flat.device.type == 'cpu' else [flat.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(ordered_mean(flat, group))
    return future


def fix_gradient_order(model: nn.Module) -> list[DistributedDataParallel]:
    """Register :func:`ordered_mean_hook` with every DistributedDataParallel in ``model``.

    Nothing is registered with fewer ranks than :data:`ORDER_MATTERS_FROM`.

    Returns:
        list: the wrappers that have the hook now.

    Raises:
        RuntimeError: a wrapper has a communication hook already.
    """
    # MMSeparateDistributedDataParallel has no reducer; the wrappers inside of it do
    wrappers = [module for module in model.modules()
                if isinstance(module, DistributedDataParallel) and hasattr(module, 'reducer')
                and dist.get_world_size(module.process_group) >= ORDER_MATTERS_FROM]
    for wrapper in wrappers:
        wrapper.register_comm_hook(wrapper.process_group, ordered_mean_hook)
    return wrappers
