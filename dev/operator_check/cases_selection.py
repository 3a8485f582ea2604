"""Cases of ``topk`` with ties, in sizes that torch's kernels for CUDA treat in different ways."""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES']

# Numbers in a row, rows: one block, several blocks, several blocks for each of many rows; torch
# sorts instead where rows are long and few (aten/src/ATen/native/cuda/TensorTopK.cpp).
_SIZES = ((1000, 64), (50_000, 4), (50_000, 64), (300_000, 1), (300_000, 8))
_COUNTS = (1, 100, 2000)


def _stable(x: Tensor, k: int) -> tuple[Tensor, ...]:
    values, indices = torch.sort(x, descending=True, stable=True)
    return values[..., :k], indices[..., :k]


def _call(s: Inputs, length: int, rows: int, k: int) -> OperatorCall:
    # a few hundred different numbers, so that ties lie in all blocks
    x = (s.normal(rows, s.count(length)) * 50).round() / 50
    return OperatorCall(dict(x=x), {}, lambda x: torch.topk(x, min(k, x.shape[-1])), double=False)


CASES: dict[str, OperatorCase] = {
    f'topk, {k} of {length}, {rows} rows': OperatorCase(
        (), functools.partial(_call, length=length, rows=rows, k=k),
        reference=functools.partial(_stable, k=k))
    for length, rows in _SIZES for k in _COUNTS if k < length}
