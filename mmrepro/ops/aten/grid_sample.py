"""Backward of ``grid_sample``, which torch's CUDA kernel computes with atomics.

A sample is a product of one small filter per axis: 1 tap (nearest), 2 (bilinear) or 4 (bicubic).
:mod:`mmrepro.ops.gather` sums the taps: sorted by destination for the gradient of the map, as dot
products with the map for the gradient of the grid. Images do not share pixels, so processing them
in groups bounds the memory and does not affect the bits.

Source of the formulas: ``aten/src/ATen/native/GridSampler.h`` (positions, padding and their
slopes; cubic coefficients from ``UpSample.h``).
"""
from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather

# Codes of aten's GridSamplerInterpolation and GridSamplerPadding.
_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2
_CUBIC = -0.75
# aten's position of samples that are not finite or do not fit an int: outside every map.
_OUTSIDE = -100.
_INT_MAX = 2. ** 31 - 1


class _Filter(NamedTuple):
    """Filters along one axis, (..., T).

    Integer positions, weights, derivatives of the weights by the grid, and whether a position is
    inside of the map.
    """

    position: Tensor
    weight: Tensor
    slope: Tensor
    live: Tensor


def _pixels(grid: Tensor, size: int, align: bool) -> tuple[Tensor, float]:
    """Return positions in pixels of grid values in [-1, 1], and pixels per unit."""
    if align:
        return (grid + 1) / 2 * (size - 1), (size - 1) / 2
    return ((grid + 1) * size - 1) / 2, size / 2


def _clip(at: Tensor, size: int) -> tuple[Tensor, Tensor]:
    inside = (at > 0) & (at < size - 1)
    return at.nan_to_num(0, size - 1, 0).clamp(0, size - 1), inside.to(at.dtype)


def _reflect(at: Tensor, size: int, align: bool) -> tuple[Tensor, Tensor]:
    low, high = (0., size - 1.) if align else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return torch.zeros_like(at), torch.zeros_like(at)
    away = at - low
    sign = torch.where(away < 0, -1., 1.).to(at.dtype)
    away = away.abs()
    extra, odd = torch.fmod(away, span), torch.remainder(torch.floor(away / span), 2) == 1
    return (torch.where(odd, span - extra, extra) + low,
            torch.where(odd, -sign, sign))


def _padded(at: Tensor, size: int, padding: int,
            align: bool) -> tuple[Tensor, Tensor | float]:
    """Return positions after the padding rule, and their derivative by those before it."""
    slope: Tensor | float = 1.
    if padding == _REFLECTION:
        at, slope = _reflect(at, size, align)
    if padding != _ZEROS:
        at, inside = _clip(at, size)
        slope = inside * slope
    return torch.where(at.abs() < _INT_MAX, at, _OUTSIDE), slope


def _cubic(part: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights of taps at distances 1 + part, part, 1 - part, 2 - part, and derivatives."""
    a = _CUBIC
    x = torch.stack((part + 1, part, 1 - part, 2 - part), -1)
    outer, inner = ((x - 5) * x + 8) * x * a - 4 * a, ((a + 2) * x - (a + 3)) * x * x + 1
    outer_slope = ((3 * x - 10) * x + 8) * a
    inner_slope = (3 * (a + 2) * x - 2 * (a + 3)) * x
    is_outer = torch.tensor([True, False, False, True], device=part.device)
    towards = part.new_tensor([1, 1, -1, -1])
    return (torch.where(is_outer, outer, inner),
            torch.where(is_outer, outer_slope, inner_slope) * towards)


def _filter(grid: Tensor, size: int, mode: int, padding: int, align: bool) -> _Filter:
    """Return taps of every sample along one axis; ``grid`` has one value per sample."""
    at, per_unit = _pixels(grid, size, align)
    if mode == _BICUBIC:
        at = torch.where(at.abs() < _INT_MAX, at, _OUTSIDE)
        low = at.floor()
        weight, slope = _cubic(at - low)
        position = low.unsqueeze(-1) + torch.arange(-1, 3, device=at.device)
        # the padding rule applies to the pixels that are read, not to the sample
        position = _padded(position, size, padding, align)[0]
        slope = slope * per_unit
    else:
        at, moved = _padded(at, size, padding, align)
        if mode == _NEAREST:
            position = at.round().unsqueeze(-1)
            weight, slope = torch.ones_like(position), torch.zeros_like(position)
        else:
            low = at.floor()
            part = at - low
            position = torch.stack((low, low + 1), -1)
            weight = torch.stack((1 - part, part), -1)
            step = torch.ones_like(at) * moved * per_unit
            slope = torch.stack((-step, step), -1)
    live = (position >= 0) & (position < size)
    return _Filter(position.masked_fill(~live, 0).to(torch.int64), weight, slope, live)


class _Taps(NamedTuple):
    """(samples, T): rows (the padding index outside), weights, and derivatives per axis."""

    row: Tensor
    weight: Tensor
    slopes: list[Tensor]


def _product(filters: Sequence[_Filter], sizes: Sequence[int], images: int, wants_grid: bool
             ) -> _Taps:
    """Return taps of the product of one filter per axis, (images, samples, T) each."""
    axes = len(filters)

    def along(values: Tensor, axis: int) -> Tensor:
        return values.view(*values.shape[:2], *[-1 if axis == j else 1 for j in range(axes)])

    row, live = along(filters[0].position, 0), along(filters[0].live, 0)
    for i in range(1, axes):
        row = row * sizes[i] + along(filters[i].position, i)
        live = live & along(filters[i].live, i)

    def multiply(chosen: int) -> Tensor:
        product = functools.reduce(torch.mul, (
            along(axis.slope if i == chosen else axis.weight, i) for i, axis in enumerate(filters)))
        return product.reshape(product.shape[0] * product.shape[1], -1)

    pixels = math.prod(sizes)
    first = torch.arange(images, device=row.device).view(-1, *[1] * (axes + 1)) * pixels
    row = torch.where(live, row + first, images * pixels)
    index = torch.int32 if images * pixels < 2 ** 31 - 1 else torch.int64
    return _Taps(row.reshape(row.shape[0] * row.shape[1], -1).to(index), multiply(-1),
                 [multiply(i) for i in range(axes)] if wants_grid else [])


def grid_sample_backward(grad: Tensor, input: Tensor, grid: Tensor, mode: int, padding: int,
                         align_corners: bool, output_mask: Sequence[bool] = (True, True)
                         ) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``aten::grid_sampler_2d_backward`` and ``grid_sampler_3d_backward``.

    Args:
        grad: (N, C, [D,] H', W'). input: (N, C, [D,] H, W).
        grid: (N, [D',] H', W', 2 or 3), x first.
        mode, padding: aten's codes.
        output_mask: which gradients to compute, of input and grid; the others are None.
    """
    sizes = input.shape[2:]
    wants_input, wants_grid = output_mask
    dtype = gather.compute_dtype(input)
    grad_input = torch.zeros_like(input, memory_format=torch.contiguous_format,
                                  dtype=dtype) if wants_input else None
    grad_grid = torch.zeros_like(grid, memory_format=torch.contiguous_format,
                                 dtype=dtype) if wants_grid else None
    samples = grad.shape[2:].numel()
    if input.numel() and samples:
        per_axis = (1, 2, 4)[(_NEAREST, _BILINEAR, _BICUBIC).index(mode)]
        taps = samples * per_axis ** len(sizes)
        for low, high in gather.chunk_by_cost([taps] * len(input), gather.chunk_taps(input.device)):
            part = slice(low, high)
            _images(grad[part], input[part], grid[part], mode, padding, align_corners,
                    None if grad_input is None else grad_input[part],
                    None if grad_grid is None else grad_grid[part])
    return (None if grad_input is None else grad_input.to(input.dtype),
            None if grad_grid is None else grad_grid.to(grid.dtype))


def _images(grad: Tensor, input: Tensor, grid: Tensor, mode: int, padding: int, align: bool,
            grad_input: Tensor | None, grad_grid: Tensor | None) -> None:
    """Add the gradients of some images to ``grad_input`` and write ``grad_grid``."""
    images, channels, *sizes = input.shape
    dtype = gather.compute_dtype(input)
    positions = grid.reshape(images, -1, len(sizes)).to(dtype)
    filters = [_filter(positions[..., len(sizes) - 1 - i], size, mode, padding, align)
               for i, size in enumerate(sizes)]
    taps = _product(filters, sizes, images, grad_grid is not None)
    source = gather.bags(grad.reshape(images, channels, -1)).contiguous()
    flat = (images, channels, 1, -1)
    if grad_input is not None:
        rows = gather.scatter_sum(source, taps.row, taps.weight, images * input[0, 0].numel())
        gather.add_rows(grad_input.view(flat), rows)
    if grad_grid is not None:
        reads = gather.dots(source, gather.rows_of(input.reshape(flat)), taps.row)
        for i, slope in enumerate(taps.slopes):
            out = grad_grid.view(images, -1, len(sizes))[..., len(sizes) - 1 - i]
            out.copy_((reads * slope).sum(-1).view(images, -1))


def cudnn_grid_sample_backward(input: Tensor, grid: Tensor, grad: Tensor
                               ) -> tuple[Tensor | None, Tensor | None]:
    """Compute ``aten::cudnn_grid_sampler_backward``: bilinear, zeros outside, corners aligned."""
    return grid_sample_backward(grad, input, grid, _BILINEAR, _ZEROS, True)
