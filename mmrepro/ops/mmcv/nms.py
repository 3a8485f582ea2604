"""Non-maximum suppression: nms, nms_rotated, nms_quadri, nms_match, softnms.

Semantics are mmcv 2.1.0's CPU kernels (csrc/pytorch/cpu/nms*.cpp), on every device: the overlap is
``inter / (area_a + area_b - inter)`` in float32, so CPU and CUDA keep the same boxes. (mmcv's CUDA
kernel compares ``inter > threshold * union``, which can differ in the last bit.) Equal scores are
broken by lower index, NaN scores come first, and a NaN box neither drops a box nor is dropped.

Every NMS keeps the best box, drops those that conflict with it, and goes on with the next, with its
own definition of a conflict. The result is unique, so it may be computed in blocks on any device
(:func:`greedy`) or from a list of conflicting pairs (:func:`greedy_pairs`). On a CPU only boxes
that are close along one axis are compared (:func:`keep_cpu`): ``batched_nms`` moves boxes of
different classes apart, and boxes that overlap by more than a threshold have similar left edges.

Soft-NMS lowers the scores of the boxes that the best one overlaps. They have a working order there:
a chosen box changes positions with the first undecided one, the last box moves to the position of a
dropped one, and of equal scores the first in this order is chosen.
"""
from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_tensor
from .box_iou import (
    QUADRI,
    ROTATED,
    TILE,
    BoxKind,
    columns,
    exceeds,
    host_overlaps,
    overlap_matrix,
    overlaps,
)

# The conflicts of boxes (rows) with others (columns), given by rank, as a bool matrix.
Conflicts = Callable[[Tensor, Tensor], Tensor]
# On CUDA a round costs microseconds, and looking at its result a synchronization.
_ROUNDS_PER_LOOK = 8


def rank(scores: Tensor) -> Tensor:
    """Return indices of ``scores`` (N,), best first; equal scores by lower index, NaN first.

    torch sorts NaN above every number, and so do mmcv's kernels.
    """
    return torch.sort(scores.detach(), dim=0, descending=True, stable=True).indices


def _rank_on_host(scores: Tensor) -> np.ndarray:
    """Compute :func:`rank` on a CPU, with NumPy's sort where it is the same: it starts faster."""
    if scores.dtype == torch.float32:
        worst_first = np.negative(scores.detach().numpy())
        order: np.ndarray = worst_first.argsort(kind='stable')
        if not np.isnan(worst_first[order[-1]]):  # NumPy sorts NaN behind all numbers
            return order
    return rank(scores).numpy()


def _resolve_rounds(conflicts: Tensor) -> Tensor:
    """Sweep one block in parallel rounds until the result is stable.

    A round keeps the boxes that no better kept box conflicts with. After r rounds every box whose
    chain of predecessors is shorter than r is final, so the loop ends with the sequential result.
    """
    # a product counts the kept boxes that drop each box: two calls, and exact in any precision
    better = conflicts.triu(1).t().to(torch.float32)
    kept = better.new_ones(len(better))
    while True:
        for _ in range(_ROUNDS_PER_LOOK):
            previous, kept = kept, torch.mv(better, kept).eq_(0)
        if torch.equal(previous, kept):
            return kept.to(torch.bool)


def resolve(conflicts: Tensor) -> Tensor:
    """Whether each box of a block is kept, (B,) bool, given conflicts (B, B) by rank.

    On a CPU a row is one integer, and a drop one `or`; the diagonal of ``conflicts`` is cleared.
    """
    if conflicts.is_cuda:
        return _resolve_rounds(conflicts)
    matrix = conflicts.numpy()
    count = len(matrix)
    np.fill_diagonal(matrix, False)
    bits = np.packbits(matrix, axis=1, bitorder='little')
    dropped = 0
    data, width = bits.tobytes(), bits.shape[1]
    for row in np.flatnonzero(bits.any(1)).tolist():
        if not dropped >> row & 1:
            later = int.from_bytes(data[row * width:(row + 1) * width], 'little') >> row + 1
            dropped |= later << row + 1
    packed = np.frombuffer(dropped.to_bytes((count + 7) // 8, 'little'), np.uint8)
    stays = ~np.unpackbits(packed, count=count, bitorder='little').astype(bool)
    return torch.from_numpy(stays)


def greedy(count: int, conflicts: Conflicts, device: torch.device, block: int) -> Tensor:
    """Return ranks of the kept boxes, ascending, on ``device``; rank 0 of ``count`` is the best.

    ``conflicts`` is called with two index tensors, ranks of rows and of columns. Boxes that a block
    of ``block`` boxes drops do not enter the next, and no matrix is larger than ``block`` x
    ``count``.
    """
    alive = torch.arange(count, device=device)
    kept = []
    while alive.numel():
        head, tail = alive[:block], alive[block:]
        head = head[resolve(conflicts(head, head))]
        kept.append(head)
        if tail.numel():
            matrix = conflicts(head, tail)
            # NumPy's reduction is ten times faster than torch's
            dead = matrix.any(0) if matrix.is_cuda else torch.from_numpy(
                np.bitwise_or.reduce(matrix.numpy().view(np.uint8), axis=0).view(bool))
            tail = tail[~dead]
        alive = tail
    return torch.cat(kept) if kept else alive


def greedy_pairs(count: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return ranks of the kept boxes, given all conflicting pairs (``first`` < ``second``)."""
    if not len(first):
        return np.arange(count)
    by_first = first.argsort()
    flags = bytearray(b'\1') * count
    for better, worse in zip(first.take(by_first).tolist(), second.take(by_first).tolist()):
        if flags[better]:
            flags[worse] = 0
    return np.frombuffer(flags, bool).nonzero()[0]


# Boxes decided at a time, by device: early drops pay on a CPU, synchronizations cost on CUDA.
BLOCK = {'cpu': 256, 'cuda': 4096}
# Conflicts above which blocks are faster, for each box and in all: few boxes of a crowd are kept.
_CROWD, _CROWD_ALLOWED = 8, 8192
# Boxes, ordered by their left edges, that are compared with those behind them at a time.
_PART = 256
# Rounding moves a float32 overlap of at least _LEAST by less than _SLACK of itself.
_SLACK = 1e-5
_LEAST = 0.01
# Smaller areas are not normal float32 numbers, so their rounding is not bounded.
_TINY_AREA = 1e-30


def dense_conflicts(cols: Tensor, threshold: float, offset: int, equal: bool = False) -> Conflicts:
    """Return the conflicts of columns (5, N), for :func:`mmrepro.ops.mmcv.nms.greedy`."""
    def conflicts(rows: Tensor, others: Tensor) -> Tensor:
        a = cols.index_select(1, rows)[:, :, None]
        b = cols.index_select(1, others)[:, None]
        step = max(1, TILE[cols.device.type] // max(1, len(others)))
        return torch.cat([exceeds(part, b, threshold, offset, equal)
                          for part in a.split(step, dim=1)])

    return conflicts


def keep_cpu(boxes: np.ndarray, threshold: float, offset: int) -> np.ndarray:
    """Return ranks of the kept boxes, given all boxes (N, 4) by rank, on a CPU."""
    if threshold >= 0:
        pairs = _conflicting_pairs(boxes, threshold, offset)
        if pairs is not None:
            return greedy_pairs(len(boxes), *pairs)
    cols = columns(torch.from_numpy(boxes), offset)
    conflicts = dense_conflicts(cols, threshold, offset)
    return greedy(len(boxes), conflicts, cols.device, BLOCK['cpu']).numpy()


def _conflicting_pairs(boxes: np.ndarray, threshold: float, offset: int
                       ) -> tuple[np.ndarray, np.ndarray] | None:
    """Return all conflicting pairs of ranks, the better ranks first; None if they are a crowd.

    A box meets only those to its right that begin before it ends. So boxes are ordered by their
    left edges, and each is compared with the next one, the one after that, and so on.
    """
    count = len(boxes)
    by_left = boxes[:, 0].argsort()
    # what is behind the last box conflicts with nothing
    table = np.empty((5, 2 * count), np.float32)
    table[:, count:] = np.nan
    table[:4, :count] = boxes.take(by_left, 0).T
    size = table[2:4] - table[:2]
    if offset:
        size += np.float32(offset)
    np.multiply(size[0], size[1], out=table[4])
    ends = table[0, :count].searchsorted(_reaches(table[:, :count], threshold, offset), 'right')
    distances = ends - np.arange(1, count + 1)
    row, step = table.strides
    limit = np.float32(threshold)
    first, second, left = [], [], _CROWD_ALLOWED
    for start in range(0, count, _PART):
        part = table[:, None, start:min(start + _PART, count)]
        number = part.shape[2]
        last = int(distances[start:start + number].max())
        left += _CROWD * number
        for nearest in range(1, last + 1, TILE['cpu'] // _PART):
            shape = 5, min(last + 1 - nearest, TILE['cpu'] // _PART), number
            # row k of a column holds the boxes that are nearest + k behind those of the part
            behind = np.ndarray(shape, np.float32, table, (start + nearest) * step,
                                (row, step, step))
            hits = (host_overlaps(part, behind, offset) > limit).ravel().nonzero()[0]
            if not len(hits):
                continue
            left -= len(hits)
            if left < 0:
                return None
            further, here = np.divmod(hits, number)
            further += here
            first.append(by_left[start:].take(here))
            second.append(by_left[start + nearest:].take(further))
    if not first:
        return by_left[:0], by_left[:0]
    a, b = np.concatenate(first), np.concatenate(second)
    return np.minimum(a, b), np.maximum(a, b)


def _reaches(table: np.ndarray, threshold: float, offset: int) -> np.ndarray:
    """Return how far right a box may begin that conflicts with each of columns (5, N)."""
    low, high, area = table[:2], table[2:4], table[4]
    reach: np.ndarray = high[0].astype(np.float64)
    reach += offset
    if threshold < _LEAST or len(reach) <= _PART:
        return reach
    # all boxes are finite, none is inverted, and rounding is bounded for all
    if (np.isfinite(table).all() and (low <= high).all()
            and ((area == 0) | (area > _TINY_AREA)).all()):
        # an overlap above t needs an overlap above t along the axis
        reach -= threshold * (1 - _SLACK) * (reach - low[0])
    return reach


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
    if boxes.is_cuda:
        order = rank(scores)
        conflicts = dense_conflicts(columns(boxes.detach()[order], offset), threshold, offset)
        return order[greedy(len(order), conflicts, boxes.device, BLOCK['cuda'])]
    ranked = _rank_on_host(scores)
    with np.errstate(all='ignore'):
        kept = keep_cpu(boxes.detach().numpy().take(ranked, 0), threshold, offset)
    return torch.from_numpy(ranked.take(kept))


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


def _soft(cols: Tensor, scores: np.ndarray, method: int, threshold: np.float32, sigma: np.float32,
          least: np.float32, offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the boxes that stay, in the order in which they are chosen, and their scores.

    The factors by which the best boxes change the scores of all are computed together. They serve
    until a box is chosen that was not one of them.
    """
    boxes, score = np.arange(len(scores)), scores.copy()
    memory = cols.new_empty(3, max(TILE['cpu'], len(scores)))  # reused: fresh pages take time
    chosen: list[int] = []
    final: list[np.float32] = []
    # the score of decided boxes: less than that of all others, also where a factor is 0
    decided = np.float32(0 if least > 0 else -np.inf)
    while len(boxes):
        factors = _factors(cols, boxes, score, memory, method, threshold, sigma, offset)
        # the working order, and the position of each box in it
        working, position = list(range(len(boxes))), list(range(len(boxes)))
        undecided = np.ones(len(boxes), bool)
        begin, end = 0, len(boxes)
        while begin < end:
            best = int(score.argmax())
            value = score[best]
            score[best] = decided
            if not value > score[score.argmax()]:  # equal scores, or NaN
                score[best] = value
                best = working[begin + _first_best(score[working[begin:end]])]
                value = score[best]
                score[best] = decided
            if best not in factors:
                score[best] = value
                break
            chosen.append(boxes[best])
            final.append(value)
            undecided[best] = False
            first = working[begin]
            working[position[best]], position[first] = first, position[best]
            begin += 1
            score *= factors[best]
            if least <= 0:
                score[~undecided] = decided
            if np.count_nonzero(score >= least) != end - begin:
                low = score < least
                low &= undecided
                gone = low.nonzero()[0]
                undecided[gone], score[gone] = False, decided
                # the last box that stays fills the position of each that is dropped
                for place in sorted([position[box] for box in gone.tolist()]):
                    while begin < end and low[working[end - 1]]:
                        end -= 1
                    if place >= end:
                        break
                    end -= 1
                    working[place] = working[end]
                    position[working[place]] = place
        boxes, score = boxes[working[begin:end]], score[working[begin:end]]
    return np.array(chosen, np.int64), np.array(final, np.float32)


def _factors(cols: Tensor, boxes: np.ndarray, score: np.ndarray, memory: Tensor, method: int,
             threshold: np.float32, sigma: np.float32, offset: int) -> dict[int, np.ndarray]:
    """Return by what some of the boxes change the scores of all, among them the next and the best.

    A box is given and numbered by its position in ``boxes``. Overwrites ``memory`` (3, M); M
    limits the number of the factors.
    """
    count = len(boxes)
    rows, number = np.arange(count), memory.shape[1] // count
    if number < count:
        rows = np.append(_first_best(score), np.argpartition(-score, number - 1)[:number - 1])
    table = cols.index_select(1, torch.from_numpy(boxes))
    chosen = table.index_select(1, torch.from_numpy(rows))
    memory = memory[:, :len(rows) * count].view(3, len(rows), count)
    overlap = overlaps(chosen[:, :, None], table[:, None], offset, memory)
    acts, decayed = _decay(overlap.numpy().ravel(), method, threshold, sigma)
    factors = memory[1].fill_(1).numpy()
    factors.ravel()[acts] = decayed
    return dict(zip(rows.tolist(), factors))


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
        kept, final = _soft(columns(boxes.detach(), offset), scores.detach().numpy(),
                            method, threshold, width, least, offset)
    chosen = torch.from_numpy(kept)
    dets[:len(chosen), :4] = boxes.detach()[chosen]
    dets[:len(chosen), 4] = torch.from_numpy(final)
    return chosen
