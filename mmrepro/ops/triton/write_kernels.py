"""Writes of rows by index, the last one of equal indices: one kernel, without a sort.

torch's flag sorts the indices, after the host has waited for the largest and the least. Here the
rows that write look through the later indices for their own, and leave the write to the last one.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Rows and columns of a program, and indices to compare together.
_ROWS, _COLUMNS, _LOOK = 32, 16, 64
# Every row looks through all later ones, so with more of them a sort is faster.
MOST = 1 << 14
# Values are copied as integers of their size.
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _place(index_of, other_of, at, exists, size, other_size, TWO: tl.constexpr):
    """Return the row that an index names, or a pair of them; -1 for what is out of range."""
    index = tl.load(index_of + at, mask=exists, other=0)
    index = tl.where(index < 0, index + size, index)
    valid = (index >= 0) & (index < size)
    if TWO:
        other = tl.load(other_of + at, mask=exists, other=0)
        other = tl.where(other < 0, other + other_size, other)
        valid = valid & (other >= 0) & (other < other_size)
        index = index * other_size + other
    return tl.where(valid & exists, index, -1)


@triton.jit(do_not_specialize=['count', 'size', 'other_size', 'width', 'step', 'unique'])
def _write_kernel(values, index_of, other_of, target, count, size, other_size, width, step,
                  unique, TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                  LOOK: tl.constexpr):
    """Write some rows and columns of ``values``, whose rows are ``step`` apart."""
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = _place(index_of, other_of, row, row < count, size, other_size, TWO)
    writes = at >= 0
    for begin in range(first, count * (1 - unique), LOOK):
        later = begin + tl.arange(0, LOOK)
        to = _place(index_of, other_of, later, later < count, size, other_size, TWO)
        repeats = (to[None, :] == at[:, None]) & (later[None, :] > row[:, None])
        writes = writes & (tl.max(repeats.to(tl.int32), 1) == 0)
    here = writes[:, None] & (column < width)[None, :]
    value = tl.load(values + row.to(tl.int64)[:, None] * step + column[None, :], mask=here)
    tl.store(target + at[:, None] * width + column[None, :], value, mask=here)


def write(target: Tensor, indices: Sequence[Tensor], values: Tensor, unique: bool) -> None:
    """Compute ``target[indices] = values``, where the last of equal indices counts.

    Args:
        target: (S, W) or (S, T, W), contiguous, of at most 8 bytes an element.
        indices: (N,) int64, one or two, as ``target`` has; what is out of range writes nothing.
        values: (N, W), may be expanded from one row.
        unique: no index occurs twice, or all values are equal.
    """
    word = _WORDS[target.element_size()]
    if values.shape[1] > 1 and values.stride(1) != 1:
        values = values.contiguous()
    (*sizes, width), count = target.shape, len(values)
    with torch.cuda.device_of(target):
        _write_kernel[(triton.cdiv(count, _ROWS), triton.cdiv(width, _COLUMNS))](
            values.view(word), indices[0].contiguous(), indices[-1].contiguous(),
            target.view(word), count, sizes[0], sizes[-1], width, values.stride(0),
            int(unique), TWO=len(sizes) == 2, ROWS=_ROWS, COLUMNS=_COLUMNS, LOOK=_LOOK)
