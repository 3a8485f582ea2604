"""Checks of an operator's arguments.

mmcv's kernels reject arguments with a RuntimeError, and so do these checks: code that catches one
catches the other.
"""
from __future__ import annotations

from typing import Callable

import torch
from torch import Tensor

# Checks that wait for a result from a GPU; an operator adds its own.
DEFERRED: list[Callable[[], None]] = []
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def describe(tensor: Tensor) -> str:
    """Return shape, dtype and device of a tensor, for messages."""
    dtype = str(tensor.dtype).replace('torch.', '')
    return f'{tuple(tensor.shape)} {dtype} on {tensor.device}'


def require(condition: bool, operator: str, problem: str) -> None:
    """Raise RuntimeError naming ``operator`` and ``problem`` unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(f'{operator}: {problem}')


def require_shape(operator: str, name: str, tensor: Tensor,
                  shape: tuple[int | None, ...]) -> None:
    """Raise RuntimeError unless ``tensor`` has ``shape``; None stands for any length."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape))
    if not fits:
        wanted = ', '.join('N' if want is None else str(want) for want in shape)
        require(False, operator, f'{name} must have shape ({wanted}), got {describe(tensor)}')


def require_dtype(operator: str, name: str, tensor: Tensor,
                  allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise RuntimeError unless the dtype of ``tensor`` is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = ', '.join(str(dtype).replace('torch.', '') for dtype in allowed)
        require(False, operator, f'{name} must be {names}, got {describe(tensor)}')


def require_tensor(operator: str, name: str, tensor: Tensor, shape: tuple[int | None, ...],
                   allowed: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Call :func:`require_shape` and :func:`require_dtype`."""
    require_shape(operator, name, tensor, shape)
    require_dtype(operator, name, tensor, allowed)


def run_deferred_checks() -> None:
    """Wait for GPUs, and raise RuntimeError if an argument of an earlier call was not valid."""
    for check in DEFERRED:
        check()
