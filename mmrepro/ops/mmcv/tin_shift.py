"""Temporal interlacing: groups of channels move along the time axis.

Semantics of mmcv 2.1.0 (csrc/common/cuda/tin_shift_cuda_kernel.cuh), which has it for CUDA only.
mmcv's backward moves the gradient in the direction of the forward. The transpose would move it
back; a network trained with mmcv has learned with mmcv's gradient, so it is kept.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_shape, require_tensor


def _shift(operator: str, source: Tensor, shift: Tensor, target: Tensor) -> None:
    require_tensor(operator, 'input', source, (None, None, None, None))
    batch, frames, channels, _ = source.shape
    require_tensor(operator, 'shift', shift, (batch, None), (torch.int32, ))
    groups = shift.shape[1]
    require(groups > 0 and channels % groups == 0, operator,
            f'the channels must be a multiple of the groups of shift: {describe(source)}, '
            f'{describe(shift)}')
    require_shape(operator, 'output', target, tuple(source.shape))
    require(source.dtype == target.dtype, operator,
            f'dtypes do not match: {describe(source)}, {describe(target)}')
    if source.numel() == 0:
        return
    # the frame that each frame of the target comes from
    origin = torch.arange(frames, device=source.device)[None, :, None] - shift[:, None, :]
    origin = origin.repeat_interleave(channels // groups, 2, output_size=channels)[..., None]
    inside = (origin >= 0) & (origin < frames)
    found = source.detach().gather(1, origin.clamp(0, frames - 1).expand(source.shape))
    target.copy_(torch.where(inside, found, target))


def tin_shift_forward(input: Tensor, shift: Tensor, output: Tensor) -> None:
    """Write ``output[n, t + shift[n, group], c] = input[n, t, c]``; other frames are not changed.

    ``input`` and ``output`` are (N, T, C, H * W), ``shift`` (N, groups) int32; channels are divided
    evenly into groups.
    """
    _shift('tin_shift_forward', input, shift, output)


def tin_shift_backward(grad_output: Tensor, shift: Tensor, grad_input: Tensor) -> None:
    """As :func:`tin_shift_forward`, applied to the gradient, as mmcv does."""
    _shift('tin_shift_backward', grad_output, shift, grad_input)
