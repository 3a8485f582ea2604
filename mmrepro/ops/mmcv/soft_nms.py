"""Soft-NMS: the best box lowers the scores of those that it overlaps, then the next best does.

Semantics are mmcv 2.1.0's softnms (csrc/pytorch/cpu/nms.cpp), including ties. Boxes have a working
order: a chosen box changes positions with the first undecided one, the last box moves to the
position of a dropped one, and of equal scores the first in this order is chosen.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import threshold

from ..contract import describe, require, require_tensor
from .overlaps import columns
from .soft_nms_blocks import TiedScores, WorkingOrder, decide, negated_corners, ordinary

# mmcv's codes of methods.
NAIVE, LINEAR, GAUSSIAN = 0, 1, 2


class _Decay:
    """The factors by which overlaps change scores; in float32."""

    def __init__(self, method: int, threshold: float, sigma: float) -> None:
        self.method = method
        self.threshold, self.sigma = np.float32(threshold), np.float32(sigma)

    def acts(self, overlap: np.ndarray) -> np.ndarray:
        """Whether each overlap changes a score."""
        if self.method == GAUSSIAN:
            return overlap != 0
        return overlap >= self.threshold

    def factor(self, overlap: np.ndarray) -> np.ndarray:
        """Return the factors of overlaps that change a score."""
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
            # this keeps what is above: the greatest number below the threshold
            below = float(np.nextafter(self.threshold, np.float32(-np.inf)))
            threshold(torch.from_numpy(overlap), below, 0., inplace=True)
            return np.subtract(np.float32(1), overlap, out=overlap)
        flat = overlap.reshape(-1)
        acts = self.acts(flat).nonzero()[0]
        factor = self.factor(flat.take(acts))
        flat.fill(1)
        flat[acts] = factor
        return overlap


def _plain_loop(cols: np.ndarray, scores: np.ndarray, decay: _Decay, least: np.float32,
                offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Decide position after position, for any input; see :class:`WorkingOrder`.

    Returns the boxes that stay, in the order in which they are chosen, and their scores.
    """
    box, score = np.arange(len(scores)), scores.copy()  # by position
    table, step = negated_corners(cols), np.float32(offset)
    position, count = 0, len(scores)
    while position < count:
        best = position + _first_best(score[position:count])
        for values in (box, score):
            values[position], values[best] = values[best], values[position]
        chosen, others = table[:, box[position], None], table.take(box[position + 1:count], 1)
        size = np.minimum(others[:4], chosen[:4])
        size = np.maximum(size[2:] + size[:2] + step, 0)
        inter = size[0] * size[1]
        overlap = inter / (others[4] + chosen[4] - inter)
        position += 1
        acts = decay.acts(overlap).nonzero()[0]
        score[position + acts] *= decay.factor(overlap[acts])
        gone = position + (score[position:count] < least).nonzero()[0]
        if len(gone):
            left = count - len(gone)
            # the last boxes that stay, from the end, fill the positions of those that are dropped
            moved = np.setdiff1d(np.arange(left, count), gone)[::-1]
            for values in (box, score):
                values[gone[gone < left]] = values[moved]
            count = left
    return box[:count], score[:count]


def _first_best(score: np.ndarray) -> int:
    """Return the first index of the greatest score; NaN only if the first score is NaN."""
    best = int(score.argmax())
    if np.isnan(score[best]):
        return 0 if np.isnan(score[0]) else int(np.nanargmax(score))
    return best


def _soft(cols: np.ndarray, scores: np.ndarray, decay: _Decay, least: np.float32,
          offset: int) -> tuple[Tensor, np.ndarray]:
    """Return the boxes that stay, in the order in which they are chosen, and their scores."""
    with np.errstate(all='ignore'):
        if not ordinary(cols, scores, decay.sigma, least):
            kept, final = _plain_loop(cols, scores, decay, least, offset)
            return torch.from_numpy(kept), final
        arguments = cols, scores, decay.apply, least, offset
        try:
            order = None if len(np.unique(scores)) == len(scores) else WorkingOrder(len(scores))
            chosen, scores_then = decide(*arguments, order)
        except TiedScores:
            chosen, scores_then = decide(*arguments, WorkingOrder(len(scores)))
    return torch.tensor(chosen), np.array(scores_then, np.float32)


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
    count = boxes.shape[:1]
    for name, tensor, shape in (('boxes', boxes, (None, 4)), ('scores', scores, count),
                                ('dets', dets, (*count, 5))):
        require_tensor('softnms', name, tensor, shape, (torch.float32,))
        require(not tensor.is_cuda, 'softnms', f'{name} must be on the CPU, {describe(tensor)}')
    kept, final = _soft(columns(boxes.detach(), offset).numpy(), scores.detach().numpy(),
                        _Decay(method, iou_threshold, sigma), np.float32(min_score), offset)
    dets[:len(kept), :4] = boxes.detach()[kept]
    dets[:len(kept), 4] = torch.from_numpy(final)
    return kept
