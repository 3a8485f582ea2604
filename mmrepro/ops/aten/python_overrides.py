"""Functions that torch's Python calls under the deterministic flag, without their detours.

The first argument is torch's function, which is called for what is not a batch of maps.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Callable

import torch
from torch import Tensor


def upsample_bilinear(stock: Callable[..., Tensor], input: Tensor,
                      output_size: Sequence[int] | None, align_corners: bool,
                      scale_factors: Sequence[float] | None) -> Tensor:
    """Compute ``F.interpolate(mode='bilinear')`` as without the flag."""
    kernel = torch._C._nn.upsample_bilinear2d if input.dim() == 4 else stock
    return kernel(input, output_size, align_corners, scale_factors)


def replication_pad(stock: Callable[..., Tensor], input: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``F.pad(mode='replicate')`` of height and width as without the flag."""
    if len(padding) != 4:
        return stock(input, padding)
    return torch._C._nn.pad(input, padding, 'replicate', None)
