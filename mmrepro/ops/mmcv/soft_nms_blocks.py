"""Soft-NMS in blocks: the factors of the best boxes at once, then one product per chosen box.

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


class TiedScores(Exception):
    """Two boxes have the best score, and no working order is kept to choose between them."""


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
        """Exchange ``box`` and the box at ``position``."""
        displaced, old = self.at[position], self.where[box]
        self.at[position], self.at[old] = box, displaced
        self.where[box], self.where[displaced] = position, old

    def drop(self, boxes: list[int]) -> None:
        """Fill the positions of ``boxes`` with the remaining boxes from the end."""
        gone = set(boxes)
        left = self.count - len(gone)
        holes = sorted(hole for hole in map(self.where.__getitem__, boxes) if hole < left)
        last = [box for box in reversed(self.at[left:self.count]) if box not in gone]
        for hole, box in zip(holes, last):
            self.at[hole], self.where[box] = box, hole
        self.count = left

    def first(self, boxes: list[int]) -> int:
        """Return the index in ``boxes`` of the one that comes first in this order."""
        return min(range(len(boxes)), key=lambda i: self.where[boxes[i]])


def ordinary(cols: np.ndarray, scores: np.ndarray, sigma: np.float32,
             least: np.float32) -> bool:
    """Whether no NaN can appear and no factor exceeds 1, as :func:`decide` expects."""
    return bool(least > 0 and sigma > 0 and np.isfinite(cols).all() and (cols[4] > 0).all()
                and np.isfinite(scores).all())


def negated_corners(cols: np.ndarray) -> np.ndarray:
    """Copy columns (5, N) with x1 and y1 negated: one minimum gives all corners that meet."""
    table = cols.copy()
    table[:2] *= -1
    return table


def _overlaps(table: np.ndarray, rows: np.ndarray, offset: int, room: torch.Tensor) -> np.ndarray:
    """Return the overlaps of boxes ``rows`` with all boxes, (K, N).

    ``table`` is of :func:`negated_corners`. The result lies in ``room``, of at least 4 * K * N
    elements.
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


class _Sweep:
    """The boxes that are not decided, as rows of a table, and those that were chosen."""

    def __init__(self, cols: np.ndarray, scores: np.ndarray, least: np.float32,
                 order: WorkingOrder | None) -> None:
        self.table, self.score = negated_corners(cols), scores.copy()
        self.box = np.arange(len(scores))  # of each row
        self.least, self.order = least, order
        self.decided = np.zeros(len(scores), bool)  # rows; kept with an order only
        self.chosen: list[int] = []
        self.final: list[np.float32] = []  # the scores of the chosen boxes

    def forget_decided(self, wanted: int | None) -> int | None:
        """Remove the rows of decided boxes; return where row ``wanted`` is then."""
        keep = (self.score >= self.least).nonzero()[0]
        self.table, self.score = self.table.take(keep, 1), self.score.take(keep)
        self.box, self.decided = self.box.take(keep), np.zeros(len(keep), bool)
        return None if wanted is None else int(keep.searchsorted(wanted))

    def likely(self, wanted: int | None) -> np.ndarray:
        """Return the rows that will be chosen soon: those with the best scores, and ``wanted``."""
        count = min(_ROWS, max(_LEAST_ROWS, _ELEMENTS // len(self.score)))
        if len(self.score) <= count:
            return np.arange(len(self.score))
        best = self.score.argpartition(-count)[-count:]
        if self.order is not None:
            # equal scores by the working order
            best = (self.score >= self.score[best].min()).nonzero()[0]
            where = [self.order.where[box] for box in self.box[best].tolist()]
            best = best[np.lexsort((where, -self.score[best]))[:count]]
        if wanted is not None and wanted not in best:
            best = np.append(best, wanted)
        return best

    def best(self) -> int | None:
        """Return the row of the best score; None if all that is left is below the least score.

        The best of all boxes is chosen whatever its score.
        """
        row = int(self.score.argmax())
        value = self.score[row]
        if self.chosen and value < self.least:
            return None
        self.score[row] = _TAKEN  # so that the next maximum shows a tie
        tied = self.score[self.score.argmax()] == value
        self.score[row] = value
        if not tied:
            return row
        if self.order is None:
            raise TiedScores
        rows = (self.score == value).nonzero()[0]
        return int(rows[self.order.first(self.box[rows].tolist())])

    def choose(self, row: int, factor: np.ndarray) -> None:
        """Choose the box of ``row``, and multiply the scores of the others by ``factor``."""
        box = int(self.box[row])
        self.chosen.append(box)
        self.final.append(self.score[row])
        self.score[row] = _TAKEN
        np.multiply(self.score, factor, out=self.score)
        if self.order is not None:
            self.order.choose(box, len(self.chosen) - 1)
            self.decided[row] = True
            low = self.score < self.least
            if np.count_nonzero(low) != np.count_nonzero(self.decided):
                self.order.drop(self.box[low != self.decided].tolist())
                self.decided = low


def decide(cols: np.ndarray, scores: np.ndarray, decay: Decay, least: np.float32, offset: int,
           order: WorkingOrder | None) -> tuple[list[int], list[np.float32]]:
    """Return the boxes in the order in which they are chosen, and their scores then.

    ``cols`` (5, N) float32 are x1, y1, x2, y2, area. Boxes whose score falls below ``least`` are
    dropped, except the best of all. Raises TiedScores if scores tie and ``order`` is None.
    """
    count, sweep = len(scores), _Sweep(cols, scores, least, order)
    # one buffer for all blocks: allocating memory costs as much as filling it
    room = torch.empty(4 * (count + min(_ROWS * count, max(_LEAST_ROWS * count, _ELEMENTS))))
    row: int | None = None
    while True:
        if sweep.chosen:
            row = sweep.forget_decided(row)
        rows = sweep.likely(row)
        factors = dict(zip(rows.tolist(), decay(_overlaps(sweep.table, rows, offset, room))))
        row = sweep.best()
        while row is not None and row in factors:
            sweep.choose(row, factors[row])
            row = sweep.best()
        if row is None:
            return sweep.chosen, sweep.final
