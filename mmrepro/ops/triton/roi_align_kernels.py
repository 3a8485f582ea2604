"""RoIAlign's mean: a filter per axis for each RoI, then one kernel forward and one backward.

The filters are those of :func:`mmrepro.ops.sampling.axis_taps` in dense form: weights (K, P, size)
of the pixels along the axis, and the first and last pixel with a weight. In the forward pass a
program handles a row of bins of some channels. In the backward pass a program handles some pixels
of a line of the map and visits the RoIs that touch them in the order of their indices; so every
gradient is one sum in that order, without atomics or a sort.
"""
from __future__ import annotations

from typing import Tuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gather, sampling
from ..mmcv import roi_align
from ..mmcv.rois import check_rois, edges_of

__all__ = ['roi_align_backward', 'roi_align_forward']

# Channels per program forward and backward, pixels of a line, RoIs to test together.
_CHANNELS, _BACK_CHANNELS, _PIXELS, _LOOK = 32, 64, 16, 128


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float32:  # Triton's `/` is an approximation there
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def _filter_kernel(start_of, size_of, grid_of, weight_of, low_of, high_of, length,
                   BINS: tl.constexpr, BLOCK: tl.constexpr):
    """One bin of one RoI along one axis: weights of all pixels, first and last with a weight."""
    bin_index = tl.program_id(1)
    bag = tl.program_id(0) * BINS + bin_index
    size = tl.load(size_of + tl.program_id(0))
    count = tl.load(grid_of + tl.program_id(0))
    begin = tl.load(start_of + tl.program_id(0)) + bin_index.to(size.dtype) * size
    pixel = tl.arange(0, BLOCK)
    at = pixel.to(size.dtype)
    total = tl.zeros([BLOCK], dtype=size.dtype)
    # constants in the dtype of the boxes
    half, end = tl.full([], 0.5, size.dtype), tl.full([], 0, size.dtype) + (length - 1)
    samples = tl.maximum(count, 1).to(size.dtype)
    for i in range(0, count):
        position = begin + _divide((half + i) * size, samples)
        outside = (position < -1) | (position > length)
        # these comparisons are false for NaN, so NaN reaches the result
        position = tl.where(position < 0, 0., position)
        position = tl.where(position > end, end, position)
        hat = 1 - tl.abs(position - at)
        hat = tl.where(hat < 0, 0., hat)
        total += tl.where(outside, 0., hat)
    inside = pixel < length
    counts = inside & (total != 0)
    tl.store(weight_of + bag.to(tl.int64) * length + pixel, _divide(total, samples), mask=inside)
    tl.store(low_of + bag, tl.min(tl.where(counts, pixel, length), 0))
    tl.store(high_of + bag, tl.max(tl.where(counts, pixel, -1), 0))


@triton.jit
def _mean_kernel(feature, image_of, wy_of, y_low, y_high, wx_of, x_low, x_high, output,
                 channels, height, width,
                 PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr, BINS: tl.constexpr):
    """A row of bins (PW) of one RoI, for some channels."""
    roi_index = tl.program_id(0) // PH
    row = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    column = tl.arange(0, BINS)
    here = column < PW
    low = tl.load(x_low + roi_index * PW + column, mask=here, other=0)
    high = tl.load(x_high + roi_index * PW + column, mask=here, other=-1)
    widest = tl.max(high - low, 0) + 1
    image = tl.load(image_of + roi_index).to(tl.int64)
    plane = (image * channels + channel.to(tl.int64)) * height
    across = (roi_index * PW + column).to(tl.int64) * width
    total = tl.zeros([CHANNELS, BINS], dtype=wy_of.dtype.element_ty)
    for y in range(tl.load(y_low + row), tl.load(y_high + row) + 1):
        wy = tl.load(wy_of + row.to(tl.int64) * height + y)
        for step in range(0, widest):
            x = low + step
            live = here & (x <= high)
            weight = wy * tl.load(wx_of + across + x, mask=live, other=0.)
            # pixels without a weight are not read, because they may be infinite
            wanted = (channel < channels)[:, None] & (live & (weight != 0))[None, :]
            value = tl.load(feature + (plane[:, None] + y) * width + x[None, :],
                            mask=wanted, other=0.)
            total += value.to(total.dtype) * tl.where(weight != 0, weight, 0.)[None, :]
    address = ((roi_index.to(tl.int64) * channels + channel) * PH + row % PH) * PW
    tl.store(output + address[:, None] + column[None, :], total.to(output.dtype.element_ty),
             mask=(channel < channels)[:, None] & here[None, :])


@triton.jit
def _scatter_kernel(grad_of, image_of, wy_of, y_low, y_high, wx_of, x_low, x_high, edges, result,
                    rois, channels, height, width,
                    PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr,
                    PIXELS: tl.constexpr, LOOK: tl.constexpr):
    """Gradients of some pixels of a line of the map, for some channels, over all RoIs."""
    image = tl.program_id(0) // height
    y = tl.program_id(0) % height
    first = tl.program_id(1) * PIXELS
    last = first + PIXELS - 1
    x = first + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS, PIXELS], dtype=wy_of.dtype.element_ty)
    long = tl.full([], 0, tl.int64)  # offsets may pass what 32 bits hold
    for block in range(0, rois, LOOK):
        some = block + tl.arange(0, LOOK)
        exists = some < rois
        touched = exists & (tl.load(image_of + some, mask=exists, other=-1) == image)
        touched &= tl.load(edges + some, mask=exists, other=0) <= y
        touched &= tl.load(edges + rois + some, mask=exists, other=-1) >= y
        touched &= tl.load(edges + 2 * rois + some, mask=exists, other=0) <= last
        touched &= tl.load(edges + 3 * rois + some, mask=exists, other=-1) >= first
        if tl.sum(touched.to(tl.int32), 0) > 0:
            for k in range(block, tl.minimum(block + LOOK, rois)):
                if tl.sum(tl.where(some == k, touched.to(tl.int32), 0), 0) > 0:
                    for ph in range(0, PH):
                        row = k * PH + ph
                        if (tl.load(y_low + row) <= y) & (tl.load(y_high + row) >= y):
                            wy = tl.load(wy_of + (long + row) * height + y)
                            for pw in range(0, PW):
                                column = k * PW + pw
                                low, high = tl.load(x_low + column), tl.load(x_high + column)
                                if (low <= last) & (high >= first):
                                    live = (x >= low) & (x <= high)
                                    weight = wy * tl.load(
                                        wx_of + (long + column) * width + x, mask=live,
                                        other=0.)
                                    bag = (long + row) * PW + pw
                                    grad = tl.load(grad_of + bag * channels + channel,
                                                   mask=channel < channels, other=0.)
                                    part = grad.to(total.dtype)[:, None] * weight[None, :]
                                    # a weight of 0 adds nothing, also to an infinite gradient
                                    total += tl.where((weight != 0)[None, :], part, 0.)
    address = ((image.to(tl.int64) * channels + channel) * height + y) * width
    address = address[:, None] + x[None, :]
    inside = (channel < channels)[:, None] & (x < width)[None, :]
    before = tl.load(result + address, mask=inside, other=0.)
    # rounded, added and rounded again, as torch adds tensors of half precision
    after = before.to(total.dtype) + total.to(before.dtype).to(total.dtype)
    tl.store(result + address, after.to(before.dtype), mask=inside)


def _filters(start: Tensor, size: Tensor, grid: Tensor, bins: int, length: int
             ) -> Tuple[Tensor, Tensor, Tensor]:
    """(K, P, length) weights, and (K, P) int32 first and last pixel of each; none: last < first."""
    weight = start.new_empty(len(start), bins, length)
    low, high = (torch.empty(len(start), bins, dtype=torch.int32, device=start.device)
                 for _ in range(2))
    _filter_kernel[(len(start), bins)](
        start.contiguous(), size.contiguous(), grid.to(torch.int32), weight, low, high, length,
        BINS=bins, BLOCK=triton.next_power_of_2(length), enable_fp_fusion=False)
    return weight, low, high


def _prepare(feature: Tensor, rois: Tensor, bins: Tuple[int, int], scale: float,
             sampling_ratio: int, aligned: bool, check: bool) -> Tuple[Tensor, tuple, tuple]:
    """Image indices, and the filters along y and x.

    ``check`` is for the forward: it takes a synchronisation, and a backward has the same RoIs.
    """
    y, x, bin_h, bin_w = edges_of(rois, bins, scale, aligned)
    if check:
        check_rois('roi_align', feature, rois, 5)
        grid = sampling.grid_of(bin_h, bin_w, sampling_ratio)[:2]
    else:
        grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
    return (rois[:, 0].to(torch.int32), _filters(y, bin_h, grid[0], bins[0], feature.shape[2]),
            _filters(x, bin_w, grid[1], bins[1], feature.shape[3]))


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """:func:`mmrepro.ops.mmcv.roi_align.roi_align_forward`; it handles the maximum."""
    if pool_mode == 0 or output.numel() == 0:
        roi_align.roi_align_forward(
            input, rois, output, argmax_y, argmax_x, aligned_height, aligned_width, spatial_scale,
            sampling_ratio, pool_mode, aligned)
        return
    with torch.cuda.device_of(input):
        image, ys, xs = _prepare(input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned, check=True)
        (_, channels, height, width), target = input.shape, output.contiguous()
        block = min(_CHANNELS, triton.next_power_of_2(channels))
        _mean_kernel[(len(rois) * aligned_height, triton.cdiv(channels, block))](
            input.contiguous(), image, *ys, *xs, target, channels, height, width,
            PH=aligned_height, PW=aligned_width, CHANNELS=block,
            BINS=triton.next_power_of_2(aligned_width), enable_fp_fusion=False)
        if target is not output:
            output.copy_(target)


def roi_align_backward(grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor,
                       grad_input: Tensor, aligned_height: int, aligned_width: int,
                       spatial_scale: float, sampling_ratio: int, pool_mode: int,
                       aligned: bool) -> None:
    """:func:`mmrepro.ops.mmcv.roi_align.roi_align_backward`; it handles the maximum."""
    if pool_mode == 0 or grad_output.numel() == 0 or grad_input.numel() == 0:
        roi_align.roi_align_backward(
            grad_output, rois, argmax_y, argmax_x, grad_input, aligned_height, aligned_width,
            spatial_scale, sampling_ratio, pool_mode, aligned)
        return
    with torch.cuda.device_of(grad_input):
        image, ys, xs = _prepare(grad_input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned, check=False)
        edges = torch.stack((ys[1].amin(1), ys[2].amax(1), xs[1].amin(1), xs[2].amax(1)))
        (images, channels, height, width), target = grad_input.shape, grad_input.contiguous()
        block = min(_BACK_CHANNELS, triton.next_power_of_2(channels))
        grid = images * height, triton.cdiv(width, _PIXELS), triton.cdiv(channels, block)
        _scatter_kernel[grid](
            gather.bags(grad_output).contiguous(), image, *ys, *xs, edges, target, len(rois),
            channels, height, width, PH=aligned_height, PW=aligned_width, CHANNELS=block,
            PIXELS=_PIXELS, LOOK=_LOOK, enable_fp_fusion=False)
        if target is not grad_input:
            grad_input.copy_(target)
