"""Running sums in a fixed order."""
from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

__all__ = ['cumsum', 'cumsum_']

# Summed in float32 and rounded to their dtype at the end.
_NARROW = (torch.float16, torch.bfloat16)


def cumsum(self: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """``aten::cumsum``: floats by doubling steps, integers by torch's own kernel.

    Step s adds the element ``2**s`` positions before; after ``log2(n)`` steps every element is the
    sum of all up to it. Each step adds whole tensors, so the order of every sum depends on the
    length only.
    """
    result_type = dtype or (self.dtype if self.dtype.is_floating_point or self.dtype.is_complex
                            else torch.int64)
    if not (result_type.is_floating_point or result_type.is_complex):
        # the overload with an output is not replaced
        out = self.new_empty(self.shape, dtype=result_type)
        return torch.cumsum(self, dim, dtype=result_type, out=out)
    total = self.to(torch.float32 if result_type in _NARROW else result_type)
    if self.dim() and self.numel():
        total = total.contiguous()
        length, step = self.shape[dim], 1
        while step < length:
            moved = total.clone()
            moved.narrow(dim, step, length - step).add_(total.narrow(dim, 0, length - step))
            total, step = moved, step * 2
    return total.to(result_type, copy=True) if total is self else total.to(result_type)


def cumsum_(self: Tensor, dim: int, *, dtype: Optional[torch.dtype] = None) -> Tensor:
    """``aten::cumsum_``."""
    return self.copy_(cumsum(self, dim, dtype=dtype or self.dtype))
