"""Deformable RoI pooling: RoIAlign whose bins move by learned offsets.

Signature: ``mmcv/ops/deform_roi_pool.py``; formula: ``deform_roi_pool_cuda_kernel.cuh`` (mmcv
2.1.0). The masks of the modulated form are multiplied outside, by mmcv's Python.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require_tensor
from .rois import SampledBins, check_rois


class _Bins(SampledBins):
    """The bins of a call, each the mean of its bilinear samples.

    ``size`` is the size of each RoI in pixels (K, 2), width before height.
    """

    def __init__(self, feature: Tensor, rois: Tensor, offset: Tensor, bins: tuple[int, int],
                 scale: float, sampling_ratio: int, gamma: float) -> None:
        image = check_rois('deform_roi_pool', feature, rois)
        dtype = gather.COMPUTE[rois.dtype]
        edges = rois[:, 1:].to(dtype) * gather.single(scale) - 0.5
        self.size = edges[:, 2:] - edges[:, :2]
        bin_w, bin_h = self.size[:, 0] / bins[1], self.size[:, 1] / bins[0]
        grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
        sampling.check_grid(grid, sampling_ratio)
        super().__init__(feature.shape, image, grid, bins)
        self.columns = torch.stack((edges[:, 1], edges[:, 0], bin_h, bin_w,
                                    *grid.to(dtype)), 1)
        # (K, 2, PH, PW), x before y
        self.shift = None
        if offset.numel():
            require_tensor('deform_roi_pool', 'offset', offset, (len(rois), 2, *bins),
                           (feature.dtype,))
            self.shift = gather.single(gamma) * self.size[:, :, None, None] * offset.to(dtype)

    def positions(self, roi: Tensor, ph: Tensor, pw: Tensor, iy: Tensor,
                  ix: Tensor) -> tuple[Tensor, Tensor]:
        top, left, step_h, step_w, rows, cols = self.columns.index_select(0, roi).unbind(1)
        if self.shift is not None:
            left = left + self.shift[roi, 0, ph, pw]
            top = top + self.shift[roi, 1, ph, pw]
        return (top + ph * step_h + (iy + 0.5) * step_h / rows,
                left + pw * step_w + (ix + 0.5) * step_w / cols)


def deform_roi_pool_forward(input: Tensor, rois: Tensor, offset: Tensor, output: Tensor,
                            pooled_height: int, pooled_width: int, spatial_scale: float,
                            sampling_ratio: int, gamma: float) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W).

    ``offset`` is (K, 2, pooled_height, pooled_width), x before y, in sizes of the RoI over
    ``gamma``; empty for none.
    """
    bins = _Bins(input, rois, offset, (pooled_height, pooled_width), spatial_scale, sampling_ratio,
                 gamma)
    bins.mean(input, output)


def deform_roi_pool_backward(grad_output: Tensor, input: Tensor, rois: Tensor, offset: Tensor,
                             grad_input: Tensor, grad_offset: Tensor, pooled_height: int,
                             pooled_width: int, spatial_scale: float, sampling_ratio: int,
                             gamma: float) -> None:
    """Add the gradients of :func:`deform_roi_pool_forward` to the last two tensors."""
    bins = _Bins(input, rois, offset, (pooled_height, pooled_width), spatial_scale, sampling_ratio,
                 gamma)
    if grad_output.numel() == 0 or input.numel() == 0:
        return
    source, sink = gather.Source(input), gather.Sink(grad_input)
    for a, b in bins.runs(input, grad_output):
        taps, share, corners = bins.samples(a, b)
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
            by_bin = by_bin.view(b - a, -1, 2).transpose(1, 2) * bins.size[a:b, :, None]
            by_bin = by_bin * gather.single(gamma)
            grad_offset[a:b] += by_bin.view(grad_offset[a:b].shape).to(grad_offset.dtype)
    sink.close()
