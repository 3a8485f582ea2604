"""Deformable convolution, with masks (DCNv2) and without (DCNv1).

Signatures: ``mmcv/ops/deform_conv.py`` and ``modulated_deform_conv.py``; formulas:
``deform_conv_cuda_kernel.cuh`` and ``modulated_deform_conv_cuda_kernel.cuh`` (mmcv 2.1.0).

Output pixels are processed in runs: their samples are gathered as columns, (pixels, kernel *
channels), channels last, and multiplied by the weights. The columns of a whole image are never
held, so ``im2col_step`` is checked but not used.

In the backward pass a run touches a band of the input, and its gradient is added to that band, run
after run. The length of a run therefore determines the order of the sums; it is a constant per
device (:data:`COLUMNS`) and does not depend on threads or free memory. The products themselves are
those of the BLAS library, which may add in a different order for another number of threads.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import describe, require, require_dtype, require_shape, require_tensor

# Elements of the columns of a run: few enough for a CPU's cache, enough to occupy a GPU.
COLUMNS = {'cpu': 1 << 20, 'cuda': 1 << 25}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return a batched product in the dtype of its factors, even under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return torch.matmul(a, b)


class _Shape(NamedTuple):
    """Parameters of the convolution; pairs are (vertical, horizontal)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    deform_groups: int

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]


class _DeformConv:
    """One call, with its tensors in the layout of the runs.

    ``rows`` has (N * H * W + 1) * deform_groups rows of the input, channels of one group each;
    ``offsets`` is (N, pixels, taps, deform_groups, 2), y before x, ``masks`` the same without the
    last axis, or None; ``weight`` is (groups, out channels per group, taps * channels per group).
    """

    def __init__(self, name: str, input: Tensor, weight: Tensor, offset: Tensor,
                 mask: Tensor | None, *geometry: Any) -> None:
        self.shape = shape = _Shape(*geometry)
        self.input_shape = input.shape
        self.out = _check(name, shape, input, weight, offset, mask)
        self.pixels = self.out[0] * self.out[1]
        self.dtype = gather.compute_dtype(input)
        # products on CUDA keep low precision, for tensor cores; all else is in compute precision
        self.product = input.dtype if input.is_cuda else self.dtype
        n, c, h, w = input.shape
        self.rows = gather.rows_of(input).view(-1, c // shape.deform_groups)
        self.padding = n * h * w * shape.deform_groups
        self.offsets = self._by_pixel(offset, 2)
        self.masks = None if mask is None else self._by_pixel(mask, 1).squeeze(-1)
        self.weight = weight.reshape(shape.groups, -1, c // shape.groups, shape.taps).transpose(
            2, 3).reshape(shape.groups, -1, shape.taps * (c // shape.groups)).to(self.product)

    def _by_pixel(self, tensor: Tensor, parts: int) -> Tensor:
        n, channels = tensor.shape[:2]
        # if there are more pixels than outputs, mmcv reads the front of an image's memory
        front = tensor.flatten(1)[:, :channels * self.pixels]
        rows = front.view(n, channels, self.pixels).transpose(1, 2).to(self.dtype)
        rows = rows.reshape(n, self.pixels, self.shape.deform_groups, self.shape.taps, parts)
        return rows.transpose(2, 3)

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Yield the runs: image and slice of its output pixels."""
        columns = COLUMNS['cpu' if self.rows.device.type == 'cpu' else 'cuda']
        step = columns // (self.shape.taps * self.input_shape[1])
        for image in range(self.input_shape[0]):
            for part in gather.slices(self.pixels, step):
                yield image, part

    def samples(self, image: int, part: slice) -> tuple[Tensor, sampling.Corners]:
        """Return the samples of a run: rows (P * taps * deform_groups, 4), and their corners."""
        device, kernel = self.rows.device, self.shape.kernel
        height, width = self.input_shape[2:]
        pixel = torch.arange(part.start, part.stop, device=device)
        tap = torch.arange(self.shape.taps, device=device)
        at = (torch.div(pixel, self.out[1], rounding_mode='floor'), pixel % self.out[1])
        step = (torch.div(tap, kernel[1], rounding_mode='floor'), tap % kernel[1])
        corner = [a[:, None] * stride - pad + s * dilation for a, s, stride, pad, dilation in zip(
            at, step, self.shape.stride, self.shape.padding, self.shape.dilation)]
        offset = self.offsets[image, part]
        y = corner[0][:, :, None] + offset[..., 0]
        x = corner[1][:, :, None] + offset[..., 1]
        corners = sampling.padded_corners(y, x, height, width)
        group = torch.arange(self.shape.deform_groups, dtype=torch.int32, device=device)
        row = (corners.row + image * (height * width)) * self.shape.deform_groups + group[:, None]
        row = torch.where(corners.live, row, self.padding).view(-1, 4)
        return row, corners

    def weigh(self, image: int, part: slice, weight: Tensor) -> Tensor:
        """Return weights of corners, times the mask: (P * taps * deform_groups, 4)."""
        if self.masks is not None:
            weight = weight * self.masks[image, part].unsqueeze(-1)
        return weight.reshape(-1, 4)

    def columns(self, row: Tensor, weight: Tensor, pixels: int) -> Tensor:
        """Return (groups, pixels, taps * channels per group), ready for a product."""
        read = gather.gather_sum(self.rows, row, weight)
        read = read.view(pixels, self.shape.taps, self.shape.groups, -1).permute(2, 0, 1, 3)
        return read.reshape(self.shape.groups, pixels, -1).to(self.product)


def _check(name: str, shape: _Shape, input: Tensor, weight: Tensor, offset: Tensor,
           mask: Tensor | None) -> tuple[int, int]:
    """Return the size of the output, after the checks of mmcv's ``deform_conv_shape_check``."""
    require_tensor(name, 'input', input, (None,) * 4)
    n, c, h, w = input.shape
    for what in ('kernel', 'stride', 'dilation'):
        require(min(getattr(shape, what)) > 0, name,
                f'{what} must be positive, got {getattr(shape, what)}')
    require(c % shape.groups == 0 and c % shape.deform_groups == 0, name,
            f'the {c} channels of input {describe(input)} are not divisible by groups '
            f'{shape.groups} and deform_groups {shape.deform_groups}')
    require_shape(name, 'weight', weight, (None, c // shape.groups, *shape.kernel))
    require(len(weight) % shape.groups == 0, name,
            f'the {len(weight)} output channels are not divisible by groups {shape.groups}')
    height, width = ((size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
                     for size, kernel, stride, pad, dilation in zip((h, w), *shape[:4]))
    out = height, width
    fits = mask is not None or (h >= shape.kernel[0] and w >= shape.kernel[1])
    require(min(out) > 0 and fits, name,
            f'input {describe(input)} is smaller than the kernel {shape.kernel}')
    tensors = [('weight', weight), ('offset', offset)]
    if mask is None:
        require_shape(name, 'offset', offset, (n, shape.deform_groups * 2 * shape.taps, *out))
    else:
        _require_enough(name, 'offset', offset, (n, shape.deform_groups * 2 * shape.taps, *out))
        _require_enough(name, 'mask', mask, (n, shape.deform_groups * shape.taps, *out))
        tensors.append(('mask', mask))
    for what, tensor in tensors:
        require_dtype(name, what, tensor, (input.dtype,))
    return out


def _require_enough(name: str, what: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Require at least as many pixels as the output has.

    DyHead passes the offsets of a level to the next one, which has half the size. mmcv's kernel
    does not check the shape and reads what it needs from the front of each image's memory. Trained
    weights rely on that.
    """
    enough = tensor.dim() == 4 and tensor.shape[:2] == shape[:2] and (
        tensor.shape[2] * tensor.shape[3] >= shape[2] * shape[3])
    require(enough, name, f'{what} must have shape {shape}, or more pixels, got {describe(tensor)}')


def _forward(conv: _DeformConv, output: Tensor, bias: Tensor | None) -> None:
    for image, part in conv.runs():
        row, corners = conv.samples(image, part)
        columns = conv.columns(row, conv.weigh(image, part, corners.weight), part.stop - part.start)
        result = _product(conv.weight, columns.transpose(1, 2)).flatten(0, 1)
        if bias is not None:
            result = result + bias[:, None].to(result.dtype)
        output[image].view(len(result), conv.pixels)[:, part] = result.to(output.dtype)


def _backward(conv: _DeformConv, grad_output: Tensor, grad_input: Tensor | None,
              grad_offset: Tensor | None, grad_mask: Tensor | None,
              grad_weight: Tensor | None, scale: float = 1.) -> None:
    """Compute the gradients whose tensors are not None, in one pass over the runs."""
    groups, taps = conv.shape.groups, conv.shape.taps
    total = torch.zeros_like(conv.rows[:0 if grad_input is None else conv.padding])
    by_weight = torch.zeros_like(conv.weight, dtype=conv.dtype)
    by_offset = torch.zeros_like(conv.offsets[:0] if grad_offset is None else conv.offsets)
    by_mask = None if conv.masks is None or grad_mask is None else torch.zeros_like(conv.masks)
    for image, part in conv.runs():
        row, corners = conv.samples(image, part)
        weight = conv.weigh(image, part, corners.weight)
        # (groups, out channels per group, P)
        grad = grad_output[image].reshape(groups, -1, conv.pixels)[:, :, part].to(conv.product)
        if grad_weight is not None:
            columns = conv.columns(row, weight, part.stop - part.start)
            by_weight += _product(grad, columns).to(conv.dtype)
        if grad_input is None:
            continue
        # gradient of the columns as rows, (P * taps * deform_groups, D)
        by_column = _product(grad.transpose(1, 2), conv.weight).to(conv.dtype)
        by_column = by_column.view(groups, grad.shape[2], taps, -1).permute(1, 2, 0, 3)
        by_column = by_column.reshape(-1, conv.rows.shape[1])
        gather.scatter_sum_onto(total, by_column, row, weight)
        dot = gather.dots(by_column, conv.rows, row).view(corners.weight.shape)
        if by_mask is not None and conv.masks is not None:
            by_mask[image, part] = (corners.weight * dot).sum(-1)
            dot = dot * conv.masks[image, part].unsqueeze(-1)
        by_offset[image, part] = torch.stack(
            ((corners.dy * dot).sum(-1), (corners.dx * dot).sum(-1)), -1)
    if grad_weight is not None:
        by_weight = by_weight.view(groups, by_weight.shape[1], taps, -1).transpose(2, 3)
        grad_weight += (by_weight.reshape(grad_weight.shape) * scale).to(grad_weight.dtype)
    if grad_input is not None:
        gather.add_rows(grad_input, total.view(-1, conv.input_shape[1]))
    if grad_offset is not None:
        _write_by_channel(by_offset, grad_offset)
    if by_mask is not None and grad_mask is not None:
        _write_by_channel(by_mask.unsqueeze(-1), grad_mask)


def _write_by_channel(rows: Tensor, target: Tensor) -> None:
    """Write (N, pixels, taps, deform_groups, parts) in the layout of offsets and masks."""
    n, pixels = rows.shape[:2]
    channels, height, width = target.shape[1:]
    rows = rows.transpose(2, 3).reshape(n, pixels, channels).transpose(1, 2)
    if pixels < height * width:  # see _require_enough
        whole = rows.new_zeros(n, channels * height * width)
        whole[:, :channels * pixels] = rows.reshape(n, channels * pixels)
        rows = whole
    target.copy_(rows.reshape(target.shape))


def deform_conv_forward(input: Tensor, weight: Tensor, offset: Tensor, output: Tensor,
                        columns: Tensor, ones: Tensor, kW: int, kH: int, dW: int, dH: int,
                        padW: int, padH: int, dilationW: int, dilationH: int, group: int,
                        deformable_group: int, im2col_step: int) -> None:
    """Convolve (N, C, H, W) at shifted positions: fill ``output`` (N, C_out, H_out, W_out).

    ``weight`` is (C_out, C / group, kH, kW), ``offset`` (N, deformable_group * 2 * kH * kW, H_out,
    W_out), y before x for every tap; dW and dH are strides, and ``im2col_step`` must divide the
    batch. ``columns`` and ``ones`` are buffers of mmcv's kernels, not used.
    """
    conv = _without_mask(input, weight, offset, im2col_step, (kH, kW), (dH, dW), (padH, padW),
                         (dilationH, dilationW), group, deformable_group)
    _forward(conv, output, None)


def deform_conv_backward_input(input: Tensor, offset: Tensor, gradOutput: Tensor,
                               gradInput: Tensor, gradOffset: Tensor, weight: Tensor,
                               columns: Tensor, kW: int, kH: int, dW: int, dH: int, padW: int,
                               padH: int, dilationW: int, dilationH: int, group: int,
                               deformable_group: int, im2col_step: int) -> None:
    """Add the gradient of the input to ``gradInput`` and write that of the offsets."""
    conv = _without_mask(input, weight, offset, im2col_step, (kH, kW), (dH, dW), (padH, padW),
                         (dilationH, dilationW), group, deformable_group)
    require_shape('deform_conv', 'gradOutput', gradOutput, (len(input), len(weight), *conv.out))
    _backward(conv, gradOutput, gradInput, gradOffset, None, None)


def deform_conv_backward_parameters(input: Tensor, offset: Tensor, gradOutput: Tensor,
                                    gradWeight: Tensor, columns: Tensor, ones: Tensor, kW: int,
                                    kH: int, dW: int, dH: int, padW: int, padH: int, dilationW: int,
                                    dilationH: int, group: int, deformable_group: int, scale: float,
                                    im2col_step: int) -> None:
    """Add ``scale`` times the gradient of the weights to ``gradWeight``."""
    conv = _without_mask(input, gradWeight, offset, im2col_step, (kH, kW), (dH, dW), (padH, padW),
                         (dilationH, dilationW), group, deformable_group)
    require_shape('deform_conv', 'gradOutput', gradOutput, (len(input), len(gradWeight), *conv.out))
    _backward(conv, gradOutput, None, None, None, gradWeight, scale)


def _without_mask(input: Tensor, weight: Tensor, offset: Tensor, im2col_step: int,
                  *geometry: Any) -> _DeformConv:
    require(im2col_step > 0 and len(input) % im2col_step == 0, 'deform_conv',
            f'batch {len(input)} is not divisible by im2col_step {im2col_step}')
    return _DeformConv('deform_conv', input, weight, offset, None, *geometry)


def modulated_deform_conv_forward(input: Tensor, weight: Tensor, bias: Tensor, ones: Tensor,
                                  offset: Tensor, mask: Tensor, output: Tensor, columns: Tensor,
                                  kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
                                  pad_h: int, pad_w: int, dilation_h: int, dilation_w: int,
                                  group: int, deformable_group: int, with_bias: bool) -> None:
    """Compute :func:`deform_conv_forward` with masked samples, and a bias (C_out,) or none.

    ``mask`` is (N, deformable_group * kernel_h * kernel_w, H_out, W_out).
    """
    conv = _DeformConv('modulated_deform_conv', input, weight, offset, mask, (kernel_h, kernel_w),
                       (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group,
                       deformable_group)
    _forward(conv, output, bias if with_bias else None)


def modulated_deform_conv_backward(input: Tensor, weight: Tensor, bias: Tensor, ones: Tensor,
                                   offset: Tensor, mask: Tensor, columns: Tensor,
                                   grad_input: Tensor, grad_weight: Tensor, grad_bias: Tensor,
                                   grad_offset: Tensor, grad_mask: Tensor, grad_output: Tensor,
                                   kernel_h: int, kernel_w: int, stride_h: int, stride_w: int,
                                   pad_h: int, pad_w: int, dilation_h: int, dilation_w: int,
                                   group: int, deformable_group: int, with_bias: bool) -> None:
    """Add the gradients of input, weight and bias; write those of offset and mask."""
    conv = _DeformConv('modulated_deform_conv', input, weight, offset, mask, (kernel_h, kernel_w),
                       (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w), group,
                       deformable_group)
    require_shape('modulated_deform_conv', 'grad_output', grad_output,
                  (len(input), len(weight), *conv.out))
    _backward(conv, grad_output, grad_input, grad_offset, grad_mask, grad_weight)
    if with_bias:
        grad_bias += grad_output.sum((0, 2, 3), dtype=conv.dtype).to(grad_bias.dtype)
