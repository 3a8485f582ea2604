"""Backward of maps resampled along each axis: resize, adaptive average pooling, padding.

Each of them is a product of one sparse matrix per axis, so its backward is the product of the
transposed matrices. A transpose is stored by *destination*: for each input position, the output
positions that read it, in ascending order, and their weights. Every element of the gradient is then
a sum in a fixed order, where torch's CUDA kernels add with atomics or raise. Only gathers, products
and sums of whole tensors are used, no matrix products; so TF32 does not affect the bits, and they
are the same on CPU and CUDA.

Sources of the formulas: ``aten/src/ATen/native/UpSample.h`` (positions and weights),
``AdaptivePooling.h`` (windows) and ``PaddingSupport.h``.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..gather import compute_dtype

_CUBIC = -0.75  # constant of the cubic filter, that of OpenCV


class _Reads(NamedTuple):
    """The reads along one axis: output position, input position and weight of each."""

    target: np.ndarray
    source: np.ndarray
    weight: np.ndarray


class _Axis(NamedTuple):
    """The transpose: output positions and weights (T, inputs), and whether some are padding."""

    target: Tensor
    weight: Tensor
    padded: bool


def _reads(positions: np.ndarray, weights: np.ndarray) -> _Reads:
    """Return reads of (outputs, taps) positions and weights, without those of weight 0."""
    target = np.repeat(np.arange(len(positions)), positions.shape[1])
    source, weight = positions.reshape(-1), weights.reshape(-1)
    live = weight != 0
    return _Reads(target[live], source[live], weight[live])


def _positions(size: int, outputs: int, align: bool, given: float | None) -> np.ndarray:
    """Return where outputs of a resize lie on the axis of inputs."""
    at = np.arange(outputs, dtype=np.float64)
    if align:
        return at * ((size - 1) / (outputs - 1) if outputs > 1 else 0.)
    scale = 1 / given if given is not None and given > 0 else size / outputs
    return scale * (at + 0.5) - 0.5


def _linear(size: int, outputs: int, align: bool, given: float | None) -> _Reads:
    at = np.maximum(_positions(size, outputs, align, given), 0)
    low = np.minimum(at.astype(np.int64), size - 1)
    high = np.minimum(low + 1, size - 1)
    part = np.clip(at - low, 0, 1)
    return _reads(np.stack((low, high), 1), np.stack((1 - part, part), 1))


def _cubic(size: int, outputs: int, align: bool, given: float | None) -> _Reads:
    at = _positions(size, outputs, align, given)
    position = np.floor(at)[:, None] + np.arange(-1, 3)
    x = np.abs(at[:, None] - position)
    near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * _CUBIC - 4 * _CUBIC
    return _reads(np.clip(position, 0, size - 1).astype(np.int64), np.where(x <= 1, near, far))


RESIZES: dict[str, Callable[..., _Reads]] = {'linear': _linear, 'cubic': _cubic}


def _adaptive(size: int, outputs: int) -> _Reads:
    out = np.arange(outputs)
    first, last = out * size // outputs, -(-(out + 1) * size // outputs)
    position = first[:, None] + np.arange(max(1, int((last - first).max(initial=0))))
    weight = np.where(position < last[:, None], 1. / np.maximum(last - first, 1)[:, None], 0.)
    return _reads(position, weight)


def _reflect(size: int, outputs: int, before: int) -> _Reads:
    at = np.abs(np.arange(outputs) - before)
    at = np.where(at >= size, 2 * (size - 1) - at, at)
    return _reads(at[:, None], np.ones((outputs, 1)))


def _replicate(size: int, outputs: int, before: int) -> _Reads:
    at = np.clip(np.arange(outputs) - before, 0, size - 1)
    return _reads(at[:, None], np.ones((outputs, 1)))


@functools.lru_cache(maxsize=256)
def _axis(build: Callable[..., _Reads], size: int, outputs: int, arguments: tuple[Any, ...],
          device: torch.device, dtype: torch.dtype) -> _Axis:
    """Return the transposed filter on a device, cached: detectors use few shapes."""
    reads = build(size, outputs, *arguments)
    order = np.lexsort((reads.target, reads.source))
    source = reads.source[order]
    counts = np.bincount(source, minlength=size)
    taps = int(counts.max(initial=0))
    slot = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    index = np.full((taps, size), outputs, np.int64)
    weight = np.zeros((taps, size), np.float64)
    index[slot, source], weight[slot, source] = reads.target[order], reads.weight[order]
    return _Axis(torch.from_numpy(index).to(device), torch.from_numpy(weight).to(device, dtype),
                 bool((counts < taps).any()))


def _transpose(grad: Tensor, sizes: Sequence[int],
               builds: Sequence[tuple[Callable[..., _Reads], tuple[Any, ...]]]) -> Tensor:
    """Transpose the last ``len(sizes)`` dimensions of ``grad``, in order.

    Along each: ``out[i] = sum over t of weight[t, i] * grad[target[t, i]]``, t ascending.
    """
    dtype = compute_dtype(grad)
    result = grad.to(dtype)
    for dim, size, (build, arguments) in zip(range(-len(sizes), 0), sizes, builds):
        axis = _axis(build, int(size), grad.shape[dim], arguments, grad.device, dtype)
        shape = list(result.shape)
        if axis.padded:
            # padding reads an extra zero: 0 times an infinite gradient would be NaN
            shape[dim] = 1
            result = torch.cat((result, result.new_zeros(shape)), dim)
        shape[dim] = axis.target.shape[1]
        parts = (result.index_select(dim, target).mul_(weight.view(-1, *[1] * (-1 - dim)))
                 for target, weight in zip(axis.target, axis.weight))
        # one part at a time is in memory
        result = functools.reduce(Tensor.add_, parts) if len(axis.target) else (
            result.new_zeros(shape))
    return result.to(grad.dtype)


def resize_backward(kind: str, grad: Tensor, output_size: Sequence[int],
                    input_size: Sequence[int], align_corners: bool,
                    *scales: float | None) -> Tensor:
    """Compute ``aten::upsample_bi*2d_backward``; ``kind`` is a key of :data:`RESIZES`."""
    # the dispatcher omits trailing arguments that have their defaults
    given = (*scales, *(None,) * (len(output_size) - len(scales)))
    return _transpose(grad, input_size[2:],
                      [(RESIZES[kind], (bool(align_corners), scale)) for scale in given])


def adaptive_avg_pool_backward(grad: Tensor, self: Tensor) -> Tensor:
    """Compute ``aten::_adaptive_avg_pool2d_backward``."""
    return _transpose(grad, self.shape[-2:], [(_adaptive, ())] * 2)


def pad_backward(kind: str, grad: Tensor, self: Tensor, padding: Sequence[int]) -> Tensor:
    """Compute the backward of ``aten::reflection_pad2d`` or ``replication_pad2d``.

    ``kind`` is 'reflection' or 'replication'; ``padding`` is left, right, top, bottom; negative
    numbers crop.
    """
    build = _reflect if kind == 'reflection' else _replicate
    return _transpose(grad, self.shape[-2:], [(build, (int(padding[i]),)) for i in (2, 0)])


# Functions that torch's Python calls under the deterministic flag, without their detours. The first
# argument is torch's function, which is called for what is not a batch of maps.

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
