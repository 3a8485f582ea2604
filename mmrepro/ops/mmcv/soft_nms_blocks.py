"""Soft-NMS in blocks: the overlaps of the best boxes at once, then one product per box.

A chosen box multiplies the scores of the others by factors. The products are computed one by one in
the order in which boxes are chosen, so scores have the bits of the plain loop. The boxes that come
next are likely those with the best scores now, so their factors are computed ahead, in one block.
Boxes that were chosen or dropped leave the table at the next block.
"""
from __future__ import annotations

from typing import Callable

import numpy as np
import torch

# Rows of factors computed at once: fewer need more calls, more are wasted more often.
_ROWS = 32
# Elements of those rows, so that temporaries fit the cache; but at least _LEAST_ROWS rows.
_ELEMENTS = 1 << 17
_LEAST_ROWS = 4
# The score of a chosen box: below every limit, also after products with factors.
_TAKEN = np.float32(-1)

# Replaces overlaps (K, N) float32 by factors, in place.
Decay = Callable[[np.ndarray], np.ndarray]


class WorkingOrder:
    """The order of boxes by which mmcv breaks ties.

    A chosen box changes positions with the first undecided one; the last box moves to the position
    of a dropped one. ``at`` is the box at each position, ``where`` the position of each box, and
    ``count`` the number of boxes that are not dropped.
    """

    def __init__(self, count: int) -> None:
        self.at, self.where = list(range(count)), list(range(count))
        self.count = count

    def choose(self, box: int, position: int) -> None:
        other, old = self.at[position], self.where[box]
        self.at[position], self.at[old] = box, other
        self.where[box], self.where[other] = position, old

    def drop(self, boxes: list[int]) -> None:
        gone = set(boxes)
        left = self.count - len(gone)
        holes = sorted(hole for hole in map(self.where.__getitem__, boxes) if hole < left)
        last = [box for box in reversed(self.at[left:self.count]) if box not in gone]
        for hole, box in zip(holes, last):
            self.at[hole], self.where[box] = box, hole
        self.count = left

    def first(self, boxes: list[int]) -> int:
        return min(range(len(boxes)), key=lambda i: self.where[boxes[i]])


def ordinary(cols: np.ndarray, scores: np.ndarray, sigma: float, least: float) -> bool:
    """Whether inputs are such that no NaN appears and no factor exceeds 1.

    :func:`decide` then gives the result of the plain loop.
    """
    return bool(least > 0 and sigma > 0 and np.isfinite(cols).all() and (cols[4] > 0).all()
                and np.isfinite(scores).all())


def _overlaps(table: np.ndarray, rows: np.ndarray, offset: int, room: torch.Tensor) -> np.ndarray:
    """Overlaps of ``rows`` with all boxes, (K, N), in ``room``.

    x1 and y1 are negated in ``table``, so one minimum gives both corners of an intersection.
    """
    a, b = torch.from_numpy(table)[:, None], torch.from_numpy(table.take(rows, 1))[:, :, None]
    shape = 4, len(rows), table.shape[1]
    meet = room[:shape[0] * shape[1] * shape[2]].view(shape)
    torch.minimum(a[:4], b[:4], out=meet)
    size = meet[2:].add_(meet[:2])
    if offset:
        size.add_(offset)
    size.clamp_(min=0)
    union = torch.add(a[4], b[4], out=meet[0]).numpy()
    inter = torch.mul(size[0], size[1], out=size[0]).numpy()
    union -= inter
    inter /= union
    return inter


def _guess(score: np.ndarray, names: np.ndarray, needed: int | None,
           order: WorkingOrder | None) -> np.ndarray:
    """Boxes to compute factors for: those with the best scores, and ``needed``."""
    count = min(_ROWS, max(_LEAST_ROWS, _ELEMENTS // len(score)))
    if len(score) <= count:
        return np.arange(len(score))
    best = score.argpartition(-count)[-count:]
    if order is not None:
        # equal scores by the working order
        best = (score >= score[best].min()).nonzero()[0]
        where = [order.where[box] for box in names[best].tolist()]
        best = best[np.lexsort((where, -score[best]))[:count]]
    if needed is not None and needed not in best:
        best = np.append(best, needed)
    return best


def decide(cols: np.ndarray, scores: np.ndarray, decay: Decay, least: np.float32, offset: int,
           order: WorkingOrder | None) -> tuple[list[int], list[np.float32]] | None:
    """Boxes in the order in which they are chosen, and their scores then.

    ``cols`` (5, N) float32 are x1, y1, x2, y2, area. Boxes whose score falls below ``least`` are
    dropped, except the best of all. ``order`` is needed for ties; if None, a tie gives None.
    """
    table, score, names = cols.copy(), scores.copy(), np.arange(len(scores))
    np.negative(table[:2], out=table[:2])
    chosen: list[int] = []
    final: list[np.float32] = []
    needed, count = None, len(scores)
    # one buffer for all blocks: allocating memory costs as much as filling it
    room = torch.empty(4 * (count + min(_ROWS * count, max(_LEAST_ROWS * count, _ELEMENTS))))
    while True:
        if chosen:
            keep = (score >= least).nonzero()[0]
            if needed is not None:
                needed = int(keep.searchsorted(needed))
            table, score, names = table.take(keep, 1), score.take(keep), names.take(keep)
        rows = _guess(score, names, needed, order)
        factors = dict(zip(rows.tolist(), decay(_overlaps(table, rows, offset, room))))
        known, fallen = np.zeros(len(score), bool), 0
        while True:
            best = int(score.argmax())
            value = score[best]
            if chosen and value < least:
                return chosen, final
            score[best] = _TAKEN
            if score[score.argmax()] == value:
                if order is None:
                    return None
                score[best] = value
                equal = (score == value).nonzero()[0]
                best = int(equal[order.first(names[equal].tolist())])
                score[best] = _TAKEN
            factor = factors.get(best)
            if factor is None:
                score[best], needed = value, best
                break
            chosen.append(int(names[best]))
            final.append(value)
            np.multiply(score, factor, out=score)
            if order is not None:
                order.choose(chosen[-1], len(chosen) - 1)
                known[best] = True
                low = score < least
                fallen += 1
                if np.count_nonzero(low) != fallen:
                    fresh = (low != known).nonzero()[0]
                    order.drop(names[fresh].tolist())
                    known, fallen = low, fallen + len(fresh)
