"""Maxima over samples that are visited in order, for RoIPool and RoIAlign's maximum.

Visit ``n`` has the n-th sample of every bag that has so many. Bags are sorted by their number of
samples, most first, so those of a visit are a prefix. A value replaces the best one only if it is
greater: the first of equal samples wins, and NaN never does.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .. import gather
from .rois import LOWEST


def prefixes(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the ordinal of each visit, from 0, and how many bags have it; ``counts`` descend.

    >>> list(prefixes([3, 1, 0]))
    [(0, 2), (1, 1), (2, 1)]
    """
    length = len(counts)
    for ordinal in range(counts[0] if counts else 0):
        while counts[length - 1] <= ordinal:
            length -= 1
        yield ordinal, length


def keep_greatest(best: Tensor, values: Iterable[Tensor]) -> Tensor:
    """Replace elements of ``best`` (B, C) by greater ones, and return which visit each is from.

    Args:
        best: the initial values, changed in place.
        values: of each visit, for a prefix of the bags; changed too. NaN becomes the lowest number,
            because torch.maximum would let NaN win.

    Returns:
        (B, C) int32: numbers of visits from 1; 0 where no value was greater.
    """
    winner = torch.zeros_like(best, dtype=torch.int32)
    for number, value in enumerate(values, 1):
        value.nan_to_num_(nan=LOWEST, posinf=float('inf'), neginf=float('-inf'))
        prefix = slice(0, len(value))
        wins = (value > best[prefix]).to(torch.int32).mul_(number)
        torch.maximum(best[prefix], value, out=best[prefix])
        torch.maximum(winner[prefix], wins, out=winner[prefix])
    return winner


def scatter_to_winners(grad: Tensor, winner: Tensor, taps: Iterable[tuple[Tensor, Tensor]],
                       sink: gather.Sink) -> None:
    """Scatter the gradient of maxima to ``sink``, visit by visit, to the channels that each won.

    One sort per visit instead of one tap per element. Late visits have few bags: several of them
    are scattered together, up to the size of the first.

    Args:
        grad, winner: (B, C); ``winner`` has the numbers of visits.
        taps: rows and weights of each visit, (B', T) for a prefix of the bags.
    """
    source = torch.empty_like(grad)
    rows: list[Tensor] = []
    weights: list[Tensor] = []
    used = 0
    for number, (row, weight) in enumerate(taps, 1):
        if used + len(row) > len(source):
            sink.scatter_sum(source[:used], torch.cat(rows), torch.cat(weights))
            rows, weights, used = [], [], 0
        prefix = slice(0, len(row))
        gather.masked_copy(grad[prefix], winner[prefix], number, source[used:])
        rows.append(row)
        weights.append(weight)
        used += len(row)
    if used:
        sink.scatter_sum(source[:used], torch.cat(rows), torch.cat(weights))
    sink.close()
