"""Deformable RoI pooling: RoIAlign whose bins move by learned offsets.

Signature: ``mmcv/ops/deform_roi_pool.py``; formula: ``deform_roi_pool_cuda_kernel.cuh`` (mmcv
2.1.0). The masks of the modulated form are multiplied outside, by mmcv's Python.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require_tensor
from .rois import check_rois, pool


class _Bins:
    """The bins of a call, each the mean of its bilinear samples.

    ``size`` is the size of each RoI in pixels (K, 2), width before height.
    """

    def __init__(self, feature: Tensor, rois: Tensor, offset: Tensor, bins: tuple[int, int],
                 scale: float, sampling_ratio: int, gamma: float) -> None:
        self.image = check_rois('deform_roi_pool', feature, rois)
        self.shape, self.bins = feature.shape, bins
        dtype = gather.COMPUTE[rois.dtype]
        edges = rois[:, 1:].to(dtype) * gather.single(scale) - 0.5
        self.size = edges[:, 2:] - edges[:, :2]
        bin_w, bin_h = self.size[:, 0] / bins[1], self.size[:, 1] / bins[0]
        self.grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
        sampling.check_grid(self.grid, sampling_ratio)
        self.columns = torch.stack((edges[:, 1], edges[:, 0], bin_h, bin_w,
                                    *self.grid.to(dtype)), 1)
        # (K, 2, PH, PW), x before y
        self.shift = None
        if offset.numel():
            require_tensor('deform_roi_pool', 'offset', offset, (len(rois), 2, *bins),
                           (feature.dtype,))
            self.shift = gather.single(gamma) * self.size[:, :, None, None] * offset.to(dtype)

    def runs(self, *tensors: Tensor) -> list[tuple[int, int]]:
        """Return runs of RoIs to process together; the caller holds ``tensors`` anyway."""
        costs = self.grid.prod(0) * (4 * self.bins[0] * self.bins[1])
        return gather.chunk_by_cost(costs.tolist(), gather.tap_budget(*tensors))

    def samples(self, a: int, b: int) -> tuple[sampling.Taps, Tensor, sampling.Corners]:
        """Return the samples of RoIs ``a`` to ``b``.

        Their taps, four for each, and what these were made from: 1 / samples of the bin (S,), and
        the corners.
        """
        n, _, height, width = self.shape
        per_roi = self.bins[0] * self.bins[1]
        grid_y, grid_x = self.grid[:, a:b].repeat_interleave(per_roi, 1)
        bag, iy, ix, starts = sampling.bin_samples(grid_y, grid_x)
        roi = torch.div(bag, per_roi, rounding_mode='floor')
        in_roi = bag - roi * per_roi
        ph = torch.div(in_roi, self.bins[1], rounding_mode='floor')
        pw, roi = in_roi - ph * self.bins[1], roi + a
        top, left, step_h, step_w, rows, cols = self.columns.index_select(0, roi).unbind(1)
        if self.shift is not None:
            left = left + self.shift[roi, 0, ph, pw]
            top = top + self.shift[roi, 1, ph, pw]
        corners = sampling.clamped_corners(top + ph * step_h + (iy + 0.5) * step_h / rows,
                                           left + pw * step_w + (ix + 0.5) * step_w / cols,
                                           height, width)
        base = (self.image.index_select(0, roi) * (height * width)).unsqueeze(-1)
        row = torch.where(corners.live, corners.row + base, n * height * width).to(torch.int32)
        share = (1 / (grid_y * grid_x).to(top.dtype)).index_select(0, bag)
        taps = sampling.Taps(row.flatten(), (corners.weight * share.unsqueeze(-1)).flatten(),
                             bag.to(torch.int32).repeat_interleave(4), (starts * 4).to(torch.int32))
        return taps, share, corners


def deform_roi_pool_forward(input: Tensor, rois: Tensor, offset: Tensor, output: Tensor,
                            pooled_height: int, pooled_width: int, spatial_scale: float,
                            sampling_ratio: int, gamma: float) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W).

    ``offset`` is (K, 2, pooled_height, pooled_width), x before y, in sizes of the RoI over
    ``gamma``; empty for none.
    """
    bins = _Bins(input, rois, offset, (pooled_height, pooled_width), spatial_scale, sampling_ratio,
                 gamma)
    if output.numel():
        pool(input, output, bins.runs(input, output), lambda a, b: bins.samples(a, b)[0])


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
