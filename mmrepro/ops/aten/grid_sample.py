"""Backward of bilinear ``grid_sample``, which torch's CUDA kernel computes with atomics.

A sample reads four pixels, as those of deformable operators (:func:`.sampling.padded_corners`).
:mod:`mmrepro.ops.gather` sums the taps: sorted by destination for the gradient of the map, as dot
products with the map for the gradient of the grid. Images do not share pixels, so processing them
in groups bounds the memory and does not affect the bits.

Source of the formulas: ``aten/src/ATen/native/GridSampler.h`` (positions, padding and slopes).
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import gather, sampling
from .dispatch import refuse

# Codes of aten's GridSamplerInterpolation and GridSamplerPadding.
_BILINEAR = 0
_ZEROS, _BORDER = 0, 1


def _pixels(grid: Tensor, size: int, align: bool, padding: int) -> tuple[Tensor, Tensor | float]:
    """Return positions in pixels of grid values in [-1, 1], and their derivative by the grid."""
    at = (grid + 1) / 2 * (size - 1) if align else ((grid + 1) * size - 1) / 2
    slope = (size - 1) / 2 if align else size / 2
    if padding == _ZEROS:
        return at, slope
    inside = (at > 0) & (at < size - 1)
    return at.nan_to_num(0, size - 1, 0).clamp(0, size - 1), inside * slope


def grid_sample_backward(grad: Tensor, input: Tensor, grid: Tensor, mode: int, padding: int,
                         align_corners: bool, output_mask: Sequence[bool] = (True, True)
                         ) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``aten::grid_sampler_2d_backward`` of mode 'bilinear', padding 'zeros' or 'border'.

    Args:
        grad: (N, C, H', W'). input: (N, C, H, W). grid: (N, H', W', 2), x first.
        mode, padding: aten's codes; others are refused.
        output_mask: which gradients to compute, of input and grid; the others are None.
    """
    if mode != _BILINEAR or padding not in (_ZEROS, _BORDER):
        refuse("grid_sampler_2d_backward of a mode but 'bilinear', or padding_mode='reflection'")
    dtype = gather.compute_dtype(input)
    grad_input, grad_grid = (
        torch.zeros_like(like, memory_format=torch.contiguous_format, dtype=dtype) if wanted
        else None for like, wanted in zip((input, grid), output_mask))
    samples = grad.shape[2:].numel()
    if input.numel() and samples:
        for low, high in gather.chunk_by_cost([samples * 4] * len(input),
                                              gather.chunk_taps(input.device)):
            part = slice(low, high)
            _images(grad[part], input[part], grid[part].to(dtype), padding, align_corners,
                    None if grad_input is None else grad_input[part],
                    None if grad_grid is None else grad_grid[part])
    return (None if grad_input is None else grad_input.to(input.dtype),
            None if grad_grid is None else grad_grid.to(grid.dtype))


def _images(grad: Tensor, input: Tensor, grid: Tensor, padding: int, align: bool,
            grad_input: Tensor | None, grad_grid: Tensor | None) -> None:
    """Add the gradients of some images to ``grad_input`` and write ``grad_grid``."""
    images, channels, height, width = input.shape
    x, y = grid.reshape(images, -1, 2).unbind(-1)
    (x, slope_x), (y, slope_y) = (_pixels(at, size, align, padding)
                                  for at, size in ((x, width), (y, height)))
    corners = sampling.padded_corners(y, x, height, width)
    pixels = images * height * width
    first = torch.arange(images, device=grid.device)[:, None, None] * (height * width)
    # samples outside have the padding index
    row = torch.where(corners.live, corners.row + first, pixels).view(-1, 4)
    row = row.to(torch.int32 if pixels < 2 ** 31 - 1 else torch.int64)
    source = gather.bags(grad.reshape(images, channels, -1)).contiguous()
    if grad_input is not None:
        gather.add_rows(grad_input, gather.scatter_sum(source, row, corners.weight.view(-1, 4),
                                                       pixels))
    if grad_grid is not None:
        reads = gather.dots(source, gather.rows_of(input), row).view(corners.dx.shape)
        for axis, (derivative, slope) in enumerate(((corners.dx, slope_x), (corners.dy, slope_y))):
            out = (reads * derivative).sum(-1) * slope
            grad_grid[..., axis] = out.view(grad_grid.shape[:-1])


def cudnn_grid_sample_backward(input: Tensor, grid: Tensor, grad: Tensor
                               ) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``aten::cudnn_grid_sampler_backward``: bilinear, zeros outside, corners aligned."""
    return grid_sample_backward(grad, input, grid, _BILINEAR, _ZEROS, True)
