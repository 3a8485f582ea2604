"""Synchronized batch normalization (MMSyncBN): the computations between the collectives.

Formulas of mmcv 2.1.0 (csrc/common/cuda/sync_bn_cuda_kernel.cuh), which implements them for CUDA
only. Statistics and gradients of parameters are float32 (float64 for float64 inputs). Each is a
torch reduction, within rows and then over the batch, which does not depend on the thread count.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_tensor


def _check(operator: str, data: Tensor, **per_channel: Tensor) -> None:
    require_tensor(operator, 'input', data, (None, None, None))
    for name, tensor in per_channel.items():
        require(tensor.shape == data.shape[1:2], operator,
                f'{name} must have one value per channel of {describe(data)}, '
                f'got {describe(tensor)}')


def _check_same(operator: str, like: str, data: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require(tensor.shape == data.shape, operator,
                f'{name} {describe(tensor)} does not match {like} {describe(data)}')


def at_least_float32(data: Tensor) -> Tensor:
    return data if data.dtype == torch.float64 else data.float()


def sum_per_channel(data: Tensor) -> Tensor:
    """Sum over batch and space, (N, C, S) to (C,), the same for any number of threads.

    torch reduces a row in one thread, unless it is the only row; it is then summed as two.
    """
    single = data.shape[0] * data.shape[1] == 1
    rows = data.expand(2, -1, -1).sum(2)[:1] if single else data.sum(2)
    return rows.sum(0)


def sync_bn_forward_mean(input: Tensor, mean: Tensor) -> None:
    """Write the mean over batch and space of (N, C, S) to ``mean`` (C,)."""
    _check('sync_bn_forward_mean', input, mean=mean)
    mean.copy_(sum_per_channel(at_least_float32(input)) / (input.shape[0] * input.shape[2]))


def sync_bn_forward_var(input: Tensor, mean: Tensor, var: Tensor) -> None:
    """Write the mean squared distance of (N, C, S) from ``mean`` (C,) to ``var`` (C,)."""
    _check('sync_bn_forward_var', input, mean=mean, var=var)
    distance = at_least_float32(input) - mean[:, None]
    var.copy_(sum_per_channel(distance.mul_(distance)) / (input.shape[0] * input.shape[2]))


def sync_bn_forward_output(input: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor,
                           running_mean: Tensor, running_var: Tensor, norm: Tensor, std: Tensor,
                           output: Tensor, eps: float, momentum: float | Tensor,
                           group_size: int) -> None:
    """Normalize, scale and shift (N, C, S) into ``output``; update the running statistics.

    Args:
        mean, var: (C,), of all ranks. weight, bias: (C,), or empty.
        running_mean, running_var: (C,), updated in place; or empty.
        norm: (N, C, S), receives the normalized input; or empty.
        std: (C,), receives ``sqrt(var + eps)``; or empty.
        momentum: weight of the new statistics; a number or a tensor of one element.
        group_size: ranks; the running variance is unbiased by ``N * S * group_size``.
    """
    operator = 'sync_bn_forward_output'
    given = {name: tensor for name, tensor in (
        ('weight', weight), ('bias', bias), ('running_mean', running_mean),
        ('running_var', running_var), ('std', std)) if tensor.numel()}
    _check(operator, input, mean=mean, var=var, **given)
    same = dict(norm=norm, output=output) if norm.numel() else dict(output=output)
    _check_same(operator, 'input', input, **same)
    deviation = (var + eps).sqrt()
    data = at_least_float32(input)
    # use the result's buffer if it has the right dtype: every pass over the data costs
    own = norm if norm.numel() and norm.dtype == data.dtype else None
    result = torch.sub(data, mean[:, None], out=own).div_(deviation[:, None])
    if norm.numel() and own is None:
        norm.copy_(result)
    if not weight.numel():
        output.copy_(result)
    elif output.dtype == data.dtype:
        torch.addcmul(bias[:, None], result, weight[:, None], out=output)
    else:
        output.copy_(torch.addcmul(bias[:, None], result, weight[:, None]))
    if std.numel():
        std.copy_(deviation)
    if running_mean.numel():
        count = input.shape[0] * input.shape[2] * group_size
        unbiased = var * count / (count - 1) if count > 1 else var
        running_mean.copy_(momentum * mean + (1 - momentum) * running_mean)
        running_var.copy_(momentum * unbiased + (1 - momentum) * running_var)


def sync_bn_backward_param(grad_output: Tensor, norm: Tensor, grad_weight: Tensor,
                           grad_bias: Tensor) -> None:
    """Write the gradients of weight and bias (C,), from (N, C, S) and the normalized input."""
    operator = 'sync_bn_backward_param'
    _check(operator, grad_output, grad_weight=grad_weight, grad_bias=grad_bias)
    _check_same(operator, 'grad_output', grad_output, norm=norm)
    gradient = at_least_float32(grad_output)
    grad_weight.copy_(sum_per_channel(gradient * norm))
    grad_bias.copy_(sum_per_channel(gradient))


def sync_bn_backward_data(grad_output: Tensor, weight: Tensor, grad_weight: Tensor,
                          grad_bias: Tensor, norm: Tensor, std: Tensor, grad_input: Tensor) -> None:
    """Write the gradient of the input (N, C, S), given those of the parameters over all ranks."""
    operator = 'sync_bn_backward_data'
    _check(operator, grad_output, weight=weight, grad_weight=grad_weight, grad_bias=grad_bias,
           std=std)
    _check_same(operator, 'grad_output', grad_output, norm=norm, grad_input=grad_input)
    count = grad_output.shape[0] * grad_output.shape[2]
    # (gradient - (grad_weight * norm + grad_bias) / count) * weight / std, in two passes
    scale = weight / std
    result = torch.mul(norm, (grad_weight * scale / -count)[:, None])
    result.add_((grad_bias * scale / -count)[:, None])
    grad_input.copy_(result.addcmul_(at_least_float32(grad_output), scale[:, None]))
