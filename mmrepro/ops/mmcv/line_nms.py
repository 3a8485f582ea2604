"""Non-maximum suppression of lanes (CLRNet): ``line_nms_forward``.

Semantics of onedl-mmcv 2.3.6 (csrc/common/cuda/line_nms_cuda_kernel.cuh), which has it for CUDA
only. mmcv itself does not have it. The kernel takes the lane of a column by its rank, but that of a
row by its position in the input. So a lane of rank r drops those that are near the r-th lane of the
input. The fork's tests ask for that result, and so it is here; for lanes that are given in the
order of their scores it is what it should be.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_tensor
from .greedy_nms import greedy, rank
from .overlaps import BLOCK

OFFSETS = 72  # x of a lane at so many heights; the kernel is compiled for this number
WIDTH = 5 + OFFSETS
_START, _LENGTH, _FIRST = 2, 4, 5  # columns
_INT = torch.iinfo(torch.int32)


def _truncated(values: Tensor) -> Tensor:
    """As a cast to int in CUDA: towards zero, NaN is 0, and what is too large is the largest."""
    return values.double().nan_to_num(0., _INT.max, _INT.min).clamp(_INT.min, _INT.max).long()


def _ends(lanes: Tensor) -> list[Tensor]:
    """Return the first and the last height of each lane, (N,) int64."""
    start = lanes[:, _START]
    if lanes.dtype == torch.float16:
        start = (start * (OFFSETS - 1)).float() + .5
    else:  # rounded once, as a fused multiply-add does
        start = (start.double() * (OFFSETS - 1) + .5).to(start.dtype)
    start = _truncated(start)
    return [start, start + _truncated(lanes[:, _LENGTH]) - 1]


def _near(rows: Tensor, columns: Tensor, threshold: Tensor) -> Tensor:
    """Whether lanes are nearer than ``threshold`` on average, at the heights that both have.

    Distances are added height by height, in the dtype of the lanes.
    """
    (start, end), (other_start, other_end) = _ends(rows), _ends(columns)
    start = torch.maximum(start[:, None], other_start)
    end = torch.minimum(end[:, None], other_end).clamp_(max=OFFSETS - 1)
    xs, others = (lanes[:, _FIRST:].T.contiguous() for lanes in (rows, columns))
    distance = xs.new_zeros(start.shape)
    for height in range(OFFSETS):
        gap = (xs[height, :, None] - others[height]).abs_()
        distance += gap.masked_fill_((start > height) | (end < height), 0)
    common = end - start + 1
    near = distance < threshold * common.to(distance.dtype)
    return near & (common > 0) & (start >= 0)


def line_nms_forward(boxes: Tensor, scores: Tensor, thresh: float, top_k: int) -> list[Tensor]:
    """Keep the best lane, drop those near it, go on with the next, until ``top_k`` are kept.

    Args:
        boxes: (N, 77), a lane each: column 2 is where it starts, from 0 to 1; column 4 at how many
            heights it is; columns 5 and up are its x at 72 heights. Others are not read.
        scores: (N,). Equal scores are broken by lower index.
        thresh: mean distance below which lanes are near.
        top_k: at least 1.

    Returns:
        Three int64 tensors. (N,): indices of the kept lanes, best score first, then zeros. ():
        how many are kept. (N,): by which a lane is represented, the number of itself if it is kept,
        else of the last kept one that is near it; numbers begin with 1, and 0 is none.
    """
    operator = 'line_nms_forward'
    require_tensor(operator, 'boxes', boxes, (None, WIDTH),
                   (torch.float32, torch.float64, torch.float16))
    require(scores.shape == boxes.shape[:1], operator,
            f'one score per lane: boxes {describe(boxes)}, scores {describe(scores)}')
    require(top_k > 0, operator, f'top_k must be at least 1, got {top_k}')
    lanes, count = boxes.detach(), len(boxes)
    order = rank(scores)
    threshold = torch.tensor(float(np.float32(thresh)), dtype=lanes.dtype, device=lanes.device)

    def conflicts(ranks: Tensor, others: Tensor) -> Tensor:
        return _near(lanes[ranks], lanes[order[others]], threshold)

    block = BLOCK[lanes.device.type]
    kept = greedy(count, conflicts, lanes.device, block)[:top_k]
    keep, parent = torch.zeros_like(order), torch.zeros_like(order)
    if not count:
        return [keep, keep.sum(), parent]
    keep[:len(kept)] = order[kept]
    everyone = torch.arange(count, device=lanes.device)
    numbers = torch.arange(1, len(kept) + 1, device=lanes.device)[:, None]
    for best, number in zip(kept[:, None].split(block), numbers.split(block)):
        found = conflicts(best[:, 0], everyone) & (everyone > best) | (everyone == best)
        last = (found * number).amax(0)
        parent[order] = torch.where(last > 0, last, parent[order])
    return [keep, torch.tensor(len(kept), device=lanes.device), parent]
