"""Functions that torch's Python calls under the deterministic flag, without their detours."""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upsample_linear(input: Tensor, output_size: Sequence[int] | None, align_corners: bool,
                    scale_factors: Sequence[float] | None) -> Tensor:
    """Compute ``F.interpolate`` of 'linear', 'bilinear' and 'trilinear' as without the flag."""
    kernel = {3: torch._C._nn.upsample_linear1d, 4: torch._C._nn.upsample_bilinear2d,
              5: torch._C._nn.upsample_trilinear3d}[input.dim()]
    return kernel(input, output_size, align_corners, scale_factors)


def replication_pad(input: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute ``F.pad(mode='replicate')`` as without the flag."""
    return torch._C._nn.pad(input, padding, 'replicate', None)


def max_pool3d_with_indices(input: Tensor, kernel_size: int | list[int],
                            stride: int | list[int] | None = None, padding: int | list[int] = 0,
                            dilation: int | list[int] = 1,
                            ceil_mode: bool = False) -> tuple[Tensor, Tensor]:
    """Compute ``F.max_pool3d`` as without the flag."""
    return torch._C._nn.max_pool3d_with_indices(input, kernel_size, [] if stride is None else
                                                stride, padding, dilation, ceil_mode)
