"""Precise RoI pooling: the integral of the bilinear surface over every bin, and its gradients.

Signature: ``mmcv/ops/prroi_pool.py``; formula: ``prroi_pool_cuda_kernel.cuh`` (mmcv 2.1.0). The
surface is a sum of products of triangular functions (hats), one per axis, so the integral over a
rectangle has one filter per axis, as in RoIAlign. Outside the map the surface falls to zero.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require_shape
from .rois import check_rois, pool, pool_backward


class _Bins(NamedTuple):
    """Bounds of the bins of every RoI along each axis, (K, P) each, and their area (K,)."""

    y1: Tensor
    y2: Tensor
    x1: Tensor
    x2: Tensor
    area: Tensor

    def part(self, a: int, b: int) -> _Bins:
        return _Bins(*(t[a:b] for t in self))


def _bins(rois: Tensor, bins: tuple[int, int], scale: float) -> _Bins:
    box = rois[:, 1:].to(gather.COMPUTE[rois.dtype]) * gather.single(scale)
    bounds, sizes = [], []
    for axis, count in ((1, bins[0]), (0, bins[1])):
        size = (box[:, axis + 2] - box[:, axis]).clamp(min=0)[:, None] / count
        first = box[:, axis, None] + size * torch.arange(count, dtype=box.dtype, device=box.device)
        bounds += [first, first + size]
        sizes.append(size[:, 0])
    area = sizes[0] * sizes[1]
    # a box that is not finite has no area
    return _Bins(*bounds, torch.where(area.isfinite(), area, 0.))


def _integral(first: Tensor, last: Tensor, size: int) -> sampling.AxisTaps:
    """Return integrals of the hats of the pixels between ``first`` and ``last``, (K, P) each."""
    # a hat extends one pixel in both directions
    low = (first.floor()).nan_to_num(0).clamp(0, size)
    high = (last.ceil()).nan_to_num(-1).clamp(-1, size - 1)
    count = (high - low + 1).clamp(min=0)
    slots = int(count.amax()) if count.numel() else 0
    pixel = low[:, :, None] + torch.arange(slots, dtype=low.dtype, device=low.device)
    weight = torch.zeros_like(pixel)
    for side in (-1, 0):
        # the half of the hat from pixel + side to the next pixel, as mmcv integrates it
        a = (first[:, :, None] - pixel - side).clamp(0, 1)
        b = (last[:, :, None] - pixel - side).clamp(0, 1)
        rising = (b * b - a * a) / 2
        weight += rising if side else (b - a) - rising
    return sampling.AxisTaps(pixel.to(torch.int32), weight, count.to(torch.int64))


def _point(at: Tensor, size: int) -> sampling.AxisTaps:
    """Return the two hats that are not zero at a position (K, P)."""
    low = at.floor().nan_to_num(0).clamp(-1, size)
    pixel = torch.stack((low, low + 1), -1)
    weight = (1 - (at.unsqueeze(-1) - pixel).abs()).clamp(min=0)
    inside = (pixel >= 0) & (pixel < size)
    weight = torch.where(inside, weight, 0)
    count = torch.full(at.shape, 2, dtype=torch.int64, device=at.device)
    return sampling.AxisTaps(pixel.clamp(0, size - 1).to(torch.int32), weight, count)


def _runs(bins: _Bins, shape: torch.Size, *owned: Tensor,
          elements: int = 0) -> list[tuple[int, int]]:
    """Return runs of RoIs to process together, by their taps and ``elements`` more for each."""
    tall = ((bins.y2 - bins.y1).nan_to_num(0).amax(1).ceil() + 2).clamp(max=shape[2])
    wide = ((bins.x2 - bins.x1).nan_to_num(0).amax(1).ceil() + 2).clamp(max=shape[3])
    taps = tall * wide * (bins.y1.shape[1] * bins.x1.shape[1])
    filters = tall * bins.y1.shape[1] + wide * bins.x1.shape[1]
    costs, widths = torch.stack((taps + filters + elements, filters)).to(torch.int64).tolist()
    return gather.chunk_by_cost(costs, gather.tap_budget(*owned), widths)


def _means(bins: _Bins, image: Tensor, shape: torch.Size) -> sampling.Taps:
    """Return taps of the integrals over bins divided by their area; none for bins without area."""
    ys = _integral(bins.y1, bins.y2, shape[2])
    xs = _integral(bins.x1, bins.x2, shape[3])
    share = torch.where(bins.area > 0, 1 / bins.area, 0)
    ys = ys._replace(weight=ys.weight * share[:, None, None],
                     count=ys.count.masked_fill(bins.area[:, None] <= 0, 0))
    return sampling.product_taps(image, ys, xs, *shape[2:])


def prroi_pool_forward(input: Tensor, rois: Tensor, output: Tensor, pooled_height: int,
                       pooled_width: int, spatial_scale: float) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W)."""
    image = check_rois('prroi_pool', input, rois, 5)
    if output.numel() == 0:
        return
    bins = _bins(rois, (pooled_height, pooled_width), spatial_scale)
    pool(input, output, _runs(bins, input.shape, input, output),
         lambda a, b: _means(bins.part(a, b), image[a:b], input.shape))


def prroi_pool_backward(grad_output: Tensor, rois: Tensor, grad_input: Tensor, pooled_height: int,
                        pooled_width: int, spatial_scale: float) -> None:
    """Add the gradient of the features to ``grad_input`` (N, C, H, W)."""
    image = check_rois('prroi_pool', grad_input, rois, 5)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    bins = _bins(rois, (pooled_height, pooled_width), spatial_scale)
    pool_backward(grad_output, grad_input, _runs(bins, grad_input.shape, grad_input, grad_output),
                  lambda a, b: _means(bins.part(a, b), image[a:b], grad_input.shape))


def prroi_pool_coor_backward(output: Tensor, grad_output: Tensor, input: Tensor, rois: Tensor,
                             grad_rois: Tensor, pooled_height: int, pooled_width: int,
                             spatial_scale: float) -> None:
    """Add the gradient of the boxes to ``grad_rois`` (K, 5).

    By Leibniz' rule: the derivative by an edge is the integral of the surface along that edge.
    """
    image = check_rois('prroi_pool', input, rois, 5)
    require_shape('prroi_pool', 'grad_rois', grad_rois, tuple(rois.shape))
    if grad_output.numel() == 0:
        return
    all_bins = _bins(rois, (pooled_height, pooled_width), spatial_scale)
    source = gather.Source(input)
    scale = gather.single(spatial_scale)
    for a, b in _runs(all_bins, input.shape, input, output, elements=output[0].numel()):
        bins = all_bins.part(a, b)
        value, grad = gather.bags(output[a:b]), gather.bags(grad_output[a:b])
        share = torch.where(bins.area > 0, scale / bins.area, 0)[:, None, None]
        for axis, (x_part, along, count) in enumerate(((True, bins.y2 - bins.y1, pooled_width),
                                                       (False, bins.x2 - bins.x1, pooled_height))):
            first, second = (_edge(source, input.shape, image[a:b], bins, x_part, last)
                             for last in (False, True))
            length = along[:, :, None] if x_part else along[:, None, :]
            length = length.expand(-1, pooled_height, pooled_width).reshape(-1, 1)
            # (K, bins): two ordered sums, over the channels of a bin and the bins of a RoI
            by_first = ((length * value - first) * grad).sum(1).view(b - a, -1) * share[:, :, 0]
            by_second = ((second - length * value) * grad).sum(1).view(b - a, -1) * share[:, :, 0]
            at = torch.arange(count, dtype=value.dtype, device=value.device) / count
            at = at.repeat(pooled_height) if x_part else at.repeat_interleave(pooled_width)
            next_at = at + 1 / count
            low = (by_first * (1 - at) + by_second * (1 - next_at)).sum(1)
            high = (by_first * at + by_second * next_at).sum(1)
            grad_rois[a:b, 1 + axis] += low.to(grad_rois.dtype)
            grad_rois[a:b, 3 + axis] += high.to(grad_rois.dtype)


def _edge(source: gather.Source, shape: torch.Size, image: Tensor, bins: _Bins, x_part: bool,
          last: bool) -> Tensor:
    """Return integrals (B, C) of the surface along the first or last edge of each bin."""
    if x_part:
        ys = _integral(bins.y1, bins.y2, shape[2])
        xs = _point(bins.x2 if last else bins.x1, shape[3])
    else:
        ys = _point(bins.y2 if last else bins.y1, shape[2])
        xs = _integral(bins.x1, bins.x2, shape[3])
    ys = ys._replace(count=ys.count.masked_fill(bins.area[:, None] <= 0, 0))
    taps = sampling.product_taps(image, ys, xs, *shape[2:])
    return source.gather_sum(taps.row, taps.weight, taps.starts)
