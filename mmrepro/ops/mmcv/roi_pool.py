"""RoIPool: the greatest pixel of every bin of axis-aligned boxes.

Signature: ``mmcv/ops/roi_pool.py``; formula: ``roi_pool_cuda_kernel.cuh`` (mmcv 2.1.0). The
pixels of a bin are visited row by row: the first of equal ones wins, and NaN never does.

One difference from mmcv: bins of a malformed box (of negative size) have no gradient. mmcv leaves
their argmax at 0 and so adds their gradient to the first pixel.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather
from ..contract import require_shape
from .rois import LOWEST, check_rois, keep_greater


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
    well_formed = (rois[:, 3:] + 1 > rois[:, 1:3]).all(1)[:, None]
    position = argmax.reshape(k, -1).to(torch.int64)
    plane = ((image * c)[:, None] + torch.arange(c, device=image.device)) * (h * w)
    plane = plane.repeat_interleave(pooled_height * pooled_width, 1)
    inside = (position >= 0) & (position < h * w) & well_formed
    index = torch.where(inside, plane + position, n * c * h * w)
    grad = grad_output.reshape(-1, 1).to(gather.compute_dtype(grad_input))
    total = gather.scatter_sum(grad, index.view(-1, 1), torch.ones_like(grad), n * c * h * w)
    grad_input += total.view(grad_input.shape).to(grad_input.dtype)
