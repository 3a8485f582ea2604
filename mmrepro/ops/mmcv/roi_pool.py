"""RoIPool: the greatest pixel of every bin of axis-aligned boxes.

Signature: ``mmcv/ops/roi_pool.py``; formula: ``roi_pool_cuda_kernel.cuh`` (mmcv 2.1.0). The
pixels of a bin are visited row by row; see :mod:`.maximum`.

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
from .maximum import keep_greatest, prefixes, scatter_to_winners
from .rois import LOWEST, check_rois


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
    for ordinal, length in prefixes(bins.pixels.tolist()):
        columns = bins.columns[:length]
        row = torch.div(ordinal, columns, rounding_mode='floor')
        yield bins.first[:length] + row * width + (ordinal - row * columns)


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
    step = gather.chunk_rows(output.device, output[0].numel())
    for which in order.split(step):
        bins = _bins(input.shape, rois.index_select(0, which), image.index_select(0, which),
                     pooled, spatial_scale)
        best = rows.new_full((len(bins.order), rows.shape[1]), LOWEST)
        best[bins.pixels == 0] = 0
        winner = keep_greatest(best, (rows.index_select(0, bins.base[:len(pixel)] + pixel)
                                      for pixel in _visits(bins, input.shape[3])))
        for out, result in ((output, best), (argmax, _positions(winner, bins, input.shape[3]))):
            gather.put_some(out, which, torch.empty_like(result).index_copy_(0, bins.order, result))


def _positions(winner: Tensor, bins: _Bins, width: int) -> Tensor:
    """Convert visit numbers from 1 to positions in the image; 0 to -1."""
    number = (winner - 1).clamp_(min=0)
    columns = bins.columns.clamp(min=1).to(torch.int32)[:, None]
    row = torch.div(number, columns, rounding_mode='floor')
    position = bins.first.to(torch.int32)[:, None] + row * width + (number - row * columns)
    lost = (winner == 0).to(torch.int32)
    return position * (1 - lost) - lost


def _numbers(argmax: Tensor, bins: _Bins, width: int) -> Tensor:
    """Convert positions to visit numbers (B, C), in the order of ``bins``; 0 outside of a bin."""
    most = int(bins.pixels[0]) if len(bins.pixels) else 0
    number = torch.int8 if most < torch.iinfo(torch.int8).max else torch.int32
    winner = torch.empty(argmax.shape, dtype=number, device=argmax.device)
    count, columns, first = (column.to(torch.int32)[:, None]
                             for column in (bins.pixels, bins.columns.clamp(min=1), bins.first))
    for part in gather.slices(len(argmax), gather.chunk_rows(argmax.device, argmax.shape[1])):
        at = argmax.index_select(0, bins.order[part]).sub_(first[part])
        row = torch.div(at, width, rounding_mode='floor')
        column = at.sub_(row * width)
        inside = (row >= 0) & (column < columns[part])
        visit = row.mul_(columns[part]).add_(column).add_(1)
        winner[part] = visit.mul_(inside & (visit <= count[part]))
    return winner


def roi_pool_backward(grad_output: Tensor, rois: Tensor, argmax: Tensor, grad_input: Tensor,
                      pooled_height: int, pooled_width: int, spatial_scale: float) -> None:
    """Add the gradient of :func:`roi_pool_forward` to ``grad_input`` (N, C, H, W)."""
    pooled = (pooled_height, pooled_width)
    image = check_rois('roi_pool', grad_input, rois)
    require_shape('roi_pool', 'argmax', argmax, tuple(grad_output.shape))
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    w = grad_input.shape[3]
    bins = _bins(grad_input.shape, rois, image, pooled, spatial_scale)
    winner = _numbers(gather.bags(argmax), bins, w)
    grad = gather.bags(grad_output).index_select(0, bins.order)
    rows = ((bins.base[:len(pixel)] + pixel).to(torch.int32)[:, None] for pixel in _visits(bins, w))
    scatter_to_winners(grad, winner, ((row, torch.ones_like(row, dtype=grad.dtype))
                                      for row in rows), gather.Sink(grad_input, whole=True))
