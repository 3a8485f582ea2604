"""Sums in a fixed order: the running sum before torch 2.6, a loss of maps, additions at an index.

Additions of several sources to one position are reduced here to ``index_put_(accumulate=True)``,
which sorts the sources by destination (stable) and adds each group in order: on CUDA always, and on
a CPU under the deterministic flag, in all supported releases.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..gather import COMPUTE, compute_dtype

_MEAN = 1  # of aten's Reduction


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
    total = self.to(COMPUTE.get(result_type, result_type), copy=True,
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
    if not reduction:
        return loss.to(self.dtype), self.new_zeros(())
    total, loss = scale.sum(), loss.sum()
    return (loss / total if reduction == _MEAN else loss).to(self.dtype), total.to(self.dtype)


def adaptive_max_pool_backward(grad: Tensor, self: Tensor, indices: Tensor) -> Tensor:
    """Compute ``aten::adaptive_max_pool2d_backward``; ``indices`` are positions in their planes."""
    flat = indices.reshape(-1, max(1, indices.shape[-2:].numel()))
    first = torch.arange(len(flat), device=indices.device) * self.shape[-2:].numel()
    out = torch.zeros(self.numel(), dtype=compute_dtype(grad), device=grad.device)
    out.index_put_(((flat + first[:, None]).reshape(-1),), grad.reshape(-1).to(out.dtype),
                   accumulate=True)
    return out.to(grad.dtype).view(self.shape)


def scatter_add(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Compute ``aten::scatter_add`` for tensors of any rank, as one flat list of additions."""
    out = self.contiguous().clone()
    if not index.numel():
        return out
    if not self.dim():
        return (out.view(1) + src.reshape(-1).sum()).view(())
    sizes = (torch.arange(size, device=index.device) for size in index.shape)
    at: list[Tensor | None] = [*torch.meshgrid(*sizes, indexing='ij')]
    at[dim] = index
    return out.index_put_(at, src[tuple(slice(size) for size in index.shape)], accumulate=True)


def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Compute ``aten::scatter_add_``."""
    return self.copy_(scatter_add(self, dim, index, src))
