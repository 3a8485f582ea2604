"""Convolutions by oneDNN, whatever their sizes.

torch unfolds small inputs, and multiplies matrices with MKL: 1x1 kernels on one thread with fewer
than 16 images, and single images of at most 20,480 numbers.
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import torch
from torch import Tensor

from ...errors import DeterminismError
from .products import SHORT, product, products

_ENOUGH = 16  # images, from which on torch takes oneDNN
# names of torch's choice: oneDNN, or nothing to compute. Its transposed convolution has no name.
_ONEDNN = ('Mkldnn', 'MkldnnEmpty', 'Empty', '???')
# oneDNN's direct kernel at AVX2: numbers in a register, and columns at once
_LANES, _COLUMNS, _MOST_COLUMNS, _WIDEST = 8, 3, 7, 7


def _by_onednn(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    """Whether torch takes oneDNN, or computes nothing."""
    return torch._C._select_conv_backend(x, weight, None, *settings).name in _ONEDNN


def _is_product(weight: Tensor, settings: Sequence[Any]) -> bool:
    """Whether the convolution is a product of matrices at every pixel."""
    stride, padding, _, transposed, _, groups = settings
    return (weight.dim() == 4 and weight.shape[2:] == (1, 1) and not transposed and groups == 1
            and set(stride) == {1} and set(padding) == {0})


def _reach_and_size(x: Tensor, weight: Tensor, settings: Sequence[Any]
                    ) -> tuple[list[int], list[int]]:
    """Return how far the kernel reaches, and the size of the output, dimension by dimension."""
    strides, pads, dilations, *_ = settings
    reach = [dilation * (size - 1) + 1 for dilation, size in zip(dilations, weight.shape[2:])]
    return reach, [(length + 2 * pad - extent) // stride + 1 for length, pad, extent, stride in zip(
        x.shape[2:], pads, reach, strides)]


def _is_direct(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> bool:
    """Whether oneDNN computes the output from the input as it is.

    Otherwise it unfolds the input in blocks of channels, as many as fit into the L2 cache of
    the CPU, and adds up the blocks. The conditions are those of ``init_conf()`` in oneDNN 3.12,
    jit_avx2_conv_kernel_f32.cpp; the blocks are in gemm_convolution_utils.cpp.
    """
    strides, pads, _, transposed, _, groups = settings
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    if transposed or inputs == 1:
        return True
    if groups > 1 and (outputs % _LANES or inputs % _LANES):
        return False
    reach, size = _reach_and_size(x, weight, settings)
    # beyond the end of the input
    ends = [(count - 1) * stride + extent - length - pad for count, stride, extent, length, pad in
            zip(size, strides, reach, x.shape[2:], pads)]
    if any(extent <= max(pad, end) for extent, pad, end in zip(reach, pads, ends)):
        return False
    if weight.shape[-1] > _WIDEST and any(pads) and max(strides) > 1:
        return False
    width, stride, pad = size[-1], strides[-1], pads[-1]
    columns = min(_COLUMNS, width)
    if pad > columns:
        return False
    end = ends[-1] - width % columns * stride
    if end > columns * stride and width // columns > 1:
        columns = min(end // stride + width % columns, width, _MOST_COLUMNS)
        return bool(columns >= max(pad, ends[-1] - width % columns * stride))
    return True


def _unfolded(x: Tensor, weight: Tensor, bias: Tensor | None, settings: Sequence[Any]) -> Tensor:
    """Return the convolution of images (N, C, H, W) as products, image by image."""
    stride, padding, dilation, _, _, groups = settings
    _, size = _reach_and_size(x, weight, settings)
    kernel = weight.reshape(groups, weight.shape[0] // groups, -1)
    images = []
    for image in x:
        columns = torch.nn.functional.unfold(image[None], weight.shape[2:], dilation, padding,
                                             stride)
        images.append(products(kernel, columns.view(groups, kernel.shape[2], -1)).view(-1, *size))
    result = torch.stack(images)
    return result if bias is None else result.add_(bias[:, None, None])


def _enlarged(x: Tensor, weight: Tensor, settings: Sequence[Any]) -> int:
    """Return the number of images that torch gives to oneDNN, at least those of ``x``."""
    for count in sorted({max(2, len(x)), max(_ENOUGH, len(x))}):
        if _by_onednn(x[:1].expand(count, *x.shape[1:]), weight, settings):
            return count
    raise DeterminismError(
        f'a convolution of {x.dtype} tensors, input {list(x.shape)}, kernel {list(weight.shape)}, '
        "is refused with randomness.numerics.cpu='portable': oneDNN does not compute it")


def _padded(tensor: Tensor, count: int) -> Tensor:
    """Return ``count`` images: those of ``tensor``, and zeros."""
    return torch.cat([tensor, tensor.new_zeros(count - len(tensor), *tensor.shape[1:])])


def forward(stock: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None,
            *settings: Any) -> Tensor:
    """Return the convolution.

    ``settings`` are stride, padding, dilation, transposed, output_padding and groups.
    """
    if x.dtype in SHORT:  # which CPUs compute in different ways, by what they have units for
        return forward(stock, x.float(), weight.float(), None if bias is None else bias.float(),
                       *settings).to(x.dtype)
    if x.dtype == torch.float32 and x.numel() and not _is_direct(x, weight, settings):
        if x.dim() == 4:
            return _unfolded(x, weight, bias, settings)
        if x.dim() == 3:
            stride, padding, dilation, *rest = settings
            return forward(stock, x[:, :, None], weight[:, :, None], bias, (1, *stride),
                           (0, *padding), (1, *dilation), rest[0], (0, *rest[1]), rest[2])[:, :, 0]
        raise DeterminismError(
            f'a convolution of input {list(x.shape)}, kernel {list(weight.shape)}, is refused with '
            "randomness.numerics.cpu='portable': oneDNN splits it by the size of a cache")
    if _by_onednn(x, weight, settings):
        return stock(x, weight, bias, *settings)
    stride, padding, dilation, transposed, _, groups = settings
    if x.dtype == torch.float32 and not transposed and x.dim() == 4:
        result: Tensor = torch.ops.aten.mkldnn_convolution(
            x, weight, bias, padding, stride, dilation, groups)
        return result
    count = _enlarged(x, weight, settings)
    return stock(_padded(x, count), weight, bias, *settings)[:len(x)]


def backward(stock: Callable[..., tuple[Any, ...]], gradient: Tensor, x: Tensor,
             weight: Tensor, bias_sizes: Sequence[int] | None,
             *rest: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias; None where the mask is False.

    ``rest`` are the settings of :func:`forward`, and the mask of outputs.
    """
    *settings, mask = rest
    if x.dtype in SHORT:
        results = backward(stock, gradient.float(), x.float(), weight.float(), bias_sizes, *rest)
        return tuple(None if result is None else result.to(x.dtype) for result in results)
    if _by_onednn(x, weight, settings):
        return stock(gradient, x, weight, bias_sizes, *rest)
    if x.dtype == torch.float32 and _is_product(weight, settings):
        return _backward_of_product(gradient, x, weight, mask)
    count = _enlarged(x, weight, settings)
    of_input, of_weight, of_bias = stock(
        _padded(gradient, count), _padded(x, count), weight, bias_sizes, *rest)
    return of_input[:len(x)] if mask[0] else None, of_weight, of_bias


def _backward_of_product(gradient: Tensor, x: Tensor, weight: Tensor,
                         mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a 1x1 convolution; that of the weight, image by image."""
    of_input = torch.ops.aten.mkldnn_convolution(
        gradient, weight.transpose(0, 1).contiguous(), None, (0, 0), (1, 1), (1, 1), 1) \
        if mask[0] else None
    of_weight = None
    if mask[1]:
        parts = (product(image, values.t())
                 for image, values in zip(gradient.flatten(2), x.flatten(2)))
        of_weight = functools.reduce(torch.add, parts).view(weight.shape)
    return of_input, of_weight, gradient.sum((0, 2, 3)) if mask[2] else None
