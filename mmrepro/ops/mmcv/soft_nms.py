"""Soft-NMS: the best box lowers the scores of those that it overlaps, then the next best does.

Semantics are mmcv 2.1.0's softnms (csrc/pytorch/cpu/nms.cpp), including ties. Boxes have a working
order: a chosen box changes positions with the first undecided one, the last box moves to the
position of a dropped one, and of equal scores the first in this order is chosen.
"""
from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold_

from ..contract import describe, require, require_dtype, require_shape
from .overlaps import columns
from .soft_nms_blocks import WorkingOrder, decide, ordinary

# mmcv's codes of methods.
NAIVE, LINEAR, GAUSSIAN = 0, 1, 2

# The boxes that a chosen one affects, and the factors for their scores.
Neighbours = Callable[[int], tuple[np.ndarray, np.ndarray]]


class _Decay:
    """Which overlaps change a score, and by what factor; in float32."""

    def __init__(self, method: int, threshold: float, sigma: float) -> None:
        self.method = method
        self.threshold, self.sigma = np.float32(threshold), np.float32(sigma)

    def acts(self, overlap: np.ndarray) -> np.ndarray:
        if self.method == GAUSSIAN:
            return overlap != 0
        return overlap >= self.threshold

    def factor(self, overlap: np.ndarray) -> np.ndarray:
        if self.method == NAIVE:
            return np.zeros_like(overlap)
        if self.method == LINEAR:
            return np.float32(1) - overlap
        # rounded from float64: equal to the C library's expf but for one case in thousands
        exponent = -(overlap * overlap) / self.sigma
        return np.exp(exponent, dtype=np.float64).astype(np.float32)

    def apply(self, overlap: np.ndarray) -> np.ndarray:
        """Replace overlaps, none of them NaN, by factors; 1 where they change nothing."""
        if self.method == LINEAR:
            # threshold_ keeps what is above: the greatest number below the threshold
            below = float(np.nextafter(self.threshold, np.float32(-np.inf)))
            threshold_(torch.from_numpy(overlap), below, 0.)
            return np.subtract(np.float32(1), overlap, out=overlap)
        flat = overlap.reshape(-1)
        acts = self.acts(flat).nonzero()[0]
        factor = self.factor(flat.take(acts))
        flat.fill(1)
        flat[acts] = factor
        return overlap


def _compared(cols: np.ndarray, decay: _Decay, offset: int) -> Neighbours:
    """Neighbours, found by comparing with every box."""
    table = cols.copy()
    # with x1 and y1 negated, one minimum gives both corners of an intersection
    table[:2] *= -1
    corners, area, step = table[:4], table[4], np.float32(offset)

    def neighbours(chosen: int) -> tuple[np.ndarray, np.ndarray]:
        meet = np.minimum(corners, corners[:, chosen, None])
        size = meet[2:] + meet[:2]
        if offset:
            size += step
        np.maximum(size, 0, out=size)
        inter = size[0] * size[1]
        union = area + area[chosen]
        union -= inter
        inter /= union
        acts = decay.acts(inter).nonzero()[0]
        return acts, decay.factor(inter[acts])

    return neighbours


class _Order:
    """The working order (see :class:`WorkingOrder`) for any input, with scores by position."""

    def __init__(self, scores: np.ndarray) -> None:
        self.score = scores.copy()
        self.at, self.where = np.arange(len(scores)), np.arange(len(scores))
        self.count = len(scores)

    def choose(self, position: int) -> int:
        """Move the first best undecided box to ``position``; NaN is chosen only if it is there."""
        score = self.score[position:self.count]
        best = int(score.argmax())
        if score[best] != score[best]:
            best = 0 if score[0] != score[0] else int(np.nanargmax(score))
        if best:
            best += position
            for values in (self.score, self.at):
                values[position], values[best] = values[best], values[position]
            self.where[self.at[best]] = best
            self.where[self.at[position]] = position
        return int(self.at[position])

    def drop(self, gone: np.ndarray) -> None:
        """Fill the positions ``gone`` (ascending) with the remaining boxes from the end."""
        left = self.count - len(gone)
        self.where[self.at[gone]] = -1
        holes = gone[gone < left]
        if len(holes):
            stays = np.ones(self.count - left, bool)
            stays[gone[len(holes):] - left] = False
            moved = left + stays.nonzero()[0][::-1]
            self.score[holes] = self.score[moved]
            self.at[holes] = self.at[moved]
            self.where[self.at[holes]] = holes
        self.count = left


def _run(order: _Order, neighbours: Neighbours, least: np.float32) -> None:
    """Decide position after position; drop boxes with scores below ``least``."""
    position = 0
    while position < order.count:
        targets, factor = neighbours(order.choose(position))
        if position and not len(targets):
            position += 1
            continue
        touched = order.where[targets]
        ahead = touched > position
        touched = touched[ahead]
        score = order.score[touched] * factor[ahead]
        order.score[touched] = score
        low = touched[score < least]
        if position == 0:
            # later only a touched score can be below
            low = np.flatnonzero(order.score[1:] < least) + 1
        if len(low):
            low.sort()
            order.drop(low)
        position += 1


def _soft(cols: np.ndarray, scores: np.ndarray, decay: _Decay, least: np.float32,
          offset: int) -> tuple[Tensor, np.ndarray]:
    """Boxes that stay, in the order in which they are chosen, and their scores."""
    with np.errstate(all='ignore'):
        if not ordinary(cols, scores, decay.sigma, least):
            order = _Order(scores)
            _run(order, _compared(cols, decay, offset), least)
            return torch.from_numpy(order.at[:order.count]), order.score[:order.count]
        found = None
        if len(np.unique(scores)) == len(scores):
            found = decide(cols, scores, decay.apply, least, offset, None)
        chosen, final = found or decide(cols, scores, decay.apply, least, offset,
                                        WorkingOrder(len(scores)))
    return torch.tensor(chosen), np.array(final, np.float32)


def softnms(boxes: Tensor, scores: Tensor, dets: Tensor, iou_threshold: float, sigma: float,
            min_score: float, method: int, offset: int) -> Tensor:
    """Lower the scores of overlapped boxes; drop those that fall below ``min_score``.

    Args:
        boxes: (N, 4) float32 on the CPU, x1 y1 x2 y2. scores: (N,) float32.
        dets: (N, 5) float32; boxes with their final scores are written to its first K rows.
        iou_threshold: overlaps of at least this count (methods 0 and 1).
        sigma: width of the Gaussian (method 2).
        min_score: boxes whose score falls below it are dropped, except the best of all.
        method: 0 naive, 1 linear, 2 Gaussian.
        offset: 0 or 1; widths and heights are ``x2 - x1 + offset``.

    Returns:
        (K,) int64, in the order of ``dets``.
    """
    if boxes.numel() == 0:
        return torch.empty(0, dtype=torch.long, device=boxes.device)
    require_shape('softnms', 'boxes', boxes, (None, 4))
    require_shape('softnms', 'scores', scores, (len(boxes),))
    require_shape('softnms', 'dets', dets, (len(boxes), 5))
    for name, tensor in (('boxes', boxes), ('scores', scores), ('dets', dets)):
        require_dtype('softnms', name, tensor, (torch.float32,))
        require(not tensor.is_cuda, 'softnms', f'{name} must be on the CPU, {describe(tensor)}')
    kept, final = _soft(columns(boxes.detach(), offset).numpy(), scores.detach().numpy(),
                        _Decay(method, iou_threshold, sigma), np.float32(min_score), offset)
    dets[:len(kept), :4] = boxes.detach()[kept]
    dets[:len(kept), 4] = torch.from_numpy(final)
    return kept
