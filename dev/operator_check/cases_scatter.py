"""Scattered sums as operators make them, sorted and in fixed point: which is faster on a GPU?

Attention takes the fixed point where Triton runs. The others sort; what these rows measure decides
whether they should.
"""
from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from mmrepro.ops import gather

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['FIXED', 'SORTED']


def _fixed(source: Tensor, index: Tensor, weight: Tensor, result: Tensor) -> Tensor:
    from mmrepro.ops.triton import scatter_kernels  # Triton may not be there
    return scatter_kernels.scatter_sum(source, index, weight, len(result))


def _sorted(source: Tensor, index: Tensor, weight: Tensor, result: Tensor) -> Tensor:
    return gather.scatter_sum(source, index, weight, len(result))


def _exact(source: Tensor, index: Tensor, weight: Tensor, result: Tensor) -> Tensor:
    total = result.double()
    for tap in range(index.shape[1]):
        total.index_add_(0, index[:, tap], (source * weight[:, tap:tap + 1]).double())
    return total.float()


def _case(run: Callable[..., Tensor], bags: int, taps: int, channels: int, size: int
          ) -> OperatorCase:
    """``bags`` bags of ``taps`` taps each near one of ``size`` rows, as samples are."""
    def make(s: Inputs) -> OperatorCall:
        rows, number = s.count(size), s.count(bags)
        near = (s.uniform(number, 1) * rows).long() + (s.normal(number, taps) * 3).long()
        return OperatorCall({}, dict(
            source=s.normal(number, channels), index=near.remainder(rows).to(torch.int32),
            weight=s.uniform(number, taps), result=torch.zeros(rows, channels)), run, double=False)

    return OperatorCase((), make, reference=_exact)


# bags, taps of each, channels, rows
_SIZES = {'deformable attention, a layer and image': (22223 * 8, 64, 32, 22223 * 8),
          'deformable convolution, 3x3': (100 * 168 * 9, 4, 256, 100 * 168),
          'grid sample': (400 * 100, 4, 256, 100 * 168),
          'RoIAlign, sampled': (512 * 49, 16, 256, 200 * 336)}
SORTED: dict[str, OperatorCase] = {
    f'{name}: sorted': _case(_sorted, *sizes) for name, sizes in _SIZES.items()}
FIXED: dict[str, OperatorCase] = {
    f'{name}: fixed point': _case(_fixed, *sizes) for name, sizes in _SIZES.items()}
