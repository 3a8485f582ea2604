"""Soft-NMS: the best box lowers the scores of those that it overlaps, then the next best does.

Semantics are mmcv 2.1.0's softnms (csrc/pytorch/cpu/nms.cpp), including ties. Boxes have a working
order: a chosen box changes positions with the first undecided one, the last box moves to the
position of a dropped one, and of equal scores the first in this order is chosen.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_tensor
from .overlaps import columns

# mmcv's codes of methods.
NAIVE, LINEAR, GAUSSIAN = 0, 1, 2


def _decay(overlap: np.ndarray, method: int, threshold: np.float32, sigma: np.float32
           ) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of overlaps that change a score, and the factors by which they do."""
    acts = (overlap != 0 if method == GAUSSIAN else overlap >= threshold).nonzero()[0]
    overlap = overlap[acts]
    if method == NAIVE:
        return acts, np.zeros_like(overlap)
    if method == LINEAR:
        return acts, np.float32(1) - overlap
    # rounded from float64: equal to the C library's expf but for one case in thousands
    exponent = -(overlap * overlap) / sigma
    return acts, np.exp(exponent, dtype=np.float64).astype(np.float32)


def _soft(cols: np.ndarray, scores: np.ndarray, method: int, threshold: np.float32,
          sigma: np.float32, least: np.float32, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes that stay, in the order in which they are chosen, and their scores."""
    # by position; with x1 and y1 negated, one minimum gives all corners that meet
    table = cols.copy()
    table[:2] *= -1
    score, box = scores.copy(), np.arange(len(scores))
    position, count = 0, len(box)
    while position < count:
        best = position + _first_best(score[position:count])
        chosen = table[:, best, None].copy()
        table[:, best] = table[:, position]  # nobody reads that of a chosen box again
        for values in (score, box):
            values[position], values[best] = values[best], values[position]
        position += 1
        others = table[:, position:count]
        meet = np.minimum(others[:4], chosen[:4])
        size = meet[2:]
        size += meet[:2]
        if offset:
            size += np.float32(offset)
        np.maximum(size, 0, out=size)
        inter = size[0] * size[1]
        overlap = inter / (others[4] + chosen[4] - inter)
        acts, factors = _decay(overlap, method, threshold, sigma)
        score[position + acts] *= factors
        gone = (score[position:count] < least).nonzero()[0]
        if len(gone):
            gone += position
            left = count - len(gone)
            # the last boxes that stay, from the end, fill the positions of those that are dropped
            moved = np.setdiff1d(np.arange(left, count), gone)[::-1]
            for values in (table, score, box):
                values[..., gone[gone < left]] = values[..., moved]
            count = left
    return box[:count], score[:count]


def _first_best(score: np.ndarray) -> int:
    """Return the first index of the greatest score; NaN only if the first score is NaN."""
    best = int(score.argmax())
    if np.isnan(score[best]):
        return 0 if np.isnan(score[0]) else int(np.nanargmax(score))
    return best


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
    threshold, width, least = map(np.float32, (iou_threshold, sigma, min_score))
    with np.errstate(all='ignore'):
        kept, final = _soft(columns(boxes.detach(), offset).numpy(), scores.detach().numpy(),
                            method, threshold, width, least, offset)
    chosen = torch.from_numpy(kept)
    dets[:len(chosen), :4] = boxes.detach()[chosen]
    dets[:len(chosen), 4] = torch.from_numpy(final)
    return chosen
