"""Operators that add or write several sources to one position, given by an index.

torch's kernels for these operators add with atomics. They are reduced here to
``index_put_(accumulate=True)``, which sorts the sources by destination (stable) and adds each group
in order: on CUDA always, and on a CPU under the deterministic flag, in all supported releases.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..gather import compute_dtype


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
