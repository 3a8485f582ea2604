"""The running sum of floating-point numbers in a fixed order, for torch before 2.6."""
from __future__ import annotations

import torch
from torch import Tensor

# Summed in float32 and rounded to their dtype at the end.
_NARROW = (torch.float16, torch.bfloat16)


def cumsum(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``aten::cumsum``: floats by doubling steps, integers by torch's own kernel.

    Step s adds to each element that of ``2**s`` positions before; after ``log2(n)`` steps every
    element is the sum of all up to it. Each step works on whole tensors, so the order depends on
    the length only.
    """
    result_type = dtype or (self.dtype if self.dtype.is_floating_point or self.dtype.is_complex
                            else torch.int64)
    if not (result_type.is_floating_point or result_type.is_complex):
        # the overload with an output is not replaced
        out = self.new_empty(self.shape, dtype=result_type)
        return torch.cumsum(self, dim, dtype=result_type, out=out)
    total = self.to(torch.float32 if result_type in _NARROW else result_type, copy=True,
                    memory_format=torch.contiguous_format)
    length, step = total.shape[dim] if total.dim() and total.numel() else 0, 1
    while step < length:
        moved = total.clone()
        moved.narrow(dim, step, length - step).add_(total.narrow(dim, 0, length - step))
        total, step = moved, step * 2
    return total.to(result_type)


def cumsum_(self: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``aten::cumsum_``."""
    return self.copy_(cumsum(self, dim, dtype=dtype or self.dtype))
