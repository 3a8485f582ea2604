"""Non-maximum suppression: nms, nms_rotated, nms_quadri, nms_match.

Semantics are mmcv 2.1.0's CPU kernels (csrc/pytorch/cpu/nms*.cpp), on every device: the overlap is
``inter / (area_a + area_b - inter)`` in float32, so CPU and CUDA keep the same boxes. (mmcv's CUDA
kernel compares ``inter > threshold * union``, which can differ in the last bit.) Equal scores are
broken by lower index, NaN scores come first, and a NaN box neither drops a box nor is dropped.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_tensor
from .box_iou import QUADRI, ROTATED, BoxKind, overlap_matrix
from .greedy_nms import greedy, rank
from .overlaps import BLOCK, columns, dense_conflicts, keep_cpu

# mmcv's rotated kernels drop a box whose overlap equals the threshold on a CPU, but not on CUDA.
# With a threshold of 0 that decides about all boxes, so each device keeps its rule.
_REACHES = {'cpu': torch.ge, 'cuda': torch.gt}


def check(boxes: Tensor, scores: Tensor) -> None:
    """Check shapes and dtype of boxes (N, 4) and scores (N,)."""
    require_tensor('nms', 'boxes', boxes, (None, 4), (torch.float32,))
    if scores.shape != boxes.shape[:1]:
        require(False, 'nms',
                f'one score per box: boxes {describe(boxes)}, scores {describe(scores)}')


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return indices of the boxes that no better box overlaps by more than ``iou_threshold``.

    Args:
        boxes: (N, 4) float32, x1 y1 x2 y2. scores: (N,).
        iou_threshold: overlaps above it (not equal to it) drop the lower score.
        offset: 0 or 1; widths and heights are ``x2 - x1 + offset``.

    Returns:
        (K,) int64, best score first.
    """
    if boxes.numel() == 0:
        return torch.empty(0, dtype=torch.long, device=boxes.device)
    check(boxes, scores)
    threshold = float(np.float32(iou_threshold))
    order = rank(scores)
    cols = columns(boxes.detach()[order], offset)
    if cols.is_cuda:
        kept = greedy(len(order), dense_conflicts(cols, threshold, offset), cols.device,
                      BLOCK['cuda'])
    else:
        kept = keep_cpu(cols, threshold, offset)
    return order[kept]


def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Return groups of boxes: a kept box, then those that it drops, in the order of their scores.

    ``dets`` is (N, 5) float32, x1 y1 x2 y2 score; overlaps of at least ``iou_threshold`` drop the
    lower score.
    """
    require_tensor('nms_match', 'dets', dets, (None, 5), (torch.float32,))
    dets = dets.detach().cpu()
    order = rank(dets[:, 4])
    cols = columns(dets[order, :4], 0)
    conflicts = dense_conflicts(cols, float(np.float32(iou_threshold)), 0, equal=True)
    kept = greedy(len(dets), conflicts, cols.device, BLOCK['cpu'])
    # the first kept box that a box conflicts with drops it; a kept box is its own
    owner = torch.arange(len(dets))
    dropped = torch.from_numpy(np.setdiff1d(owner.numpy(), kept.numpy()))
    if len(dropped):
        owner[dropped] = kept[conflicts(kept, dropped).byte().argmax(0)]
    groups: dict[int, list[int]] = {keeper: [] for keeper in kept.tolist()}
    for keeper, index in zip(owner.tolist(), order.tolist()):
        groups[keeper].append(index)
    return list(groups.values())


def _nms_shape(operator: str, kind: BoxKind, dets: Tensor, scores: Tensor,
               iou_threshold: float) -> Tensor:
    """Run NMS of rotated boxes or quadrilaterals; a column of labels is ignored."""
    if dets.numel() == 0:
        return torch.empty(0, dtype=torch.long, device=dets.device)
    width = kind.width
    require(dets.dim() == 2 and dets.shape[1] in (width, width + 1), operator,
            f'dets must have shape (N, {width}), or (N, {width + 1}) with labels, '
            f'got {describe(dets)}')
    require_dtype(operator, 'dets', dets, (torch.float32, torch.float64) if not dets.is_cuda else
                  (torch.float32, torch.float64, torch.float16))
    require(scores.shape == dets.shape[:1] and scores.dtype == dets.dtype, operator,
            f'one score per box, of its dtype: dets {describe(dets)}, scores {describe(scores)}')
    order = rank(scores)
    boxes = dets.detach()[order, :width].double().T.contiguous()
    reaches = _REACHES[dets.device.type]

    def conflicts(rows: Tensor, others: Tensor) -> Tensor:
        overlaps = overlap_matrix(kind, boxes.index_select(1, rows),
                                  boxes.index_select(1, others), 0)
        return reaches(overlaps.to(scores.dtype), float(np.float32(iou_threshold)))

    return order[greedy(len(order), conflicts, dets.device, BLOCK[dets.device.type])]


def nms_rotated(dets: Tensor, scores: Tensor, order: Tensor, dets_sorted: Tensor, labels: Tensor,
                iou_threshold: float, multi_label: int) -> Tensor:
    """Return indices of the rotated boxes that no better box overlaps, best score first.

    As in mmcv, boxes of different labels suppress each other. Scores are ranked here, because the
    ties in mmcv's ``order`` depend on the device; it is not used, nor are ``dets_sorted``,
    ``labels`` and ``multi_label``.

    Args:
        dets: (N, 5), or (N, 6) with labels: center x, y, width, height, angle in radians.
        scores: (N,) of the same dtype.
        iou_threshold: overlaps of at least this (on CUDA: above this) drop the lower score.
    """
    return _nms_shape('nms_rotated', ROTATED, dets, scores, iou_threshold)


def nms_quadri(dets: Tensor, scores: Tensor, order: Tensor, dets_sorted: Tensor,
               iou_threshold: float, multi_label: int) -> Tensor:
    """Run :func:`nms_rotated` for quadrilaterals (N, 8) or, with labels, (N, 9)."""
    return _nms_shape('nms_quadri', QUADRI, dets, scores, iou_threshold)
