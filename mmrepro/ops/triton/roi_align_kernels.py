"""RoIAlign's mean: a filter per axis for each RoI, then one kernel forward and one backward.

The filters are those of :func:`mmrepro.ops.sampling.axis_taps` in dense form: weights (K, P, size)
of the pixels along the axis, and the first and last pixel with a weight. In the forward pass a
program handles a row of bins of some channels. Before the backward pass, every line of the map
gets the list of the rows of bins that touch it, in the order of the RoIs; a program handles some
pixels of a line and visits the list. So every gradient is one sum in that order, without atomics or
a sort.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gather, sampling
from ..mmcv.roi_align import check_mode
from ..mmcv.rois import check_rois, edges_of
from . import well_aligned

# Channels per program forward and backward, pixels of a line, rows of bins to test together.
_CHANNELS, _BACK_CHANNELS, _PIXELS, _LOOK = 32, 64, 16, 128


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float32:  # Triton's `/` is an approximation there
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit(do_not_specialize=['length'])
def _filter_kernel(start_of, size_of, grid_of, weight_of, low_of, high_of, length,
                   BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Write weights of all pixels for a bin along an axis, and the first and last above 0."""
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


@triton.jit(do_not_specialize=['channels', 'height', 'width'])
def _mean_kernel(feature, image_of, wy_of, y_low, y_high, wx_of, x_low, x_high, output,
                 channels, height, width,
                 PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr, BINS: tl.constexpr):
    """Compute a row of bins (PW) of a RoI, for some channels."""
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


@triton.jit(do_not_specialize=['rows', 'height'])
def _list_kernel(image_of, y_low, y_high, ends, lists, rows, height,
                 PH: tl.constexpr, LOOK: tl.constexpr, FILL: tl.constexpr):
    """Count the rows of bins that touch a line, or (FILL) write them to ``lists``."""
    image = tl.program_id(0) // height
    y = tl.program_id(0) % height
    count = tl.full([], 0, tl.int64)
    if FILL and tl.program_id(0) > 0:
        count = tl.load(ends + tl.program_id(0) - 1)
    for block in range(0, rows, LOOK):
        row = block + tl.arange(0, LOOK)
        exists = row < rows
        touches = exists & (tl.load(image_of + row // PH, mask=exists, other=-1) == image)
        touches &= tl.load(y_low + row, mask=exists, other=0) <= y
        touches &= tl.load(y_high + row, mask=exists, other=-1) >= y
        hit = touches.to(tl.int32)
        if FILL:
            tl.store(lists + count + tl.cumsum(hit, 0) - 1, row, mask=touches)
        count += tl.sum(hit, 0)
    if not FILL:
        tl.store(ends + tl.program_id(0), count)


@triton.jit(do_not_specialize=['channels', 'height', 'width'])
def _scatter_kernel(grad_of, wy_of, wx_of, x_low, x_high, ends, lists, result,
                    channels, height, width, PH: tl.constexpr, PW: tl.constexpr,
                    CHANNELS: tl.constexpr, PIXELS: tl.constexpr):
    """Add the gradients of some pixels of a line, for some channels, over all RoIs."""
    image = tl.program_id(0) // height
    y = tl.program_id(0) % height
    first = tl.program_id(1) * PIXELS
    last = first + PIXELS - 1
    x = first + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS, PIXELS], dtype=wy_of.dtype.element_ty)
    begin = tl.full([], 0, tl.int64)
    if tl.program_id(0) > 0:
        begin = tl.load(ends + tl.program_id(0) - 1)
    count = (tl.load(ends + tl.program_id(0)) - begin).to(tl.int32)
    for number in range(0, count):
        row = tl.load(lists + begin + number).to(tl.int64)  # offsets may pass what 32 bits hold
        wy = tl.load(wy_of + row * height + y)
        for pw in range(0, PW):
            column = row // PH * PW + pw
            low, high = tl.load(x_low + column), tl.load(x_high + column)
            if (low <= last) & (high >= first):
                live = (x >= low) & (x <= high)
                weight = wy * tl.load(wx_of + column * width + x, mask=live, other=0.)
                grad = tl.load(grad_of + (row * PW + pw) * channels + channel,
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


# Weights, first and last pixel of every bin along an axis.
_Filters = tuple[Tensor, Tensor, Tensor]


def _filters(start: Tensor, size: Tensor, grid: Tensor, bins: int, length: int) -> _Filters:
    """Return weights (K, P, length), and first and last pixel (K, P) int32; none: last < first."""
    weight = start.new_empty(len(start), bins, length)
    low, high = (torch.empty(len(start), bins, dtype=torch.int32, device=start.device)
                 for _ in range(2))
    _filter_kernel[(len(start), bins)](
        *well_aligned(start, size, grid.to(torch.int32)), weight, low, high, length,
        BINS=bins, BLOCK=triton.next_power_of_2(length), enable_fp_fusion=False)
    return weight, low, high


def _lists(image: Tensor, low: Tensor, high: Tensor, images: int, height: int
           ) -> tuple[Tensor, Tensor]:
    """Return where the list of each line ends, and the rows of bins that touch the lines.

    The host does not know how many there are; the memory is for the case that all touch all lines
    of an image.
    """
    bins = low.shape[1]
    ends = torch.empty(images * height, dtype=torch.int64, device=low.device)
    lists = torch.empty(low.numel() * height, dtype=torch.int32, device=low.device)
    for fill in (False, True):
        _list_kernel[(len(ends), )](image, low, high, ends, lists, low.numel(), height, PH=bins,
                                    LOOK=_LOOK, FILL=fill)
        if not fill:
            ends = ends.cumsum(0)
    return ends, lists


def _prepare(feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
             sampling_ratio: int, aligned: bool, check: bool) -> tuple[Tensor, _Filters, _Filters]:
    """Return image indices, and the filters along y and x.

    ``check`` is for the forward: it takes a synchronization, and a backward has the same RoIs.
    """
    y, x, bin_h, bin_w = edges_of(rois, bins, scale, aligned)
    if check:
        check_rois('roi_align', feature, rois)
        rows, columns = sampling.grid_of(bin_h, bin_w, sampling_ratio)
    else:
        rows, columns = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
    return (rois[:, 0].to(torch.int32), _filters(y, bin_h, rows, bins[0], feature.shape[2]),
            _filters(x, bin_w, columns, bins[1], feature.shape[3]))


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """Run :func:`mmrepro.ops.mmcv.roi_align.roi_align_forward`."""
    check_mode(pool_mode)
    if output.numel() == 0:
        check_rois('roi_align', input, rois)
        return
    with torch.cuda.device_of(input):
        image, ys, xs = _prepare(input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned, check=True)
        (_, channels, height, width), target = input.shape, well_aligned(output)[0]
        block = min(_CHANNELS, triton.next_power_of_2(channels))
        _mean_kernel[(len(rois) * aligned_height, triton.cdiv(channels, block))](
            *well_aligned(input), image, *ys, *xs, target, channels, height, width,
            PH=aligned_height, PW=aligned_width, CHANNELS=block,
            BINS=triton.next_power_of_2(aligned_width), enable_fp_fusion=False)
        if target is not output:
            output.copy_(target)


def roi_align_backward(grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor,
                       grad_input: Tensor, aligned_height: int, aligned_width: int,
                       spatial_scale: float, sampling_ratio: int, pool_mode: int,
                       aligned: bool) -> None:
    """Run :func:`mmrepro.ops.mmcv.roi_align.roi_align_backward`."""
    check_mode(pool_mode)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    with torch.cuda.device_of(grad_input):
        image, ys, xs = _prepare(grad_input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned, check=False)
        (images, channels, height, width), target = grad_input.shape, well_aligned(grad_input)[0]
        weight, low, high = ys
        ends, lists = _lists(image, low, high, images, height)
        block = min(_BACK_CHANNELS, triton.next_power_of_2(channels))
        grid = images * height, triton.cdiv(width, _PIXELS), triton.cdiv(channels, block)
        _scatter_kernel[grid](
            *well_aligned(gather.bags(grad_output)), weight, *xs, ends, lists, target, channels,
            height, width, PH=aligned_height, PW=aligned_width, CHANNELS=block, PIXELS=_PIXELS,
            enable_fp_fusion=False)
        if target is not grad_input:
            grad_input.copy_(target)
