"""Sums in a fixed order: the running sum, and a loss that torch sums with atomics."""
from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

from ..gather import compute_dtype

# Summed in float32 and rounded to their dtype at the end.
_NARROW = (torch.float16, torch.bfloat16)
# Codes of aten's Reduction.
_NONE, _MEAN = 0, 1


def _doubling(total: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the inclusive scan along ``dim`` by ``combine``, a new tensor.

    Step s combines each element with that of ``2**s`` positions before; after ``log2(n)`` steps
    every element is that of all up to it. Each step works on whole tensors, so the order depends on
    the length only.
    """
    total = total.clone(memory_format=torch.contiguous_format)
    if not total.dim() or not total.numel():
        return total
    length, step = total.shape[dim], 1
    while step < length:
        moved = total.clone()
        moved.narrow(dim, step, length - step).copy_(combine(
            total.narrow(dim, 0, length - step), total.narrow(dim, step, length - step)))
        total, step = moved, step * 2
    return total


def _scan(native: Callable[..., Tensor], combine: Callable[[Tensor, Tensor], Tensor]
          ) -> Callable[..., Tensor]:
    def scan(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        result_type = dtype or (self.dtype if self.dtype.is_floating_point or self.dtype.is_complex
                                else torch.int64)
        if not (result_type.is_floating_point or result_type.is_complex):
            # the overload with an output is not replaced
            out = self.new_empty(self.shape, dtype=result_type)
            return native(self, dim, dtype=result_type, out=out)
        working = torch.float32 if result_type in _NARROW else result_type
        return _doubling(self.to(working), dim, combine).to(result_type)

    return scan


# ``aten::cumsum`` and ``aten::cumprod``: floats by doubling steps, integers by torch's own kernel.
cumsum = _scan(torch.cumsum, torch.add)
cumprod = _scan(torch.cumprod, torch.mul)


def cumsum_(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``aten::cumsum_``."""
    return self.copy_(cumsum(self, dim, dtype=dtype or self.dtype))


def cumprod_(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``aten::cumprod_``."""
    return self.copy_(cumprod(self, dim, dtype=dtype or self.dtype))


def logcumsumexp(self: Tensor, dim: int) -> Tensor:
    """Compute ``aten::_logcumsumexp``, by doubling steps of ``logaddexp``."""
    working = torch.float32 if self.dtype in _NARROW else self.dtype
    return _doubling(self.to(working), dim, torch.logaddexp).to(self.dtype)


def nll_loss2d_forward(self: Tensor, target: Tensor, weight: Tensor | None, reduction: int,
                       ignore_index: int) -> tuple[Tensor, Tensor]:
    """Compute ``aten::nll_loss2d_forward``: loss, and the sum of the weights that count.

    ``self`` is (N, C, H, W) log-probabilities, ``target`` (N, H, W) classes, ``weight`` (C,) or
    None. Raises RuntimeError if the shapes do not fit.
    """
    shape = (self.shape[0], *self.shape[2:])
    if self.dim() != 4 or target.shape != shape:
        raise RuntimeError(f'nll_loss2d: expected input (N, C, H, W) and target (N, H, W), got '
                           f'{tuple(self.shape)} and {tuple(target.shape)}')
    counted = target != ignore_index
    classes = target.masked_fill(~counted, 0)
    dtype = compute_dtype(self)
    scale = counted.to(dtype) if weight is None else (
        weight.to(dtype)[classes].masked_fill(~counted, 0))
    loss = -self.gather(1, classes.unsqueeze(1)).squeeze(1).to(dtype) * scale
    # 0 times an infinite log-probability is NaN
    loss = loss.masked_fill(~counted, 0)
    if reduction == _NONE:
        return loss.to(self.dtype), self.new_zeros(())
    total = scale.sum()
    loss = loss.sum()
    return (loss / total if reduction == _MEAN else loss).to(self.dtype), total.to(self.dtype)
