"""What an operator refuses, said the same way everywhere.

mmcv's kernels refuse with a RuntimeError, from torch or from their own assertions; so do ours, so
that a caller who caught one catches the other.
"""
from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

__all__ = ['describe', 'require', 'require_dtype', 'require_shape']

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def describe(tensor: Tensor) -> str:
    """Shape, dtype and device of a tensor in a few words."""
    dtype = str(tensor.dtype).replace('torch.', '')
    return f'{tuple(tensor.shape)} {dtype} on {tensor.device}'


def require(condition: bool, operator: str, problem: str) -> None:
    """Raise RuntimeError naming ``operator`` and ``problem`` unless ``condition`` holds."""
    if not condition:
        raise RuntimeError(f'{operator}: {problem}')


def require_shape(operator: str, name: str, tensor: Tensor,
                  shape: Tuple[Optional[int], ...]) -> None:
    """Refuse ``tensor`` unless it has ``shape``; None stands for any length."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == got for want, got in zip(shape, tensor.shape))
    if not fits:
        wanted = ', '.join('N' if want is None else str(want) for want in shape)
        require(False, operator, f'{name} must have shape ({wanted}), got {describe(tensor)}')


def require_dtype(operator: str, name: str, tensor: Tensor,
                  allowed: Tuple[torch.dtype, ...] = FLOATS) -> None:
    """Refuse ``tensor`` unless its dtype is one of ``allowed``."""
    if tensor.dtype not in allowed:
        names = ', '.join(str(dtype).replace('torch.', '') for dtype in allowed)
        require(False, operator, f'{name} must be {names}, got {describe(tensor)}')
