"""Losses that torch sums with atomics."""
from __future__ import annotations

from typing import Optional, Tuple

from torch import Tensor

from ..gather import compute_dtype

__all__ = ['nll_loss2d_forward']

# Codes of aten's Reduction.
_NONE, _MEAN = 0, 1


def nll_loss2d_forward(self: Tensor, target: Tensor, weight: Optional[Tensor], reduction: int,
                       ignore_index: int) -> Tuple[Tensor, Tensor]:
    """``aten::nll_loss2d_forward``: (loss, sum of the weights of pixels that are not ignored).

    ``self`` is (N, C, H, W) log-probabilities, ``target`` (N, H, W) classes, ``weight`` (C,) or
    None. Raises RuntimeError if the shapes do not fit.
    """
    shape = (self.shape[0], *self.shape[2:])
    if self.dim() != 4 or target.shape != shape:
        raise RuntimeError(f'nll_loss2d: expected input (N, C, H, W) and target (N, H, W), got '
                           f'{tuple(self.shape)} and {tuple(target.shape)}')
    counted = target != ignore_index
    classes = target.masked_fill(~counted, 0)
    dtype = compute_dtype(self)
    scale = counted.to(dtype) if weight is None else (
        weight.to(dtype)[classes].masked_fill(~counted, 0))
    loss = -self.gather(1, classes.unsqueeze(1)).squeeze(1).to(dtype) * scale
    # 0 times an infinite log-probability is NaN
    loss = loss.masked_fill(~counted, 0)
    if reduction == _NONE:
        return loss.to(self.dtype), self.new_zeros(())
    total = scale.sum()
    loss = loss.sum()
    return (loss / total if reduction == _MEAN else loss).to(self.dtype), total.to(self.dtype)


