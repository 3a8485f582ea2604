"""Means of bilinear samples at arbitrary positions, for rotated and deformed RoI operators.

These operators differ only in the positions of their samples. Each provides the number of samples
per bin and a function from samples to positions. The samples become taps under the clamping rule;
the mean of a bin is a bag.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from .rois import pool, pool_backward


class Visit(NamedTuple):
    """Samples: RoI, row and column of the bin, row and column in the bin; (S,) int64 each."""

    roi: Tensor
    ph: Tensor
    pw: Tensor
    iy: Tensor
    ix: Tensor


class Means(NamedTuple):
    """Means over samples; ``locate`` maps a :class:`Visit` to y and x in pixels, (S,) each."""

    image: Tensor
    grid: sampling.Grid
    bins: tuple[int, int]
    locate: Callable[[Visit], tuple[Tensor, Tensor]]


class Samples(NamedTuple):
    """The samples of some RoIs: their taps, four for each, and what these were made from."""

    taps: sampling.Taps
    share: Tensor  # (S,) 1 / samples of the bin
    corners: sampling.Corners


def runs(means: Means, *tensors: Tensor) -> list[tuple[int, int]]:
    """Return runs of RoIs to process together; the caller holds ``tensors`` anyway."""
    costs = means.grid.y * means.grid.x * (4 * means.bins[0] * means.bins[1])
    return gather.chunk_by_cost(costs.tolist(), gather.tap_budget(*tensors))


def samples(means: Means, shape: torch.Size, a: int, b: int) -> Samples:
    """Return the samples of RoIs ``a`` to ``b`` on features of ``shape`` (N, C, H, W)."""
    n, _, height, width = shape
    ph, pw = means.bins
    per_roi = ph * pw
    grid_y, grid_x = (g[a:b].repeat_interleave(per_roi) for g in means.grid[:2])
    bag, iy, ix, starts = sampling.bin_samples(grid_y, grid_x)
    roi = torch.div(bag, per_roi, rounding_mode='floor')
    bin_index = bag - roi * per_roi
    row_of = torch.div(bin_index, pw, rounding_mode='floor')
    visit = Visit(roi + a, row_of, bin_index - row_of * pw, iy, ix)
    y, x = means.locate(visit)
    corners = sampling.clamped_corners(y, x, height, width)
    base = (means.image.index_select(0, visit.roi) * (height * width)).unsqueeze(-1)
    row = torch.where(corners.live, corners.row + base, n * height * width).to(torch.int32)
    share = (1 / (grid_y * grid_x).to(y.dtype)).index_select(0, bag)
    taps = sampling.Taps(row.flatten(), (corners.weight * share.unsqueeze(-1)).flatten(),
                         bag.to(torch.int32).repeat_interleave(4), (starts * 4).to(torch.int32))
    return Samples(taps, share, corners)


def mean_forward(means: Means, feature: Tensor, output: Tensor) -> None:
    """Fill ``output`` (K, C, PH, PW) with the means over ``feature`` (N, C, H, W)."""
    if output.numel():
        pool(feature, output, runs(means, feature, output),
             lambda a, b: samples(means, feature.shape, a, b).taps)


def mean_backward(means: Means, grad_output: Tensor, grad_input: Tensor) -> None:
    """Add the gradient of :func:`mean_forward` to ``grad_input``."""
    if grad_output.numel() and grad_input.numel():
        pool_backward(grad_output, grad_input, runs(means, grad_input, grad_output),
                      lambda a, b: samples(means, grad_input.shape, a, b).taps)
