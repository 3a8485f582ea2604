"""Means of bilinear samples that lie anywhere: rotated, curved and deformed RoI operators.

These share everything but where the samples lie. An operator gives the number of samples of each
RoI's bins, and a function from samples to positions; the samples become taps under the clamping
rule, and the mean of a bin is one bag of them.
"""
from __future__ import annotations

from typing import Callable, List, NamedTuple, Tuple

import torch
from torch import Tensor

from .. import gather, sampling

__all__ = ['Means', 'Samples', 'Visit', 'mean_backward', 'mean_forward', 'runs', 'samples',
           'spread_samples']


class Visit(NamedTuple):
    """Which samples: RoI, bin row, bin column, and row and column in the bin; all (S,) int64."""

    roi: Tensor
    ph: Tensor
    pw: Tensor
    iy: Tensor
    ix: Tensor


class Means(NamedTuple):
    """A mean over samples: ``place`` maps a :class:`Visit` to y and x in pixels, (S,) each."""

    image: Tensor
    grid: sampling.Grid
    bins: Tuple[int, int]
    place: Callable[[Visit], Tuple[Tensor, Tensor]]


class Samples(NamedTuple):
    """Taps of the samples of some RoIs.

    row, weight: (S, 4); weights carry the mean. bag: (S,) bin, counted within the run.
    starts: (B + 1,) first tap of each bin. share: (S,) one over the samples of the bin.
    """

    row: Tensor
    weight: Tensor
    bag: Tensor
    starts: Tensor
    share: Tensor
    corners: sampling.Corners
    visit: Visit


def runs(means: Means, *tensors: Tensor) -> List[Tuple[int, int]]:
    """RoIs to work on together, given the tensors that the caller owns anyway."""
    costs = means.grid.y * means.grid.x * (4 * means.bins[0] * means.bins[1])
    return gather.cut(costs.tolist(), gather.tap_budget(*tensors))


def samples(means: Means, shape: torch.Size, a: int, b: int) -> Samples:
    """The samples of RoIs ``a`` to ``b`` on features of ``shape`` (N, C, H, W)."""
    n, _, height, width = shape
    ph, pw = means.bins
    places = ph * pw
    grid_y, grid_x = (g[a:b].repeat_interleave(places) for g in means.grid[:2])
    bag, iy, ix, starts = sampling.bin_samples(grid_y, grid_x)
    roi = torch.div(bag, places, rounding_mode='floor')
    place = bag - roi * places
    row_of = torch.div(place, pw, rounding_mode='floor')
    visit = Visit(roi + a, row_of, place - row_of * pw, iy, ix)
    y, x = means.place(visit)
    corners = sampling.clamped_corners(y, x, height, width)
    base = (means.image.index_select(0, visit.roi) * (height * width)).unsqueeze(-1)
    row = torch.where(corners.live, corners.row + base, n * height * width).to(torch.int32)
    share = (1 / (grid_y * grid_x).to(y.dtype)).index_select(0, bag)
    return Samples(row, corners.weight * share.unsqueeze(-1), bag, starts * 4, share, corners,
                   visit)


def mean_forward(means: Means, feature: Tensor, output: Tensor) -> None:
    """Fill ``output`` (K, C, PH, PW) with the means over ``feature`` (N, C, H, W)."""
    if output.numel() == 0:
        return
    source = gather.Source(feature)
    for a, b in runs(means, feature, output):
        some = samples(means, feature.shape, a, b)
        gather.put_rows(output[a:b], source.read(
            some.row.flatten(), some.weight.flatten(), some.starts.to(torch.int32)))


def mean_backward(means: Means, grad_output: Tensor, grad_input: Tensor) -> None:
    """Add the gradient of :func:`mean_forward` to ``grad_input``."""
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    sink = gather.Sink(grad_input)
    for a, b in runs(means, grad_input, grad_output):
        some = samples(means, grad_input.shape, a, b)
        spread_samples(some, gather.bags(grad_output[a:b]), sink)
    sink.close()


def spread_samples(some: Samples, grad: Tensor, sink: gather.Sink) -> None:
    """Spread the gradient of bins (B, C)."""
    bag = some.bag.to(torch.int32).repeat_interleave(4)
    sink.spread(grad, some.row.flatten(), some.weight.flatten(), bag)
