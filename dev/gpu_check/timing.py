"""Time and memory of the device that a row runs on."""
from __future__ import annotations

import gc
import time
from typing import Any, Callable

import torch

__all__ = ['free_memory', 'timed']


def free_memory(device: str) -> None:
    """Collect circular references, and return cached memory to the device."""
    gc.collect()
    if device == 'cuda':
        torch.cuda.empty_cache()


def timed(function: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return (result, milliseconds until the device has done what ``function`` asked of it)."""
    if device != 'cuda':
        start = time.perf_counter()
        result = function()
        return result, (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    result = function()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)
