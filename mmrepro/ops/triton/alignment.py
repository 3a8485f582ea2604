"""Tensors as kernels expect them: contiguous, and aligned as fresh memory is.

Triton compiles another kernel for a pointer that is not a multiple of 16 bytes, with another
arrangement of numbers in threads, and with it another order of the sums across threads.
"""
from __future__ import annotations

from torch import Tensor

_BYTES = 16


def well_aligned(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors that begin at a multiple of 16 bytes; copies where needed."""
    return [tensor.clone() if tensor.data_ptr() % _BYTES else tensor
            for tensor in map(Tensor.contiguous, tensors)]
