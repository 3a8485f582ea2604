"""Boxes that overlap by more than a threshold: mmcv's test, in float32 (:func:`exceeds`).

On CUDA, boxes are compared in blocks (:func:`dense_conflicts`). On a CPU, only pairs that are close
along both axes are (:func:`keep_cpu`): ``batched_nms`` moves boxes of different classes apart, and
boxes that overlap by more than a threshold have similar left edges.
"""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from .greedy_nms import Conflicts, greedy, greedy_pairs

# Elements of a temporary matrix, by device: near the L2 cache on a CPU, few launches on CUDA.
TILE = {'cpu': 1 << 16, 'cuda': 1 << 23}
# Boxes decided at a time, by device: early drops pay on a CPU, synchronizations cost on CUDA.
BLOCK = {'cpu': 256, 'cuda': 4096}
# Close pairs per box from which on blocks are faster: crowds, most of which the first block drops.
_CLOSE = 32
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


def keep_cpu(cols: Tensor, threshold: float, offset: int) -> Tensor:
    """Return ranks of the kept boxes, given their columns (5, N) by rank, on a CPU."""
    (x1, y1, x2, y2, area), count = cols.numpy(), cols.shape[1]
    # all boxes are finite, none is inverted, and rounding is bounded for all
    ordinary = (np.isfinite(cols.numpy()).all() and (x1 <= x2).all() and (y1 <= y2).all()
                and ((area == 0) | (area > _TINY_AREA)).all())
    left = _CLOSE * count if threshold >= _LEAST and ordinary else -1
    first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for a, b in _close_pairs(cols.numpy(), threshold, offset) if left >= 0 else ():
        left -= len(a)
        if left < 0:
            break
        boxes, others = (cols.index_select(1, torch.from_numpy(ranks)) for ranks in (a, b))
        hit = exceeds(boxes, others, threshold, offset).numpy()
        first.append(np.minimum(a[hit], b[hit]))
        second.append(np.maximum(a[hit], b[hit]))
    if left < 0:
        return greedy(count, dense_conflicts(cols, threshold, offset), cols.device, BLOCK['cpu'])
    return torch.from_numpy(greedy_pairs(count, np.concatenate(first), np.concatenate(second)))


def _close_pairs(cols: np.ndarray, threshold: float, offset: int
                 ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of ranks that may overlap by more than ``threshold``, a bounded number each.

    An overlap above t needs an overlap above t on each axis; intervals do not overlap that much if
    the second begins more than (1 - t) lengths of the first to its right.
    """
    ranks = cols[0].argsort()
    x1, y1, x2, y2 = cols[:4, ranks].astype(np.float64)
    share = 1 - threshold * (1 - _SLACK)
    lowest = y1 + share * (y2 - y1 + offset)
    # the next boxes by left edge that are close to each
    counts = x1.searchsorted(x1 + share * (x2 - x1 + offset), 'right') - np.arange(1, len(x1) + 1)
    ends = counts.cumsum()
    cuts = ends.searchsorted(np.arange(TILE['cpu'], ends[-1], TILE['cpu']))
    for boxes in np.split(np.arange(len(x1)), cuts):
        count = counts[boxes]
        first = boxes.repeat(count)
        second = first + 1 + np.arange(len(first)) - (count.cumsum() - count).repeat(count)
        near = (y1.take(second) <= lowest.take(first)) & (y1.take(first) <= lowest.take(second))
        near = near.nonzero()[0]
        yield ranks.take(first.take(near)), ranks.take(second.take(near))
