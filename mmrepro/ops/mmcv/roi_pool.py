"""RoIPool, and its form whose bins move by learned offsets.

RoIPool keeps the greatest pixel of every bin of axis-aligned boxes. Signature:
``mmcv/ops/roi_pool.py``; formula: ``roi_pool_cuda_kernel.cuh`` (mmcv 2.1.0). The pixels of a bin
are visited row by row: the first of equal ones wins, and NaN never does.

One difference from mmcv: bins of a malformed box (of negative size) have no gradient. mmcv leaves
their argmax at 0 and so adds their gradient to the first pixel.

Deformable RoI pooling is RoIAlign whose bins move. Signature: ``mmcv/ops/deform_roi_pool.py``;
formula: ``deform_roi_pool_cuda_kernel.cuh``. The masks of the modulated form are multiplied
outside, by mmcv's Python.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require_shape, require_tensor
from .rois import LOWEST, SampledBins, check_rois, keep_greater


class _Bins(NamedTuple):
    """Bins sorted by their number of pixels, most first: all (B,) int64."""

    order: Tensor  # index in the output
    pixels: Tensor
    columns: Tensor
    first: Tensor  # the first pixel in the image
    base: Tensor  # the first row of the image


def _edges(start: Tensor, size: Tensor, bins: int, limit: int) -> tuple[Tensor, Tensor]:
    """Return the first and the past-the-last pixel of every bin along an axis, (K, bins) each."""
    ordinal = torch.arange(bins + 1, dtype=size.dtype, device=size.device)
    bound = ordinal * (size / bins)[:, None] + start[:, None]
    # NaN becomes 0, as in a conversion to int on CUDA: such bins are empty
    first = bound[:, :-1].floor().nan_to_num(0).clamp(0, limit)
    last = bound[:, 1:].ceil().nan_to_num(0).clamp(0, limit)
    return first.to(torch.int64), last.to(torch.int64)


def _bins(shape: torch.Size, rois: Tensor, image: Tensor, pooled: tuple[int, int],
          scale: float) -> _Bins:
    _, _, height, width = shape
    box = rois[:, 1:].to(gather.COMPUTE[rois.dtype])
    # mmcv's boxes include their last pixel
    x1, y1, x2, y2 = (torch.cat((box[:, :2], box[:, 2:] + 1), 1) * gather.single(scale)).unbind(1)
    top, bottom = _edges(y1, y2 - y1, pooled[0], height)
    left, right = _edges(x1, x2 - x1, pooled[1], width)
    malformed = (x2 - x1 <= 0) | (y2 - y1 <= 0)
    rows = (bottom - top).clamp(min=0).masked_fill(malformed[:, None], 0)[:, :, None]
    columns = (right - left).clamp(min=0)[:, None, :]
    count = (rows * columns).flatten()
    order = torch.sort(count, descending=True, stable=True).indices
    first = (top[:, :, None] * width + left[:, None, :]).flatten()
    base = (image * (height * width)).repeat_interleave(pooled[0] * pooled[1])
    columns = columns.expand(-1, pooled[0], -1).flatten()
    return _Bins(order, *(t.index_select(0, order) for t in (count, columns, first, base)))


def _visits(bins: _Bins, width: int) -> Iterator[Tensor]:
    """Yield pixel number 0, 1, ... of the bins that have it (a prefix): positions in the image."""
    counts, length = bins.pixels.tolist(), len(bins.pixels)
    for ordinal in range(counts[0] if counts else 0):
        while counts[length - 1] <= ordinal:
            length -= 1
        columns = bins.columns[:length]
        row = torch.div(ordinal, columns, rounding_mode='floor')
        yield bins.first[:length] + row * width + (ordinal - row * columns)


def _greatest(rows: Tensor, bins: _Bins, width: int) -> tuple[Tensor, Tensor]:
    """Return the greatest pixel of each bin (B, C), and its position (B, C) int32; -1 for none."""
    best = rows.new_full((len(bins.order), rows.shape[1]), LOWEST)
    best[bins.pixels == 0] = 0
    winner = best.new_full(best.shape, -1, dtype=torch.int32)
    for pixel in _visits(bins, width):
        value = rows.index_select(0, bins.base[:len(pixel)] + pixel)
        keep_greater(best, winner, value, pixel.to(torch.int32)[:, None])
    return best, winner


def roi_pool_forward(input: Tensor, rois: Tensor, output: Tensor, argmax: Tensor,
                     pooled_height: int, pooled_width: int, spatial_scale: float) -> None:
    """Fill ``output`` and ``argmax`` (K, C, pooled_height, pooled_width) from (N, C, H, W).

    ``argmax`` is int32: position y * W + x of the winner, -1 where nothing won.
    """
    pooled = (pooled_height, pooled_width)
    image = check_rois('roi_pool', input, rois)
    if output.numel() == 0:
        return
    # turn -0 into 0: which of them is the maximum depends on the vector instructions
    rows = gather.rows_of(input).add_(0.)
    # boxes of similar size share a chunk, so that their numbers of visits are similar
    order = torch.sort((rois[:, 3:] - rois[:, 1:3]).prod(1), descending=True, stable=True).indices
    step = max(1, gather.chunk_taps(output.device) // output[0].numel())
    for which in order.split(step):
        bins = _bins(input.shape, rois.index_select(0, which), image.index_select(0, which),
                     pooled, spatial_scale)
        for out, result in zip((output, argmax), _greatest(rows, bins, input.shape[3])):
            part = torch.empty_like(out[:len(which)])
            gather.put_rows(part, torch.empty_like(result).index_copy_(0, bins.order, result))
            out.index_copy_(0, which, part)


def roi_pool_backward(grad_output: Tensor, rois: Tensor, argmax: Tensor, grad_input: Tensor,
                      pooled_height: int, pooled_width: int, spatial_scale: float) -> None:
    """Add the gradient of :func:`roi_pool_forward` to ``grad_input`` (N, C, H, W)."""
    image = check_rois('roi_pool', grad_input, rois)
    require_shape('roi_pool', 'argmax', argmax, tuple(grad_output.shape))
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    (n, c, h, w), k = grad_input.shape, len(rois)
    # of a bin without pixels mmcv's kernel leaves what was there
    box = rois[:, 1:].to(gather.COMPUTE[rois.dtype])
    well_formed = (box[:, 2:] + 1 > box[:, :2]).all(1)[:, None]
    position = argmax.reshape(k, -1).to(torch.int64)
    plane = ((image * c)[:, None] + torch.arange(c, device=image.device)) * (h * w)
    plane = plane.repeat_interleave(pooled_height * pooled_width, 1)
    inside = (position >= 0) & (position < h * w) & well_formed
    index = torch.where(inside, plane + position, n * c * h * w)
    grad = grad_output.reshape(-1, 1).to(gather.compute_dtype(grad_input))
    total = gather.scatter_sum(grad, index.view(-1, 1), torch.ones_like(grad), n * c * h * w)
    grad_input += total.view(grad_input.shape).to(grad_input.dtype)


class _MovedBins(SampledBins):
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
    bins = _MovedBins(input, rois, offset, (pooled_height, pooled_width), spatial_scale,
                      sampling_ratio, gamma)
    bins.mean(input, output)


def deform_roi_pool_backward(grad_output: Tensor, input: Tensor, rois: Tensor, offset: Tensor,
                             grad_input: Tensor, grad_offset: Tensor, pooled_height: int,
                             pooled_width: int, spatial_scale: float, sampling_ratio: int,
                             gamma: float) -> None:
    """Add the gradients of :func:`deform_roi_pool_forward` to the last two tensors."""
    bins = _MovedBins(input, rois, offset, (pooled_height, pooled_width), spatial_scale,
                      sampling_ratio, gamma)
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
