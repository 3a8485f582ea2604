"""CARAFE: upsampling with a separate kernel for every output pixel.

Signatures: ``mmcv/ops/carafe.py``; formulas: ``carafe_cuda_kernel.cuh`` (mmcv 2.1.0). Each output
pixel and group of channels is a bag of ``kernel_size ** 2`` taps around its source pixel, weighted
by the mask; the map is padded with zeros.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather
from ..contract import require, require_dtype, require_shape, require_tensor


class _Shape(NamedTuple):
    """Sizes of the features, and the kernel."""

    images: int
    channels: int
    height: int
    width: int
    kernel: int
    groups: int
    scale: int


def _check(features: Tensor, masks: Tensor, kernel: int, groups: int, scale: int) -> _Shape:
    name = 'carafe'
    require_tensor(name, 'features', features, (None,) * 4)
    n, c, h, w = features.shape
    require(kernel > 0 and kernel % 2 == 1, name, f'kernel_size must be odd, got {kernel}')
    require(scale > 0, name, f'scale_factor must be positive, got {scale}')
    require(groups > 0 and c % groups == 0, name,
            f'{c} channels are not divisible by group_size {groups}')
    require_shape(name, 'masks', masks, (n, kernel * kernel * groups, h * scale, w * scale))
    require_dtype(name, 'masks', masks, (features.dtype,))
    return _Shape(n, c, h, w, kernel, groups, scale)


def _runs(shape: _Shape, *owned: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield image, and first and past-the-last row of source pixels, to process together."""
    bags = shape.width * shape.scale ** 2 * shape.groups
    # a bag takes memory for its channels besides its taps
    taps = bags * (shape.kernel ** 2 + shape.channels // shape.groups * 4 // gather.TAP_BYTES)
    for image in range(shape.images):
        for rows in gather.slices(shape.height, gather.tap_budget(*owned) // max(1, taps)):
            yield image, rows.start, rows.stop


def _index(shape: _Shape, image: int, a: int, b: int, device: torch.device) -> Tensor:
    """Return rows (bags, kernel ** 2); a bag is an output row, an output column and a group."""
    def reach(first: int, last: int, size: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first * shape.scale, last * shape.scale, device=device)
        around = torch.arange(shape.kernel, device=device) - (shape.kernel - 1) // 2
        at = torch.div(at, shape.scale, rounding_mode='floor')[:, None] + around
        return at, (at >= 0) & (at < size)

    (y, y_in), (x, x_in) = reach(a, b, shape.height), reach(0, shape.width, shape.width)
    # (rows, columns, groups, kernel rows, kernel columns)
    pixel = (image * shape.height + y)[:, None, None, :, None] * shape.width + x[:, None, None, :]
    inside = y_in[:, None, None, :, None] & x_in[:, None, None, :]
    group = torch.arange(shape.groups, device=device)[:, None, None]
    padding = shape.images * shape.height * shape.width * shape.groups
    row = torch.where(inside, pixel * shape.groups + group, padding)
    return row.view(-1, shape.kernel ** 2).to(torch.int32)


def _weights(shape: _Shape, masks: Tensor, image: int, a: int, b: int) -> Tensor:
    """Return masks in the order of :func:`_index`."""
    part = masks[image, :, a * shape.scale:b * shape.scale].to(gather.COMPUTE[masks.dtype])
    return part.flatten(1).t().reshape(-1, shape.kernel ** 2)


def carafe_forward(features: Tensor, masks: Tensor, rfeatures: Tensor, routput: Tensor,
                   rmasks: Tensor, output: Tensor, kernel_size: int, group_size: int,
                   scale_factor: int) -> None:
    """Fill ``output`` (N, C, H * scale_factor, W * scale_factor) from ``features`` (N, C, H, W).

    ``masks`` is (N, kernel_size ** 2 * group_size, H * scale_factor, W * scale_factor).
    ``rfeatures`` receives the features with channels last, for :func:`carafe_backward`; ``routput``
    and ``rmasks`` are buffers of mmcv's kernels, not used.
    """
    shape = _check(features, masks, kernel_size, group_size, scale_factor)
    rows = gather.rows_of(features)
    rfeatures.resize_((shape.images, shape.height, shape.width, shape.channels))
    rfeatures.copy_(rows[:-1].view(rfeatures.shape))
    if output.numel() == 0:
        return
    rows = rows.view(-1, shape.channels // shape.groups)
    for image, a, b in _runs(shape, rows, masks, output):
        index = _index(shape, image, a, b, rows.device)
        result = gather.gather_sum(rows, index, _weights(shape, masks, image, a, b))
        # rows of an image are contiguous, so this is a view
        part = output[image, :, a * shape.scale:b * shape.scale].flatten(1)
        part.copy_(result.view(-1, shape.channels).t())


def carafe_backward(top_grad: Tensor, rfeatures: Tensor, masks: Tensor, rtop_grad: Tensor,
                    rbottom_grad_hs: Tensor, rbottom_grad: Tensor, rmask_grad: Tensor,
                    bottom_grad: Tensor, mask_grad: Tensor, kernel_size: int, group_size: int,
                    scale_factor: int) -> None:
    """Write the gradients of :func:`carafe_forward` to ``bottom_grad`` and ``mask_grad``.

    ``rfeatures`` comes from the forward; the other tensors whose names begin with r are buffers of
    mmcv's kernels, not used.
    """
    shape = _check(bottom_grad, masks, kernel_size, group_size, scale_factor)
    require_shape('carafe', 'rfeatures', rfeatures,
                  (shape.images, shape.height, shape.width, shape.channels))
    bottom_grad.zero_()
    if top_grad.numel() == 0:
        mask_grad.zero_()
        return
    rows = gather.rows_of(rfeatures.permute(0, 3, 1, 2))
    rows = rows.view(-1, shape.channels // shape.groups)
    total = torch.zeros_like(rows[:shape.images * shape.height * shape.width * shape.groups])
    for image, a, b in _runs(shape, rows, masks, top_grad):
        index = _index(shape, image, a, b, rows.device)
        part = slice(a * shape.scale, b * shape.scale)
        grad = top_grad[image, :, part].to(rows.dtype).flatten(1).t().reshape(-1, rows.shape[1])
        gather.scatter_sum_onto(total, grad, index, _weights(shape, masks, image, a, b))
        by_mask = gather.dots(grad, rows, index).view(-1, masks.shape[1]).t()
        mask_grad[image, :, part] = by_mask.reshape(mask_grad[image, :, part].shape).to(
            mask_grad.dtype)
    gather.add_rows(bottom_grad, total.view(-1, shape.channels))
