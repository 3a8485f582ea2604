"""Selection by value where equal values go by index: topk, sort, kthvalue.

torch does not specify the order of equal values in ``topk`` and unstable sorts. Its CPU kernels
(partial sorts, vectorized since 2.6) and CUDA kernels (radix selection, bitonic or segmented sorts,
by size) choose differently, so a detector may keep different boxes on another device or release.
Here the lower index comes first. As in torch, NaN is larger than every number and -0 equals 0.
"""
from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

# Dtypes that fit into 32 bits, so that value and index fit into 64.
_NARROW_INTEGERS = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_NARROW = (*_NARROW_INTEGERS, torch.float32, torch.float16, torch.bfloat16)


def _ranks(self: Tensor) -> Tensor:
    """Return int64 of 32 significant bits that compare as the values of ``self`` do."""
    if self.dtype in _NARROW_INTEGERS:
        return self.to(torch.int64)
    # adding 0 turns -0 into 0
    value = self.to(torch.float32) + 0.
    bits = value.view(torch.int32)
    # negative floats compare inversely as integers: invert all bits but the sign
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.masked_fill_(torch.isnan(value), 0x7FFFFFFF).to(torch.int64)


def _keys(self: Tensor, dim: int, largest: bool) -> Tensor:
    """Return distinct int64 keys: the value, then the index, of which the lower one is better."""
    length = self.shape[dim]
    position = torch.arange(length, device=self.device)
    if largest:
        position = length - 1 - position
    shape = [1] * self.dim()
    shape[dim] = length
    return (_ranks(self) << 32) | position.view(shape)


def _native_topk(self: Tensor, k: int, dim: int, largest: bool,
                 sorted: bool = True) -> tuple[Tensor, Tensor]:
    # the overload with outputs is not replaced
    out = self.new_empty(0), self.new_empty(0, dtype=torch.int64)
    return torch.topk(self, k, dim, largest, sorted, out=out)


def _scanned_topk(self: Tensor, k: int, dim: int, largest: bool) -> Tensor:
    """Return indices of the k best, from a kernel that places elements by prefix scans.

    NVIDIA's kernels of torch write what is better than the k-th value in the order of indices,
    then as many as fit of those equal to it, also in that order. So the right elements are chosen,
    equal ones by index among themselves, and a stable sort of k values completes the order.
    """
    if self.dtype.is_floating_point:
        self = self + 0.  # the kernel compares bits, and -0 must equal 0
    elif self.dtype == torch.bool:
        self = self.to(torch.uint8)
    values, indices = _native_topk(self, k, dim, largest, sorted=False)
    if k == 1:
        return indices
    return indices.gather(dim, torch.sort(values, dim=dim, descending=largest, stable=True)[1])


def _distinct_topk(self: Tensor, k: int, dim: int, largest: bool) -> Tensor | None:
    """Return indices of the k best, from torch's kernel for CPUs; None where it has to choose.

    It chooses between values that equal the k-th, and puts equal ones among the best in any order.
    """
    values, indices = _native_topk(self, k, dim, largest)
    # NumPy compares floats six times faster than torch
    best = values.numpy()
    last = values.narrow(dim, k - 1, 1).numpy()
    if np.isnan(best).any() or (
            np.count_nonzero(self.detach().numpy() == last) != np.count_nonzero(best == last)):
        return None
    behind, ahead = (values.narrow(dim, start, k - 1).numpy() for start in (1, 0))
    if (behind == ahead).any():
        indices = torch.sort(indices, dim=dim, stable=True)[0]
        order = torch.sort(self.gather(dim, indices), dim=dim, descending=largest, stable=True)[1]
        indices = indices.gather(dim, order)
    return indices


def topk(self: Tensor, k: int, dim: int = -1, largest: bool = True,
         sorted: bool = True) -> tuple[Tensor, Tensor]:
    """Compute ``aten::topk``, always sorted, equal values by lower index.

    On NVIDIA GPUs only the order of the k results needs care, and on CPUs too if no other value
    equals the k-th. Else, if a value and its index fit into 64 bits, torch's own kernel selects
    both as one key, which has no ties; wider dtypes are sorted. Raises RuntimeError if ``k`` or
    ``dim`` is out of range.
    """
    size = self.shape[dim] if self.dim() else 1
    if not self.dim() or k == 0 or k > size or k < 0:
        return _native_topk(self, k, dim, largest)
    indices: Tensor | None = None
    if self.is_cuda and torch.version.hip is None:  # ROCm's kernel takes ties as threads arrive
        indices = _scanned_topk(self, k, dim, largest)
    elif self.device.type == 'cpu' and self.dtype in (torch.float32, torch.float64):
        indices = _distinct_topk(self, k, dim, largest)
    if indices is None and self.dtype in _NARROW and size < 1 << 31:
        indices = _native_topk(_keys(self, dim, largest), k, dim, largest)[1]
    if indices is None:
        indices = torch.sort(self, dim=dim, descending=largest, stable=True)[1]
        indices = indices.narrow(dim, 0, k).contiguous()
    return self.gather(dim, indices), indices


def sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Compute ``aten::sort`` (and so ``argsort``): stable."""
    return torch.sort(self, dim=dim, descending=descending, stable=True)


def kthvalue(self: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the k-th of a stable sort; RuntimeError unless 1 <= k <= size."""
    size = self.shape[dim] if self.dim() else 1
    if not 1 <= k <= size:
        raise RuntimeError(f'kthvalue(): selected number k out of range for dimension {dim}: '
                           f'k = {k}, allowed: 1 to {size}')
    if not self.dim():
        return self.clone(), torch.zeros_like(self, dtype=torch.int64)
    values, indices = (part.narrow(dim, k - 1, 1).clone()
                       for part in torch.sort(self, dim=dim, stable=True))
    return (values, indices) if keepdim else (values.squeeze(dim), indices.squeeze(dim))
