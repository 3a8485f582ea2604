"""The 'max' mode of RoIAlign.

Signature: ``mmcv/ops/roi_align.py``; formula: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). The
samples of a bin are visited in mmcv's order; see :mod:`.maximum`.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from .maximum import keep_greatest, prefixes, scatter_to_winners
from .rois import LOWEST, Rois


class _Visit(NamedTuple):
    """One sample of each of the first B bins: taps (B, 4) and position (B, 1)."""

    row: Tensor
    weight: Tensor
    y: Tensor
    x: Tensor


def _visits(boxes: Rois, shape: torch.Size, bins: Sequence[int]) -> Iterator[_Visit]:
    """Yield the samples of boxes, which are sorted by their number of samples, most first."""
    ph, pw = bins
    n, _, height, width = shape
    dtype, device = boxes.y.dtype, boxes.y.device
    top = boxes.y[:, None] + torch.arange(ph, dtype=dtype, device=device) * boxes.bin_h[:, None]
    left = boxes.x[:, None] + torch.arange(pw, dtype=dtype, device=device) * boxes.bin_w[:, None]
    base = (boxes.image * (height * width))[:, None, None, None]
    for ordinal, k in prefixes((boxes.grid.y * boxes.grid.x).tolist()):
        grid_y, grid_x = boxes.grid.y[:k], boxes.grid.x[:k]
        iy = torch.div(ordinal, grid_x, rounding_mode='floor')
        ix = ordinal - iy * grid_x
        y = top[:k] + ((iy + 0.5) * boxes.bin_h[:k] / grid_y)[:, None]
        x = left[:k] + ((ix + 0.5) * boxes.bin_w[:k] / grid_x)[:, None]
        y, x = y[:, :, None].expand(k, ph, pw), x[:, None, :].expand(k, ph, pw)
        taps = sampling.clamped_corners(y, x, height, width)
        row = torch.where(taps.live, taps.row + base[:k], n * height * width)
        yield _Visit(row.reshape(-1, 4).to(torch.int32), taps.weight.reshape(-1, 4),
                     y.reshape(-1, 1), x.reshape(-1, 1))


def _sorted(boxes: Rois) -> tuple[Rois, Tensor]:
    order = torch.sort(boxes.grid.y * boxes.grid.x, descending=True, stable=True).indices
    return boxes.select(order), order


def _chunks(output: Tensor) -> Iterator[tuple[int, int]]:
    for part in gather.slices(len(output), gather.chunk_rows(output.device, output[0].numel())):
        yield part.start, part.stop


def align_forward(feature: Tensor, boxes: Rois, output: Tensor, argmax_y: Tensor,
                  argmax_x: Tensor) -> None:
    """Compute RoIAlign's maximum; see :func:`mmrepro.ops.mmcv.roi_align.roi_align_forward`."""
    rows = gather.rows_of(feature)
    boxes, order = _sorted(boxes)
    for a, b in _chunks(output):
        best = rows.new_full(((b - a) * output[0, 0].numel(), output.shape[1]), LOWEST)
        # column 0 of the positions stands for no sample
        at_y, at_x = [best.new_full((len(best), 1), -1)], [best.new_full((len(best), 1), -1)]
        visits = _visits(boxes.select(slice(a, b)), feature.shape, output.shape[2:])
        winner = keep_greatest(best, _values(rows, visits, at_y, at_x))
        which = winner.to(torch.int64)
        for out, result in ((output, best), (argmax_y, torch.cat(at_y, 1).gather(1, which)),
                            (argmax_x, torch.cat(at_x, 1).gather(1, which))):
            gather.put_some(out, order[a:b], result)


def _values(rows: Tensor, visits: Iterator[_Visit], at_y: list[Tensor], at_x: list[Tensor]
            ) -> Iterator[Tensor]:
    """Yield the values of visits, and append their positions, padded to all bins, to the lists."""
    for visit in visits:
        missing = len(at_y[0]) - len(visit.y)
        for positions, position in ((at_y, visit.y), (at_x, visit.x)):
            positions.append(torch.cat((position, position.new_zeros((missing, 1)))))
        yield gather.gather_sum(rows, visit.row, visit.weight)


def _samples_at(at: Tensor, start: Tensor, size: Tensor, grid: Tensor, stored: torch.dtype,
                number: torch.dtype) -> Tensor:
    """Return the number, from 1, of the sample at a stored position on an axis; 0 for none.

    Positions ``at`` (K, C, P) were rounded to the dtype ``stored``; ``start`` (K, P) and ``size``
    (K,) are those of bins with ``grid`` (K,) samples. The result is of the dtype ``number``.
    """
    result = torch.zeros(at.shape, dtype=number, device=at.device)
    for ordinal in range(int(grid.amax())):
        there = start + ((ordinal + 0.5) * size / grid)[:, None]
        there = there.to(stored).to(there.dtype)[:, None]
        rows = (grid > ordinal).nonzero()[:, 0].tolist()
        # few boxes have many samples: compare them one by one
        parts = rows if 2 * len(rows) < len(at) else [slice(None)]
        if len(parts) == 1:
            there.masked_fill_((grid <= ordinal)[:, None, None], float('nan'))
        for part in parts:
            hit = gather.equal(at[part], there[part]).view(torch.int8).to(number)
            torch.maximum(result[part], hit.mul_(ordinal + 1), out=result[part])
    return result


def _winners(boxes: Rois, argmax_y: Tensor, argmax_x: Tensor, order: Tensor) -> Tensor:
    """Return the winning visit of each bin of the sorted boxes, (K*P, C), from 1.

    0 stands for no sample, -1 for a position at which there is none (see :func:`_scatter_strays`).
    In low precision neighbours may share a stored position; the result is then one of them.
    """
    ph, pw = argmax_y.shape[2:]
    dtype, device = boxes.y.dtype, boxes.y.device
    counts = boxes.grid.y * boxes.grid.x
    number = torch.int8 if int(counts[0]) < torch.iinfo(torch.int8).max else torch.int32
    winner = torch.empty((len(order) * ph * pw, argmax_y.shape[1]), dtype=number, device=device)
    top = boxes.y[:, None] + torch.arange(ph, dtype=dtype, device=device) * boxes.bin_h[:, None]
    left = boxes.x[:, None] + torch.arange(pw, dtype=dtype, device=device) * boxes.bin_w[:, None]
    top, left = top.repeat_interleave(pw, 1), left.repeat(1, ph)
    for a, b in _chunks(argmax_y):
        some = boxes.select(slice(a, b))
        at_y, at_x = (at.index_select(0, order[a:b]).flatten(2).to(dtype)
                      for at in (argmax_y, argmax_x))
        iy = _samples_at(at_y, top[a:b], some.bin_h, some.grid.y, argmax_y.dtype, number)
        ix = _samples_at(at_x, left[a:b], some.bin_w, some.grid.x, argmax_x.dtype, number)
        ours = torch.minimum(iy, ix).clamp_(max=1)
        ordinal = iy.sub_(1).mul_(some.grid.x.to(number)[:, None, None]).add_(ix)
        ordinal.mul_(ours).add_(ours.sub_(1))
        # mmcv marks "no sample" with y = -1, and so drops a winner at exactly that position
        no_sample = gather.equal(at_y, at_y.new_full((1,), -1)).to(number)
        ordinal.mul_(no_sample.neg_().add_(1))
        winner[a * ph * pw:b * ph * pw] = gather.bags(ordinal)
    return winner


def align_backward(grad_output: Tensor, boxes: Rois, argmax_y: Tensor, argmax_x: Tensor,
                   grad_input: Tensor) -> None:
    """Add the gradient of :func:`align_forward` to ``grad_input``."""
    boxes, order = _sorted(boxes)
    winner = _winners(boxes, argmax_y, argmax_x, order)
    grad = torch.empty(winner.shape, dtype=boxes.y.dtype, device=winner.device)
    for a, b in _chunks(grad_output):
        part = slice(a * len(grad) // len(order), b * len(grad) // len(order))
        grad[part] = gather.bags(grad_output.index_select(0, order[a:b]))
    # a sample at NaN has weights of NaN and never wins; 0 times NaN must not be added
    taps = ((visit.row, visit.weight.nan_to_num_(nan=0.))
            for visit in _visits(boxes, grad_input.shape, grad_output.shape[2:]))
    scatter_to_winners(grad, winner, taps, gather.Sink(grad_input))
    if int(winner.amin()) < 0:
        stray = winner == -1
        at_y = gather.bags(argmax_y.index_select(0, order))[stray]
        at_x = gather.bags(argmax_x.index_select(0, order))[stray]
        _scatter_strays(grad[stray], at_y, at_x, stray, boxes.image, grad_input)


def _scatter_strays(grad: Tensor, at_y: Tensor, at_x: Tensor, stray: Tensor, image: Tensor,
                    grad_input: Tensor) -> None:
    """Add the gradient of winners that are no sample here: another kernel rounded positions."""
    n, c, h, w = grad_input.shape
    bag, channel = stray.nonzero().unbind(1)
    per_roi = stray.shape[0] // len(image)
    taps = sampling.clamped_corners(at_y, at_x, h, w)
    plane = image.index_select(0, torch.div(bag, per_roi, rounding_mode='floor')) * c + channel
    index = torch.where(taps.live, taps.row + (plane * (h * w))[:, None], n * c * h * w)
    part = gather.scatter_sum(grad[:, None], index, taps.weight, n * c * h * w)
    grad_input += part.view_as(grad_input).to(grad_input.dtype)
