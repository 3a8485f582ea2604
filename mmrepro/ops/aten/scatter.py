"""Operators that add or write several sources to one position, given by an index.

torch's kernels for these operators add with atomics. They are reduced here to
``index_put_(accumulate=True)``, which sorts the sources by destination (stable) and adds each group
in order: on CUDA always, and on a CPU under the deterministic flag, in all supported releases.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..gather import compute_dtype


def add_at(size: int, position: Tensor, values: Tensor,
           dtype: torch.dtype | None = None) -> Tensor:
    """Return ``out[p] = sum of the values at position p`` in their order, (size,) of ``dtype``.

    ``position`` (E,) is int64. Sums of half precision are float32 unless ``dtype`` is given.
    """
    dtype = dtype or compute_dtype(values)
    out = torch.zeros(size, dtype=dtype, device=values.device)
    return out.index_put_((position,), values.to(dtype), accumulate=True)


def _planes(indices: Tensor, axes: int, plane: int) -> Tensor:
    """Convert indices into planes of the last ``axes`` axes to flat indices into the tensor."""
    flat = indices.reshape(-1, max(1, indices.shape[-axes:].numel()))
    first = torch.arange(len(flat), device=indices.device) * plane
    return (flat.to(torch.int64) + first[:, None]).reshape(-1)


def max_pool_backward(axes: int, grad: Tensor, self: Tensor, *arguments: Any) -> Tensor:
    """Compute a backward of max pooling over ``axes`` axes, which stored positions of maxima.

    They are the only argument of adaptive pooling after (grad, input), and the last of the others.
    """
    position = _planes(arguments[-1], axes, self.shape[-axes:].numel())
    out = add_at(self.numel(), position, grad.reshape(-1))
    return out.to(grad.dtype).view(self.shape)


def max_unpool(axes: int, self: Tensor, indices: Tensor, output_size: Sequence[int],
               *ignored: Sequence[int]) -> Tensor:
    """Compute ``aten::max_unpool2d`` or ``3d``; the last of several sources of a position wins."""
    out = self.new_zeros((*self.shape[:-axes], *output_size))
    plane = math.prod(output_size)
    outside = (indices < 0) | (indices >= plane)
    if bool(outside.any()):
        found = int(indices[outside][0])
        raise RuntimeError(f'max_unpool{axes}d: index {found} lies outside the output, '
                           f'whose planes have {plane} elements')
    if self.numel():
        _write_last(out.view(-1), _planes(indices, axes, plane), self.reshape(-1))
    return out


def _write_last(out: Tensor, position: Tensor, values: Tensor) -> None:
    """Write ``out[position] = values`` in place; the last of several sources wins."""
    row, order = torch.sort(position, stable=True)
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    # positions are unique now, so the order of writing does not matter
    out.index_put_((row[last],), values[order[last]])


def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Compute ``aten::put_``: as torch's, with the last source winning, or all added in order."""
    flat = self.reshape(-1) if not self.is_contiguous() else self.view(-1)
    position, values = index.reshape(-1), source.reshape(-1)
    position = torch.where(position < 0, position + flat.numel(), position)
    if accumulate:
        flat.index_put_((position,), values, accumulate=True)
    elif position.numel():
        _write_last(flat, position, values)
    if flat.data_ptr() != self.data_ptr():
        self.copy_(flat.view(self.shape))
    return self


def bincount(self: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Compute ``aten::bincount`` with weights. Sums are float32 for float32 weights, else float64.

    Raises RuntimeError, as torch, if not 1-D, negative, or with weights of another length.
    """
    if self.dim() != 1 or (self.numel() and int(self.min()) < 0):
        raise RuntimeError('bincount only supports 1-d non-negative integral inputs.')
    if weights is not None and weights.shape != self.shape:
        raise RuntimeError('weights should be 1-d and have the same length as input, got '
                           f'{tuple(weights.shape)} and {tuple(self.shape)}')
    size = max(int(self.max()) + 1 if self.numel() else 0, int(minlength))
    if weights is None:
        ones = torch.ones_like(self, dtype=torch.int64)
        return add_at(size, self.long(), ones, torch.int64)
    dtype = torch.float32 if weights.dtype == torch.float32 else torch.float64
    return add_at(size, self.long(), weights, dtype)


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
