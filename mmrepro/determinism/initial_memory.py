"""Detect initial weights that nothing wrote: memory is filled with NaN while a model is built."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let torch fill new memory with NaN in this block.

    Has an effect with deterministic algorithms only, and from torch 2.2 on.
    """
    import torch
    switches: Any = getattr(torch.utils, 'deterministic', None)
    before = getattr(switches, 'fill_uninitialized_memory', None)
    if before is None:
        yield
        return
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = before


def unwritten(model: Any) -> list[str]:
    """Return names of the parameters and buffers that hold a NaN."""
    import torch
    from torch.nn.parameter import is_lazy
    with_nan = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
                torch.complex128)
    return [name for named in (model.named_parameters(), model.named_buffers())
            for name, tensor in named
            if not is_lazy(tensor) and tensor.dtype in with_nan and bool(tensor.isnan().any())]
