"""Deformable RoI pooling: RoIAlign whose bins move by learned offsets.

Signature: ``mmcv/ops/deform_roi_pool.py``; formula: ``deform_roi_pool_cuda_kernel.cuh`` (mmcv
2.1.0). The masks of the modulated form are multiplied outside, by mmcv's Python.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require_tensor
from .bilinear_mean import Means, Visit, mean_forward, runs, samples
from .rois import check_rois


def _means(feature: Tensor, rois: Tensor, offset: Tensor, bins: tuple[int, int], scale: float,
           sampling_ratio: int, gamma: float) -> tuple[Means, Tensor]:
    """Return the samples, and the size of each RoI in pixels (K, 2), width before height."""
    image = check_rois('deform_roi_pool', feature, rois, 5)
    dtype = gather.COMPUTE[rois.dtype]
    edges = rois[:, 1:].to(dtype) * gather.single(scale) - 0.5
    size = edges[:, 2:] - edges[:, :2]
    bin_w, bin_h = size[:, 0] / bins[1], size[:, 1] / bins[0]
    grid = sampling.grid_of(bin_h, bin_w, sampling_ratio)
    columns = torch.stack((edges[:, 1], edges[:, 0], bin_h, bin_w, grid.y.to(dtype),
                           grid.x.to(dtype)), 1)
    # (K, 2, PH, PW), x before y
    shift = None
    if offset.numel():
        require_tensor('deform_roi_pool', 'offset', offset, (len(rois), 2, *bins), (feature.dtype,))
        shift = gather.single(gamma) * size[:, :, None, None] * offset.to(dtype)

    def locate(visit: Visit) -> tuple[Tensor, Tensor]:
        top, left, step_h, step_w, rows, cols = columns.index_select(0, visit.roi).unbind(1)
        if shift is not None:
            left = left + shift[visit.roi, 0, visit.ph, visit.pw]
            top = top + shift[visit.roi, 1, visit.ph, visit.pw]
        return (top + visit.ph * step_h + (visit.iy + 0.5) * step_h / rows,
                left + visit.pw * step_w + (visit.ix + 0.5) * step_w / cols)

    return Means(image, grid, bins, locate), size


def deform_roi_pool_forward(input: Tensor, rois: Tensor, offset: Tensor, output: Tensor,
                            pooled_height: int, pooled_width: int, spatial_scale: float,
                            sampling_ratio: int, gamma: float) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W).

    ``offset`` is (K, 2, pooled_height, pooled_width), x before y, in sizes of the RoI over
    ``gamma``; empty for none.
    """
    means, _ = _means(input, rois, offset, (pooled_height, pooled_width), spatial_scale,
                      sampling_ratio, gamma)
    mean_forward(means, input, output)


def deform_roi_pool_backward(grad_output: Tensor, input: Tensor, rois: Tensor, offset: Tensor,
                             grad_input: Tensor, grad_offset: Tensor, pooled_height: int,
                             pooled_width: int, spatial_scale: float, sampling_ratio: int,
                             gamma: float) -> None:
    """Add the gradients of :func:`deform_roi_pool_forward` to the last two tensors."""
    bins = (pooled_height, pooled_width)
    means, size = _means(input, rois, offset, bins, spatial_scale, sampling_ratio, gamma)
    if grad_output.numel() == 0 or input.numel() == 0:
        return
    source, sink = gather.Source(input), gather.Sink(grad_input)
    for a, b in runs(means, input, grad_output):
        taps, share, corners = samples(means, input.shape, a, b)
        grad = gather.bags(grad_output[a:b])
        sink.scatter_sum(grad, taps.row, taps.weight, taps.bag)
        if offset.numel():
            rows, index = source.rows(taps.row)
            dot = gather.dots(grad, rows, index, taps.bag).view(-1, 4)
            # derivatives by the position of each sample, x before y, (S, 2)
            slopes = torch.stack(((corners.dx * dot).sum(-1), (corners.dy * dot).sum(-1)), 1)
            slopes = slopes * share[:, None]
            # sum the slopes of each bin: its bag has weights of one
            index = torch.arange(len(slopes), dtype=torch.int32, device=slopes.device)
            starts = torch.div(taps.starts, 4, rounding_mode='floor')
            by_bin = gather.gather_sum(slopes, index, torch.ones_like(slopes[:, 0]), starts)
            by_bin = by_bin.view(b - a, -1, 2).transpose(1, 2) * size[a:b, :, None]
            by_bin = by_bin * gather.single(gamma)
            grad_offset[a:b] += by_bin.view(b - a, 2, *bins).to(grad_offset.dtype)
    sink.close()
