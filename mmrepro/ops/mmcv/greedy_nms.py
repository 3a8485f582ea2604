"""Greedy suppression: keep the best box, drop those that conflict with it, go on with the next.

Every NMS is this sweep over boxes in the order of their scores, with its own definition of a
conflict. The result is unique, so it may be computed in blocks on any device (:func:`greedy`) or
from a list of conflicting pairs (:func:`greedy_pairs`).
"""
from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor

# The conflicts of boxes (rows) with others (columns), given by rank, as a bool matrix.
Conflicts = Callable[[Tensor, Tensor], Tensor]
# On CUDA a round costs microseconds, and looking at its result a synchronization.
_ROUNDS_PER_LOOK = 8


def rank(scores: Tensor) -> Tensor:
    """Return indices of ``scores`` (N,), best first; equal scores by lower index, NaN first.

    torch sorts NaN above every number, and so do mmcv's kernels.
    """
    return torch.sort(scores.detach(), dim=0, descending=True, stable=True).indices


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
    by_first = first.argsort(kind='stable')
    flags = bytearray(b'\1') * count
    for better, worse in zip(first.take(by_first).tolist(), second.take(by_first).tolist()):
        if flags[better]:
            flags[worse] = 0
    return np.frombuffer(flags, bool).nonzero()[0]
