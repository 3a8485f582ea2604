"""The 'max' mode of RoIAlign.

Signature: ``mmcv/ops/roi_align.py``; formula: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). A value
replaces the best one only when it is greater, in mmcv's order of visits: ties go to the first
sample, and NaN never wins.

A sample is shared by all channels. So one sample of every bin is visited at a time, boxes with many
samples first; the boxes that still have one are then a prefix of the list.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mmrepro.ops import gather, sampling

if TYPE_CHECKING:
    from mmrepro.ops.roi import Boxes

__all__ = ['align_backward', 'align_forward']

# What the maximum over nothing is, and where the search starts: mmcv's -FLT_MAX.
LOWEST = torch.finfo(torch.float32).min

# Elements of the output to compare at once, so that the comparison stays in the cache.
CHUNK = 1 << 18


class _Visit(NamedTuple):
    """Sample number ``ordinal`` of the first B / P boxes: taps (B, 4) and position (B, 1)."""

    ordinal: int
    row: Tensor
    weight: Tensor
    y: Tensor
    x: Tensor


def _visits(boxes: Boxes, shape: torch.Size, bins: tuple[int, int]) -> Iterator[_Visit]:
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


def _sorted(boxes: Boxes) -> tuple[Boxes, Tensor]:
    order = torch.sort(boxes.grid.y * boxes.grid.x, descending=True, stable=True).indices
    return boxes.pick(order), order


def _chunks(output: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // output[0].numel())
    for a in range(0, len(output), step):
        yield a, min(a + step, len(output))


def align_forward(feature: Tensor, boxes: Boxes, output: Tensor, argmax_y: Tensor,
                  argmax_x: Tensor) -> None:
    """RoIAlign's maximum; see :func:`mmrepro.ops.roi.roi_align_forward`."""
    rows = gather.rows_of(feature)
    boxes, order = _sorted(boxes)
    for a, b in _chunks(output):
        best = rows.new_full(((b - a) * output[0, 0].numel(), output.shape[1]), LOWEST)
        winner = torch.zeros(best.shape, dtype=torch.int32, device=best.device)
        # Column 0 of the positions is "no sample".
        at_y, at_x = [best.new_full((len(best), 1), -1)], [best.new_full((len(best), 1), -1)]
        for visit in _visits(boxes.part(a, b), feature.shape, output.shape[2:]):
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
            piece = torch.empty_like(out[a:b])
            gather.put_rows(piece, result)
            out.index_copy_(0, order[a:b], piece)


def _winners(boxes: Boxes, argmax_y: Tensor, argmax_x: Tensor, order: Tensor,
             shape: torch.Size) -> Tensor:
    """Which sample won, (K*P, C) int32 by bin of the sorted boxes: its ordinal + 1.

    0 is none; one more than the largest number of samples is none of ours.
    """
    places = argmax_y[0, 0].numel()
    winner = torch.empty((len(order) * places, argmax_y.shape[1]), dtype=torch.int32,
                         device=argmax_y.device)
    most = _most(boxes)
    for a, b in _chunks(argmax_y):
        at_y = gather.bags(argmax_y.index_select(0, order[a:b]))
        at_x = gather.bags(argmax_x.index_select(0, order[a:b]))
        # mmcv marks "no sample" with y = -1, and so drops a winner that lies exactly there.
        # Counted down: samples in one place share their position, and the first one won.
        found = (at_y == -1).to(torch.int32).mul_(most + 1)
        for visit in _visits(boxes.part(a, b), shape, argmax_y.shape[2:]):
            part = slice(0, len(visit.y))
            # The stored position went through the dtype of the features.
            match = at_y[part] == gather.through(visit.y, argmax_y.dtype)
            match &= at_x[part] == gather.through(visit.x, argmax_x.dtype)
            torch.maximum(found[part], match.to(torch.int32).mul_(most - visit.ordinal),
                          out=found[part])
        torch.sub(most + 1, found, out=winner[a * places:b * places])
    return winner


def _most(boxes: Boxes) -> int:
    return int((boxes.grid.y * boxes.grid.x).amax())


def align_backward(grad_output: Tensor, boxes: Boxes, argmax_y: Tensor, argmax_x: Tensor,
                   grad_input: Tensor) -> None:
    """The gradient of :func:`align_forward`, added to ``grad_input``.

    The channels that a sample won are spread together: one sort per sample, instead of one entry
    per element and corner.
    """
    n, _, h, w = grad_input.shape
    boxes, order = _sorted(boxes)
    winner = _winners(boxes, argmax_y, argmax_x, order, grad_input.shape)
    grad = gather.bags(grad_output.index_select(0, order))
    total = grad.new_zeros((n * h * w, grad_input.shape[1]))
    waiting: list[_Visit] = []
    for visit in _visits(boxes, grad_input.shape, grad_output.shape[2:]):
        waiting.append(visit)
        # Late visits are of few boxes: several of them go together, up to the size of the first.
        if sum(len(v.y) for v in waiting) + len(visit.y) > len(grad):
            total += _spread_visits(waiting, grad, winner, n * h * w)
            waiting = []
    if waiting:
        total += _spread_visits(waiting, grad, winner, n * h * w)
    gather.add_rows(grad_input, total)
    stray = winner == _most(boxes) + 1
    if bool(stray.any()):
        at_y = gather.bags(argmax_y.index_select(0, order))[stray]
        at_x = gather.bags(argmax_x.index_select(0, order))[stray]
        _spread_strays(grad[stray], at_y, at_x, stray, boxes.image, grad_input)


def _spread_visits(visits: list[_Visit], grad: Tensor, winner: Tensor, size: int) -> Tensor:
    source = torch.cat([gather.keep(grad[:len(v.y)], winner[:len(v.y)] == v.ordinal + 1)
                        for v in visits])
    return gather.spread(source, torch.cat([v.row for v in visits]),
                         torch.cat([v.weight for v in visits]), size)


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
