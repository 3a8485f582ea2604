"""torch's SyncBatchNorm for CPU ranks, which torch itself rejects ("expected ... on GPU").

The statistics are those of the batch of all ranks. Each rank sends its mean, its sum of squared
distances and its count. All ranks merge them in the order of ranks by the formula of Chan, Golub
and LeVeque (1979), and so have the same bits on every run. The gradients are those of torch: of the
input over all ranks, of weight and bias over this rank, which DDP then averages.

mmcv's MMSyncBN does not need this: it uses mmcv's operators and ``all_reduce``.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import SyncBatchNorm

from ..mmcv.batch_norm import at_least_float32, sum_per_channel

_Merged = TypeVar('_Merged')

_STOCK = SyncBatchNorm.forward


def _merged(values: Tensor, merge: Callable[[list[Tensor]], _Merged], group: Any) -> _Merged:
    """Return ``merge`` of the values of all ranks, in the order of ranks. Do not change it."""
    shared = getattr(group, 'merged', None)  # virtual ranks merge once per process
    if shared is not None:
        merged: _Merged = shared(values, merge)
        return merged
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return merge(parts)


def _statistics(data: Tensor, memory: Tensor, group: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean (C,), biased variance (C,) and count (1,) of (N, C, S) over all ranks.

    Overwrites ``memory``, which is like ``data``.
    """
    count = data.new_full((1,), data.shape[0] * data.shape[2])
    mean = sum_per_channel(data) / count.clamp(min=1)
    distance = torch.sub(data, mean[:, None], out=memory)
    squares = sum_per_channel(distance.mul_(distance))
    return _merged(torch.cat((mean, squares, count)), _statistics_of_all, group)


def _statistics_of_all(ranks: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge mean, sum of squared distances and count, (C + C + 1,) of each rank."""
    channels = len(ranks[0]) // 2
    mean, squares, count = ranks[0].new_zeros(2 * channels + 1).split([channels, channels, 1])
    for rank_mean, rank_squares, rank_count in (
            part.split([channels, channels, 1]) for part in ranks):
        both = count + rank_count
        share = rank_count / both.clamp(min=1)
        apart = rank_mean - mean
        squares = squares + rank_squares + apart * apart * count * share
        mean = mean + apart * share
        count = both
    return mean, squares / count.clamp(min=1), count


class _Function(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None,
                running_mean: Tensor | None, running_var: Tensor | None, eps: float,
                momentum: float, group: Any) -> Tensor:
        data = at_least_float32(input.flatten(2) if input.dim() > 2 else input[..., None])
        normal = torch.empty(data.shape, dtype=data.dtype)
        mean, variance, count = _statistics(data, normal, group)
        if count <= 1:
            raise ValueError('SyncBatchNorm expected more than 1 value per channel over all ranks '
                             f'when training, got input {tuple(input.shape)} on this one')
        if running_mean is not None and running_var is not None:
            unbiased = variance * count / (count - 1)
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        scale = (variance + eps).rsqrt()
        torch.sub(data, mean[:, None], out=normal).mul_(scale[:, None])
        ctx.save_for_backward(normal, scale, weight, count)
        ctx.group = group
        # not a view, which an in-place operation such as relu_ could not change
        result = torch.empty(input.shape, dtype=input.dtype)
        flat = result.view(normal.shape)
        if weight is None or bias is None:
            flat.copy_(normal)
        elif result.dtype == normal.dtype == weight.dtype:
            torch.mul(normal, weight[:, None], out=flat).add_(bias[:, None])
        else:
            flat.copy_(normal * weight[:, None] + bias[:, None])
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        normal, scale, weight, count = ctx.saved_tensors
        gradient = at_least_float32(grad_output.reshape(normal.shape))
        product = gradient * normal
        sums = torch.cat((sum_per_channel(gradient), sum_per_channel(product)))
        channels = len(scale)
        grad_bias, grad_weight = sums.split(channels)
        grad_input = None
        if ctx.needs_input_grad[0]:
            total = sums
            if dist.get_world_size(ctx.group) > 1:
                total = _merged(sums, functools.partial(functools.reduce, torch.add), ctx.group)
            mean, mean_normal = (total / count).split(channels)
            torch.mul(normal, mean_normal[:, None], out=product)
            grad_input = (gradient - mean[:, None]).sub_(product)
            grad_input *= (scale if weight is None else scale * weight)[:, None]
            grad_input = grad_input.to(grad_output.dtype).view(grad_output.shape)
        if weight is None:
            grad_weight = grad_bias = None
        else:
            grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def forward(self: SyncBatchNorm, input: Tensor) -> Tensor:
    """Normalize (N, C, ...) with the statistics of all ranks, for training on CPU ranks.

    N may be 0 on a rank. Statistics and gradients of parameters are float32 for half precision.
    Raises ValueError if there is only one value per channel over all ranks.
    """
    if input.device.type != 'cpu' or not self.training or not dist.is_initialized():
        return _STOCK(self, input)
    self._check_input_dim(input)
    self._check_non_zero_input_channels(input)
    factor, tracked = self.momentum or 0., self.track_running_stats
    if tracked and self.num_batches_tracked is not None:
        self.num_batches_tracked.add_(1)
        if self.momentum is None:  # the average of all batches so far
            factor = 1. / int(self.num_batches_tracked)
    result: Tensor = _Function.apply(
        input, self.weight, self.bias, self.running_mean if tracked else None,
        self.running_var if tracked else None, self.eps, factor,
        self.process_group or dist.group.WORLD)
    return result


def enable_for(model: nn.Module) -> None:
    """Let ``torch.nn.SyncBatchNorm`` train on CPU ranks, if a model has such layers."""
    if any(isinstance(module, SyncBatchNorm) for module in model.modules()):
        SyncBatchNorm.forward = forward  # type: ignore[method-assign]
