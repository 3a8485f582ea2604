"""Cases of ``torch.compile``: what the compiler makes of operators whose order matters."""
from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES']


def _line(length: int) -> Callable[[Inputs], dict[str, Tensor]]:
    return lambda s: dict(x=1 + s.normal(s.count(length)) * 1e-4)


def _rows_onto_few(s: Inputs) -> dict[str, Tensor]:
    index = torch.randint(0, 50, (s.count(20000),), generator=s.random)
    return dict(x=s.normal(64, 64), source=s.normal(len(index), 64), index=index)


def _few_values(s: Inputs) -> dict[str, Tensor]:
    return dict(x=(s.normal(16, s.count(20000)) * 10).round() / 10)


def _case(run: Callable[..., object], make: Callable[[Inputs], dict[str, Tensor]]) -> OperatorCase:
    def call(s: Inputs) -> OperatorCall:
        tensors = make(s)
        steep = {name: value for name, value in tensors.items() if value.is_floating_point()}
        fixed = {name: value for name, value in tensors.items() if name not in steep}
        return OperatorCall(steep, fixed, torch.compile(run))
    return OperatorCase((), call, reference=run)


def _attention(x: Tensor, source: Tensor, index: Tensor) -> Tensor:
    return (source @ x.t()).softmax(-1) @ x


CASES: dict[str, OperatorCase] = {
    # long enough to be split into blocks
    'cumsum': _case(lambda x: x.cumsum(0), _line(1 << 20)),
    'cumprod': _case(lambda x: x.cumprod(0), _line(1 << 16)),
    'logcumsumexp': _case(lambda x: x.logcumsumexp(0), _line(1 << 20)),
    'scatter_add': _case(lambda x, source, index: x.scatter_add(
        0, index[:, None].expand_as(source), source), _rows_onto_few),
    'index_put': _case(lambda x, source, index: x.index_put((index,), source, accumulate=True),
                       _rows_onto_few),
    'embedding': _case(lambda x, source, index: x[index] * source, _rows_onto_few),
    'sort': _case(lambda x: torch.sort(x, descending=True, stable=True), _few_values),
    'sum': _case(lambda x: x.sum(), _line(1 << 20)),
    'softmax and products': _case(_attention, _rows_onto_few),
}
