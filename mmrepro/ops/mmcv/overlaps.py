"""Pairs of axis-aligned boxes that overlap by more than a threshold, without testing every pair.

The test is mmcv's, in float32 (:func:`exceeds`). On a CPU most pairs are excluded before it:
``batched_nms`` moves boxes of different classes apart, so boxes form groups that do not touch, and
within a group boxes that overlap by more than a threshold have similar left edges.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .greedy_nms import Conflicts, greedy, greedy_pairs, resolve

# Elements of a temporary matrix, by device: near the L2 cache on a CPU, few launches on CUDA.
TILE = {'cpu': 1 << 16, 'cuda': 1 << 23}
# Boxes decided at a time, by device: early drops pay on a CPU, synchronizations cost on CUDA.
BLOCK = {'cpu': 256, 'cuda': 4096}
# A group is swept densely if more than this share of its pairs would have to be listed.
_LISTED_SHARE = 0.5
# Up to this many boxes the number of calls matters more than that of pairs: see keep_few.
FEW = 256
# Smaller groups are never swept densely, because of the fixed cost of a sweep.
_DENSE_GROUP = 256
# Never list more pairs than this: 64 MiB of indices.
_LISTED_LIMIT = 1 << 22
# Rounding moves a float32 overlap of at least _LEAST by less than _SLACK of itself.
_SLACK = 1e-5
_LEAST = 0.01
# Smaller areas are not normal float32 numbers, so their rounding is not bounded.
_TINY_AREA = 1e-30


def columns(boxes: Tensor, offset: int) -> Tensor:
    """Return x1, y1, x2, y2, area (5, N) of boxes (N, 4), whose sides are longer by ``offset``."""
    cols = boxes.new_empty((5, len(boxes)))
    cols[:4] = boxes.T
    size = (cols[2:4] - cols[:2]).add_(offset)
    torch.mul(size[0], size[1], out=cols[4])
    return cols


def overlaps(a: Tensor, b: Tensor, offset: int) -> Tensor:
    """Return intersection over union of columns (5, ...) in float32, broadcast against each other.

    The order of operations is that of mmcv's CPU kernel, and so are the bits.
    """
    other = torch.maximum(a[0], b[0])
    inter = torch.minimum(a[2], b[2]).sub_(other)
    height = torch.minimum(a[3], b[3]).sub_(torch.maximum(a[1], b[1], out=other))
    if offset:
        inter.add_(offset)
        height.add_(offset)
    inter.clamp_(min=0).mul_(height.clamp_(min=0))
    return inter.div_(torch.add(a[4], b[4], out=other).sub_(inter))


def exceeds(a: Tensor, b: Tensor, threshold: float, offset: int, equal: bool = False) -> Tensor:
    """Whether :func:`overlaps` exceed ``threshold`` (or reach it, if ``equal``); NaN does not."""
    overlap = overlaps(a, b, offset)
    if overlap.is_cuda:
        return overlap >= threshold if equal else overlap > threshold
    # NumPy compares floats six times faster than torch
    compare = np.greater_equal if equal else np.greater
    return torch.from_numpy(compare(overlap.numpy(), np.float32(threshold)))


def dense_conflicts(cols: Tensor, threshold: float, offset: int, equal: bool = False) -> Conflicts:
    """Return the conflicts of columns (5, N), for :func:`mmrepro.ops.mmcv.greedy_nms.greedy`."""
    def conflicts(rows: Tensor, others: Tensor) -> Tensor:
        a = cols.index_select(1, rows)[:, :, None]
        b = cols.index_select(1, others)[:, None]
        step = max(1, TILE[cols.device.type] // max(1, len(others)))
        return torch.cat([exceeds(part, b, threshold, offset, equal)
                          for part in a.split(step, dim=1)])

    return conflicts


class _ByLeftEdge:
    """Boxes sorted by their left edge, and for each the number of next ones that may conflict.

    An overlap above t needs an overlap above t on each axis; intervals do not overlap that much if
    the second begins more than (1 - t) lengths of the first to its right.
    """

    def __init__(self, cols: np.ndarray, threshold: float, offset: int) -> None:
        self.ranks = np.argsort(cols[0])
        x1, self.top, x2, y2 = cols[:4, self.ranks].astype(np.float64)
        share = 1 - threshold * (1 - _SLACK)
        self.lowest = self.top + share * (y2 - self.top + offset)
        ends = np.searchsorted(x1, x1 + share * (x2 - x1 + offset), 'right')
        self.count = ends - np.arange(1, len(x1) + 1)
        reach = np.maximum.accumulate(x2 + offset)
        self.group = np.concatenate([[0], np.cumsum(x1[1:] > reach[:-1])])

    def take_crowded_groups(self) -> list[np.ndarray]:
        """Remove the groups to be swept densely; return their ranks, ascending."""
        size = np.bincount(self.group)
        listed = np.bincount(self.group, weights=self.count)
        large = size >= _DENSE_GROUP
        crowded = large & (listed > _LISTED_SHARE * size * size / 2)
        if listed[~crowded].sum() > _LISTED_LIMIT:
            crowded = large
        self.count[crowded[self.group]] = 0
        ends = np.cumsum(size)
        return [np.sort(self.ranks[ends[g] - size[g]:ends[g]]) for g in np.flatnonzero(crowded)]

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pairs of ranks whose intervals are close on both axes, a bounded number each."""
        ends = np.cumsum(self.count)
        start, count = 0, len(ends)
        while start < count:
            done = ends[start - 1] if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, done + TILE['cpu'], 'right')))
            if ends[stop - 1] > done:
                yield self._pairs(start, stop, ends[start:stop] - done)
            start = stop

    def _pairs(self, start: int, stop: int, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts = self.count[start:stop]
        position = np.arange(start, stop)
        second = np.arange(ends[-1])
        second += np.repeat(position + 1 - (ends - counts), counts)
        near = self.top.take(second) <= np.repeat(self.lowest[start:stop], counts)
        near &= np.repeat(self.top[start:stop], counts) <= self.lowest.take(second)
        near = np.flatnonzero(near)
        first = np.repeat(position, counts).take(near)
        return self.ranks.take(first), self.ranks.take(second.take(near))


def keep_few(boxes: np.ndarray, scores: np.ndarray, threshold: float,
             offset: int) -> np.ndarray | None:
    """Return the indices of the kept boxes, best first, of few boxes (N, 4).

    This takes few NumPy calls: only pairs that meet along x are listed, and their overlaps have the
    arithmetic of :func:`overlaps`. NaN never conflicts. None if a score is NaN or the threshold is
    negative.
    """
    order = (-scores).argsort(kind='stable')
    if threshold < 0 or scores[order[-1]] != scores[order[-1]]:
        return None
    by_left = boxes[:, 0].argsort()
    cols = np.empty((5, len(order)), np.float32)
    boxes.T.take(by_left, 1, cols[:4], 'clip')
    first, second = _pairs_that_meet(cols[0], cols[2], offset)
    with np.errstate(all='ignore'):
        overlap = _overlaps_of_pairs(cols, first, second, offset)
    conflicts = (overlap > np.float32(threshold)).nonzero()[0]
    if not len(conflicts):
        return order
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    rank = rank.take(by_left)
    first, second = rank.take(first.take(conflicts)), rank.take(second.take(conflicts))
    kept = greedy_pairs(len(order), np.minimum(first, second), np.maximum(first, second))
    return order.take(kept)


def _pairs_that_meet(left: np.ndarray, right: np.ndarray, offset: int
                     ) -> tuple[np.ndarray, np.ndarray]:
    """List all pairs of intervals that meet; ``left`` (N,) ascends. Two arrays of indices."""
    # twice the offset, because widths are rounded after its addition
    ends = left.searchsorted(right + 2 * offset if offset else right, 'right')
    position = np.arange(len(left))
    count = np.maximum(ends - position - 1, 0)  # the pairs of which each interval is the first
    first = position.repeat(count)
    # the last pair of an interval is with the one before its end, those before count up to it
    second = (ends - count.cumsum()).repeat(count)
    second += np.arange(len(first))
    return first, second


def _overlaps_of_pairs(cols: np.ndarray, first: np.ndarray, second: np.ndarray, offset: int
                       ) -> np.ndarray:
    """Return the overlaps of pairs of columns (5, N), whose areas are filled in here."""
    size = cols[2:4] - cols[:2]
    if offset:
        size += np.float32(offset)
    np.multiply(size[0], size[1], out=cols[4])
    # with x1 and y1 negated, one minimum gives both corners of an intersection
    np.negative(cols[:2], out=cols[:2])
    a, b = cols.take(first, 1), cols.take(second, 1)
    union = a[4] + b[4]
    meet = np.minimum(a[:4], b[:4], out=a[:4])
    size = meet[2:]
    size += meet[:2]
    if offset:
        size += np.float32(offset)
    np.maximum(size, 0, out=size)
    inter = np.multiply(size[0], size[1], out=size[0])
    union -= inter
    inter /= union
    return inter


def keep_cpu(cols: Tensor, threshold: float, offset: int) -> Tensor:
    """Return ranks of the kept boxes, given their columns (5, N) by rank, on a CPU."""
    count = cols.shape[1]
    if count <= BLOCK['cpu']:
        return resolve(exceeds(cols[:, :, None], cols[:, None], threshold, offset)).nonzero()[:, 0]
    x1, y1, x2, y2, area = cols.numpy()
    # all boxes are finite, none is inverted, and rounding is bounded for all
    ordinary = (np.isfinite(cols.numpy()).all() and (x1 <= x2).all() and (y1 <= y2).all()
                and ((area == 0) | (area > _TINY_AREA)).all())
    if threshold < _LEAST or not ordinary:
        everything = dense_conflicts(cols, threshold, offset)
        return greedy(count, everything, cols.device, BLOCK['cpu'])
    order = _ByLeftEdge(cols.numpy(), threshold, offset)
    dropped = np.zeros(count, bool)
    for ranks in order.take_crowded_groups():
        group = cols.index_select(1, torch.from_numpy(ranks))
        dropped[ranks] = True
        stays = greedy(len(ranks), dense_conflicts(group, threshold, offset), cols.device,
                       BLOCK['cpu'])
        dropped[ranks[stays.numpy()]] = False
    first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for a, b in order.chunks():
        better, worse = (cols.index_select(1, torch.from_numpy(ranks)) for ranks in (a, b))
        hit = exceeds(better, worse, threshold, offset).numpy()
        first.append(np.minimum(a[hit], b[hit]))
        second.append(np.maximum(a[hit], b[hit]))
    kept = np.zeros(count, bool)
    kept[greedy_pairs(count, np.concatenate(first), np.concatenate(second))] = True
    return torch.from_numpy(np.flatnonzero(kept & ~dropped))
