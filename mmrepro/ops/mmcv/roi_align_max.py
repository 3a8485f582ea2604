"""The 'max' mode of RoIAlign.

Signature: ``mmcv/ops/roi_align.py``; formula: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). A value
replaces the best one only when it is greater, in mmcv's order of visits: ties go to the first
sample, and NaN never wins.

A sample is shared by all channels. So one sample of every bin is visited at a time, boxes with many
samples first; the boxes that still have one are then a prefix of the list.
"""
from __future__ import annotations

from typing import Iterator, List, NamedTuple, Tuple

import torch
from torch import Tensor

from .. import gather, sampling
from .rois import Rois

__all__ = ['align_backward', 'align_forward']

# What the maximum over nothing is, and where the search starts: mmcv's -FLT_MAX.
LOWEST = torch.finfo(torch.float32).min


class _Visit(NamedTuple):
    """Sample number ``ordinal`` of the first B / P boxes: taps (B, 4) and position (B, 1)."""

    ordinal: int
    row: Tensor
    weight: Tensor
    y: Tensor
    x: Tensor


def _visits(boxes: Rois, shape: torch.Size, bins: Tuple[int, int]) -> Iterator[_Visit]:
    """The samples of boxes that are sorted by their number of samples, most first."""
    ph, pw = bins
    n, _, height, width = shape
    dtype, device = boxes.y.dtype, boxes.y.device
    counts = (boxes.grid.y * boxes.grid.x).tolist()
    top = boxes.y[:, None] + torch.arange(ph, dtype=dtype, device=device) * boxes.bin_h[:, None]
    left = boxes.x[:, None] + torch.arange(pw, dtype=dtype, device=device) * boxes.bin_w[:, None]
    base = (boxes.image * (height * width))[:, None, None, None]
    k = len(counts)
    for ordinal in range(max(counts, default=0)):
        while counts[k - 1] <= ordinal:
            k -= 1
        grid_y, grid_x = boxes.grid.y[:k], boxes.grid.x[:k]
        iy = torch.div(ordinal, grid_x, rounding_mode='floor')
        ix = ordinal - iy * grid_x
        y = top[:k] + ((iy + 0.5) * boxes.bin_h[:k] / grid_y)[:, None]
        x = left[:k] + ((ix + 0.5) * boxes.bin_w[:k] / grid_x)[:, None]
        y, x = y[:, :, None].expand(k, ph, pw), x[:, None, :].expand(k, ph, pw)
        taps = sampling.clamped_corners(y, x, height, width)
        row = torch.where(taps.live, taps.row + base[:k], n * height * width)
        yield _Visit(ordinal, row.reshape(-1, 4).to(torch.int32), taps.weight.reshape(-1, 4),
                     y.reshape(-1, 1), x.reshape(-1, 1))


def _sorted(boxes: Rois) -> Tuple[Rois, Tensor]:
    order = torch.sort(boxes.grid.y * boxes.grid.x, descending=True, stable=True).indices
    return boxes.select(order), order


def _chunks(output: Tensor) -> Iterator[Tuple[int, int]]:
    step = gather.chunk_rows(output.device, output[0].numel())
    for a in range(0, len(output), step):
        yield a, min(a + step, len(output))


def align_forward(feature: Tensor, boxes: Rois, output: Tensor, argmax_y: Tensor,
                  argmax_x: Tensor) -> None:
    """RoIAlign's maximum; see :func:`mmrepro.ops.mmcv.roi_align.roi_align_forward`."""
    rows = gather.rows_of(feature)
    boxes, order = _sorted(boxes)
    for a, b in _chunks(output):
        best = rows.new_full(((b - a) * output[0, 0].numel(), output.shape[1]), LOWEST)
        winner = torch.zeros(best.shape, dtype=torch.int32, device=best.device)
        # Column 0 of the positions is "no sample".
        at_y, at_x = [best.new_full((len(best), 1), -1)], [best.new_full((len(best), 1), -1)]
        for visit in _visits(boxes.select(slice(a, b)), feature.shape, output.shape[2:]):
            # The maximum of torch would let NaN win.
            value = gather.read(rows, visit.row, visit.weight).nan_to_num_(
                nan=LOWEST, posinf=float('inf'), neginf=float('-inf'))
            part = slice(0, len(value))
            wins = (value > best[part]).to(torch.int32).mul_(visit.ordinal + 1)
            torch.maximum(best[part], value, out=best[part])
            # Later samples have greater numbers, so the last win is the greatest.
            torch.maximum(winner[part], wins, out=winner[part])
            for positions, one in ((at_y, visit.y), (at_x, visit.x)):
                positions.append(torch.cat((one, one.new_zeros((len(best) - len(one), 1)))))
        which = winner.to(torch.int64)
        for out, result in ((output, best), (argmax_y, torch.cat(at_y, 1).gather(1, which)),
                            (argmax_x, torch.cat(at_x, 1).gather(1, which))):
            gather.put_some(out, order[a:b], result)


def _samples_at(at: Tensor, start: Tensor, size: Tensor, grid: Tensor, stored: torch.dtype,
                number: torch.dtype) -> Tensor:
    """Which sample along one axis lies at a stored position, counted from 1; 0 if none does.

    Args:
        at: (K, C, P) positions. start: (K, P) of the bins. size, grid: (K,) of a bin, its samples.
        stored: dtype that the positions went through. number: of the result (K, C, P).
    """
    found = torch.zeros(at.shape, dtype=number, device=at.device)
    for ordinal in range(int(grid.amax())):
        there = gather.through(start + ((ordinal + 0.5) * size / grid)[:, None], stored)[:, None]
        rows = (grid > ordinal).nonzero()[:, 0].tolist()
        # few boxes have many samples: then one by one, the others would cost as much
        parts = rows if 2 * len(rows) < len(at) else [slice(None)]
        if len(parts) == 1:
            there.masked_fill_((grid <= ordinal)[:, None, None], float('nan'))
        for part in parts:
            hit = gather.equal(at[part], there[part]).view(torch.int8).to(number)
            torch.maximum(found[part], hit.mul_(ordinal + 1), out=found[part])
    return found


def _winners(boxes: Rois, argmax_y: Tensor, argmax_x: Tensor, order: Tensor) -> Tensor:
    """Which sample won, (K*P, C) by bin of the sorted boxes: its ordinal + 1.

    0 is none, -1 is none of ours (see :func:`_spread_strays`). In low precision neighbours can
    share a stored position; then it is one of them.
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
        # mmcv marks "no sample" with y = -1, and so drops a winner that lies exactly there.
        nowhere = gather.equal(at_y, at_y.new_full((1,), -1)).to(number)
        ordinal.mul_(nowhere.neg_().add_(1))
        winner[a * ph * pw:b * ph * pw] = gather.bags(ordinal)
    return winner


def align_backward(grad_output: Tensor, boxes: Rois, argmax_y: Tensor, argmax_x: Tensor,
                   grad_input: Tensor) -> None:
    """The gradient of :func:`align_forward`, added to ``grad_input``.

    The channels that a sample won are spread together: one sort per sample, instead of one entry
    per element and corner.
    """
    boxes, order = _sorted(boxes)
    winner = _winners(boxes, argmax_y, argmax_x, order)
    grad = torch.empty(winner.shape, dtype=boxes.y.dtype, device=winner.device)
    for a, b in _chunks(grad_output):
        part = slice(a * len(grad) // len(order), b * len(grad) // len(order))
        grad[part] = gather.bags(grad_output.index_select(0, order[a:b]))
    sink = gather.Sink(grad_input)
    source, waiting, used = torch.empty_like(grad), [], 0
    for visit in _visits(boxes, grad_input.shape, grad_output.shape[2:]):
        # Late visits are of few boxes: several of them go together, up to the size of the first.
        if used + len(visit.y) > len(source):
            _spread_visits(sink, waiting, source[:used])
            waiting, used = [], 0
        gather.keep(grad[:len(visit.y)], winner[:len(visit.y)], visit.ordinal + 1, source[used:])
        waiting.append(visit)
        used += len(visit.y)
    if waiting:
        _spread_visits(sink, waiting, source[:used])
    sink.close()
    if int(winner.amin()) < 0:
        stray = winner == -1
        at_y = gather.bags(argmax_y.index_select(0, order))[stray]
        at_x = gather.bags(argmax_x.index_select(0, order))[stray]
        _spread_strays(grad[stray], at_y, at_x, stray, boxes.image, grad_input)


def _spread_visits(sink: gather.Sink, visits: List[_Visit], source: Tensor) -> None:
    # a sample at NaN has weights that are NaN and has won nothing; 0 times NaN must not spread
    weight = torch.cat([visit.weight for visit in visits]).nan_to_num_(nan=0.)
    sink.spread(source, torch.cat([visit.row for visit in visits]), weight)


def _spread_strays(grad: Tensor, at_y: Tensor, at_x: Tensor, stray: Tensor, image: Tensor,
                   grad_input: Tensor) -> None:
    """Gradient of winners that are no sample of ours: another kernel rounded its positions."""
    n, c, h, w = grad_input.shape
    bag, channel = stray.nonzero().unbind(1)
    places = stray.shape[0] // len(image)
    taps = sampling.clamped_corners(at_y, at_x, h, w)
    plane = image.index_select(0, torch.div(bag, places, rounding_mode='floor')) * c + channel
    index = torch.where(taps.live, taps.row + (plane * (h * w))[:, None], n * c * h * w)
    part = gather.spread(grad[:, None], index, taps.weight, n * c * h * w)
    grad_input += part.view_as(grad_input).to(grad_input.dtype)
