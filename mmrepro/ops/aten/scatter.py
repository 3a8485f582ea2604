"""Operators that add, or write, many sources to one place named by an index.

torch's ``index_put_(accumulate=True)`` sorts the sources by destination (stable) and adds each
group in order, on CUDA always and on a CPU under the deterministic flag, in every release that we
support. What is here reduces to it: torch's own kernels for these operators add with atomics.
"""
from __future__ import annotations

from typing import Callable, Optional, Sequence

import torch
from torch import Tensor

from ..gather import compute_dtype

__all__ = ['add_at', 'bincount', 'max_pool_backward', 'max_unpool', 'put_', 'scatter_add',
           'scatter_add_']


def add_at(size: int, place: Tensor, values: Tensor, dtype: Optional[torch.dtype] = None) -> Tensor:
    """``out[p] = sum of the values whose place is p``, in the order in which they stand.

    Args:
        size: elements of the result. place: (E,) int64. values: (E,).
        dtype: of the sums; float32 for half precision unless given.

    Returns:
        (size,) of ``dtype``.
    """
    dtype = dtype or compute_dtype(values)
    out = torch.zeros(size, dtype=dtype, device=values.device)
    return out.index_put_((place,), values.to(dtype), accumulate=True)


def _planes(indices: Tensor, axes: int, plane: int) -> Tensor:
    """Indices into planes of the last ``axes`` axes as indices into the whole tensor, flat."""
    flat = indices.reshape(-1, max(1, indices.shape[-axes:].numel()))
    first = torch.arange(len(flat), device=indices.device) * plane
    return (flat.to(torch.int64) + first[:, None]).reshape(-1)


def max_pool_backward(axes: int, at: int = -1) -> Callable[..., Tensor]:
    """Backward of max pooling that kept the position of each maximum.

    Args:
        axes: spatial axes, 2 or 3.
        at: where the operator has its indices among the arguments behind (grad, input): 0 for
            adaptive pooling, -1 (the last) for the others.
    """

    def backward(grad: Tensor, self: Tensor, *arguments) -> Tensor:
        indices = arguments[at]
        place = _planes(indices, axes, self.shape[-axes:].numel())
        out = add_at(self.numel(), place, grad.reshape(-1))
        return out.to(grad.dtype).view(self.shape)

    return backward


def max_unpool(axes: int) -> Callable[..., Tensor]:
    """``aten::max_unpool2d`` or ``3d``. Where two sources name one place, the last one stays."""

    def forward(self: Tensor, indices: Tensor, output_size: Sequence[int],
                *ignored: Sequence[int]) -> Tensor:
        shape = (*self.shape[:-axes], *output_size)
        out = self.new_zeros(shape)
        plane = 1
        for size in output_size:
            plane *= int(size)
        outside = (indices < 0) | (indices >= plane)
        if bool(outside.any()):
            found = int(indices[outside][0])
            raise RuntimeError(f'max_unpool{axes}d: index {found} lies outside of the output, '
                               f'whose planes have {plane} elements')
        if self.numel():
            _write_last(out.view(-1), _planes(indices, axes, plane), self.reshape(-1))
        return out

    return forward


def _write_last(out: Tensor, place: Tensor, values: Tensor) -> None:
    """``out[place] = values`` in place, the later of two sources for one place winning."""
    row, order = torch.sort(place, stable=True)
    last = torch.ones_like(row, dtype=torch.bool)
    last[:-1] = row[1:] != row[:-1]
    # No place occurs twice any more, so the order of writing does not matter.
    out.index_put_((row[last],), values[order[last]])


def put_(self: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """``aten::put_``: as torch's, with the last source winning, or all added in order."""
    flat = self.reshape(-1) if not self.is_contiguous() else self.view(-1)
    place, values = index.reshape(-1), source.reshape(-1)
    place = torch.where(place < 0, place + flat.numel(), place)
    if accumulate:
        flat.index_put_((place,), values, accumulate=True)
    elif place.numel():
        _write_last(flat, place, values)
    if flat.data_ptr() != self.data_ptr():
        self.copy_(flat.view(self.shape))
    return self


def bincount(self: Tensor, weights: Optional[Tensor] = None, minlength: int = 0) -> Tensor:
    """``aten::bincount`` with weights. Sums are float32 for float32 weights, else float64.

    Raises:
        RuntimeError: not 1-D, negative, or weights of another length; as torch.
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
    """``aten::scatter_add`` for tensors of any rank, as one flat list of additions."""
    out = self.contiguous().clone()
    if not index.numel():
        return out
    if not self.dim():
        return (out.view(1) + src.reshape(-1).sum()).view(())
    dim = dim % self.dim()
    place = index.new_zeros(())
    stride = 1
    for axis in range(self.dim() - 1, -1, -1):
        if axis == dim:
            at = index
        else:
            at = torch.arange(index.shape[axis], device=index.device)
            at = at.view([-1 if i == axis else 1 for i in range(index.dim())])
        place = place + at * stride
        stride *= self.shape[axis]
    values = src[tuple(slice(size) for size in index.shape)]
    out.view(-1).index_put_((place.reshape(-1),), values.reshape(-1), accumulate=True)
    return out


def scatter_add_(self: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """``aten::scatter_add_``."""
    return self.copy_(scatter_add(self, dim, index, src))
