"""Writes by index: ``x[index] = values``.

Under its deterministic flag torch sorts the indices on CUDA, as it has to for sums, and the host
waits twice for each of them to check its range; a detector does this for every image and layer. A
write needs no sort: a mask has no index twice, equal values may be written in any order, and of
other values the last one of an index is written (:mod:`mmrepro.ops.triton.write_kernels`), as by
torch's sort and on a CPU. As without the flag, the device checks the range. Where that kernel is
not chosen, torch sorts.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import triton
from ..provider import takes_triton


def stock(self: Tensor, *args: Any) -> Tensor:
    """Call torch's own kernel of ``aten::_index_put_impl_``."""
    keys = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    written: Tensor = torch.ops.aten._index_put_impl_.default.redispatch(
        torch._C._dispatch_keys(self) & keys, self, *args)
    return written


def _kernels() -> Any:
    """Return the module with the kernel, or None if it is not chosen."""
    if not takes_triton(triton.WRITES):
        return None
    from ..triton import write_kernels
    return write_kernels


def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor,
              accumulate: bool = False, unsafe: bool = False) -> Tensor:
    """Compute ``aten::_index_put_impl_``.

    Here: a mask, or one or two tensors of indices, of the first dimensions. torch does the rest.
    """
    there = [index for index in indices if index is not None]
    if (accumulate or not triton.runs_on(self.device.type)
            or not torch.are_deterministic_algorithms_enabled()
            or not 0 < len(there) <= 2 or any(index is None for index in indices[:len(there)])
            or any(index.device != self.device for index in there)
            or not self.is_contiguous() or self.is_complex() or not self.numel()
            or values.dtype != self.dtype or values.device != self.device and values.numel() != 1
            or values.untyped_storage().data_ptr() == self.untyped_storage().data_ptr()):
        return stock(self, indices, values, accumulate, unsafe)
    scalar = values.numel() == 1
    mask = there[0].dtype in (torch.bool, torch.uint8)
    if mask or there[-1].dtype in (torch.bool, torch.uint8):
        dims = there[0].dim()
        if scalar or len(there) > 1 or there[0].shape != self.shape[:dims]:
            return stock(self, indices, values, accumulate, unsafe)  # torch fills, or says why not
        there = [there[0].reshape(-1).nonzero()[:, 0]]
        sizes = [self.shape[:dims].numel()]
    else:
        there = [index.long() for index in torch.broadcast_tensors(*there)]
        dims, sizes = len(there), list(self.shape[:len(there)])
    if scalar and values.device != self.device:
        if len(there) == 1:
            return self.index_fill_(0, there[0].reshape(-1), values.item())
        values = self.new_full((), values.item())
    kernels = _kernels()
    if kernels is None or there[0].numel() > kernels.MOST and not mask and not scalar:
        return stock(self, indices, values, accumulate, unsafe)
    shape = self.shape[dims:]
    values = values.expand(*there[0].shape, *shape).reshape(there[0].numel(), shape.numel())
    if len(values):
        target = self.view(*sizes, shape.numel())
        if not mask:
            target[..., 0][tuple(there)]  # reads, so that the device checks the range
        kernels.write(target, [index.reshape(-1) for index in there], values, mask or scalar)
    return self
