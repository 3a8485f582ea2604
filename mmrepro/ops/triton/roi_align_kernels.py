"""RoIAlign's mean: a filter per axis for each RoI, then one kernel forward and one backward.

The filters are those of :func:`mmrepro.ops.sampling.axis_taps` in dense form: weights (K, P, size)
of the pixels along the axis, and the first and last pixel with a weight. In the forward pass a
program handles a row of bins of some channels. Before the backward pass, every line of the map
gets the list of the rows of bins that touch it, in the order of the RoIs; a program handles some
pixels of a line and visits the list. So every gradient is one sum in that order, without atomics or
a sort.

On a GPU the host does not wait to know that all RoIs are valid. Invalid ones read nothing, and are
an error in the next pass that finds the record of them in the host's memory (:class:`_Faults`), or
before a checkpoint, at the end of a validation, or at the end of the training.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gather, sampling
from ..contract import DEFERRED, describe, require, require_tensor
from ..mmcv import roi_align
from ..mmcv.rois import check_rois
from . import well_aligned

# Channels per program forward and backward, pixels of a line, rows of bins to test together.
_CHANNELS, _BACK_CHANNELS, _PIXELS, _LOOK = 32, 64, 16, 128


@triton.jit
def _divide(a, b):
    if a.dtype == tl.float32:  # Triton's `/` is an approximation there
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit(do_not_specialize=['scale', 'images', 'height', 'width', 'weights', 'bags'])
def _filter_kernel(rois, weight_of, image_of, low_of, high_of, faults, scale, images, height, width,
                   weights, bags, RATIO: tl.constexpr, ALIGNED: tl.constexpr, MOST: tl.constexpr,
                   PH: tl.constexpr, PW: tl.constexpr, BLOCK: tl.constexpr, REAL: tl.constexpr):
    """Write weights of all pixels for a bin along an axis, and the first and last above 0.

    The first PH programs of a RoI are for y. ``weights`` and ``bags``: where what is for x begins.
    """
    roi, is_y = tl.program_id(0), tl.program_id(1) < PH
    bin_index = tl.where(is_y, tl.program_id(1), tl.program_id(1) - PH)
    length, bins = tl.where(is_y, height, width), tl.where(is_y, PH, PW)
    bag = roi * bins + bin_index
    # constants in the dtype of the boxes
    half, zero = tl.full([], 0.5, REAL), tl.full([], 0, REAL)
    scale = zero + scale
    begin = tl.load(rois + roi * 5 + tl.where(is_y, 2, 1)).to(REAL) * scale
    size = tl.load(rois + roi * 5 + tl.where(is_y, 4, 3)).to(REAL) * scale
    if ALIGNED:
        begin, size = begin - half, size - half
    size -= begin
    if not ALIGNED:
        size = tl.where(size < 1, zero + 1, size)
    size = _divide(size, zero + bins)
    count = tl.full([], RATIO, tl.int32)
    if RATIO <= 0:
        wanted = tl.where(tl.abs(size) < float('inf'), tl.ceil(size), zero)
        count = tl.minimum(tl.maximum(wanted, zero), zero + 2 * MOST).to(tl.int32)
        if count > MOST:
            tl.atomic_max(faults + 2, count, sem='relaxed')
            count = 0
    image = tl.load(rois + roi * 5).to(REAL)
    valid = (image > -1) & (image < images)  # false for NaN
    if valid == 0:
        past = image >= images
        tl.atomic_max(faults + tl.where(past, 0, 1),
                      tl.where(past, tl.minimum(image, zero + (1 << 30)), zero + 1).to(tl.int32),
                      sem='relaxed')
        count = 0
    tl.store(image_of + roi, tl.where(valid, image, zero - 1).to(tl.int32))
    begin += bin_index.to(REAL) * size
    pixel = tl.arange(0, BLOCK)
    at = pixel.to(REAL)
    total = tl.zeros([BLOCK], dtype=REAL)
    end = zero + (length - 1)
    samples = tl.maximum(count, 1).to(REAL)
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
    weight_of += tl.where(is_y, 0, weights) + bag.to(tl.int64) * length
    tl.store(weight_of + pixel, _divide(total, samples), mask=inside)
    bag += tl.where(is_y, 0, bags)
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
def _list_kernel(image_of, y_low, y_high, spans, lists, rows, height,
                 PH: tl.constexpr, LOOK: tl.constexpr):
    """Write the rows of bins that touch a line to ``lists``, and where they begin and end.

    A line may have as many as there are; those of image after image fit side by side.
    """
    image = tl.program_id(0) // height
    y = tl.program_id(0) % height
    begin = y.to(tl.int64) * rows
    for block in range(0, rows, LOOK):
        row = block + tl.arange(0, LOOK)
        of = tl.load(image_of + row // PH, mask=row < rows, other=image)
        begin += tl.sum((of < image).to(tl.int32), 0)
    end = begin
    for block in range(0, rows, LOOK):
        row = block + tl.arange(0, LOOK)
        exists = row < rows
        touches = exists & (tl.load(image_of + row // PH, mask=exists, other=-1) == image)
        touches &= tl.load(y_low + row, mask=exists, other=0) <= y
        touches &= tl.load(y_high + row, mask=exists, other=-1) >= y
        hit = touches.to(tl.int32)
        tl.store(lists + end + tl.cumsum(hit, 0) - 1, row, mask=touches)
        end += tl.sum(hit, 0)
    tl.store(spans + 2 * tl.program_id(0), begin)
    tl.store(spans + 2 * tl.program_id(0) + 1, end)


@triton.jit(do_not_specialize=['channels', 'height', 'width'])
def _scatter_kernel(grad_of, wy_of, wx_of, x_low, x_high, spans, lists, result,
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
    begin = tl.load(spans + 2 * tl.program_id(0))
    count = (tl.load(spans + 2 * tl.program_id(0) + 1) - begin).to(tl.int32)
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


_REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


class _Faults(NamedTuple):
    """Faults of RoIs that kernels found: image index too high, below 0, too many samples."""

    found: Tensor
    seen: Tensor  # a copy on the host, that arrives when the device is there

    def check(self) -> None:
        """Raise RuntimeError if a fault has been seen, and forget it."""
        image, below, samples = self.seen.tolist()
        if image or below or samples:
            self.found.zero_()
            self.seen.copy_(self.found)  # waits for copies that are under way
        require(not below, 'roi_align', 'rois name an image that is negative or NaN')
        require(not image, 'roi_align', f'rois name image {image}, and their input has fewer')
        sampling.check_grid(torch.tensor(samples), 0)

    def wait(self) -> None:
        """Call :meth:`check` when the device is there."""
        self.seen.copy_(self.found)
        self.check()


@functools.cache
def _faults(device: torch.device) -> _Faults:
    found = torch.zeros(3, dtype=torch.int32, device=device)
    on_host = device.type == 'cpu'  # run by Triton's interpreter
    faults = _Faults(found, found if on_host else torch.zeros(3, dtype=torch.int32).pin_memory())
    DEFERRED.append(faults.wait)
    return faults


class _Filters(NamedTuple):
    """Image of each RoI; weights, first and last pixel (none: last < first) along y and x."""

    image: Tensor
    ys: tuple[Tensor, Tensor, Tensor]
    xs: tuple[Tensor, Tensor, Tensor]


def _filters(feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
             sampling_ratio: int, aligned: bool) -> _Filters:
    (count, _), (images, _, *sizes) = rois.shape, feature.shape
    real = gather.compute_dtype(rois)
    # parts begin at a multiple of 16 bytes; see well_aligned
    bags, weights = ([-(-count * number // 16) * 16 for number in numbers] for numbers in (
        (1, *bins), [a * b for a, b in zip(bins, sizes)]))
    weight = torch.empty(sum(weights), dtype=real, device=rois.device)
    image, low, high = torch.empty(bags[0] + 2 * sum(bags[1:]), dtype=torch.int32,
                                   device=rois.device).split((bags[0], *[sum(bags[1:])] * 2))
    faults = _faults(rois.device)
    _filter_kernel[(count, sum(bins))](
        *well_aligned(rois), weight, image, low, high, faults.found, gather.single(scale),
        images, *sizes,
        weights[0], bags[1], RATIO=max(0, sampling_ratio), ALIGNED=aligned,
        MOST=sampling.MAX_GRID, PH=bins[0], PW=bins[1],
        BLOCK=triton.next_power_of_2(max(sizes)), REAL=_REAL[real], enable_fp_fusion=False)
    if faults.seen is not faults.found:
        faults.seen.copy_(faults.found, non_blocking=True)
    faults.check()
    return _Filters(image, *((whole[0], whole[1], whole[2]) for whole in zip(
        weight.split(weights), low.split(bags[1:]), high.split(bags[1:]))))


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """Run :func:`mmrepro.ops.mmcv.roi_align.roi_align_forward`, which takes the maximum."""
    if pool_mode == roi_align.MAX:
        roi_align.roi_align_forward(
            input, rois, output, argmax_y, argmax_x, aligned_height, aligned_width, spatial_scale,
            sampling_ratio, pool_mode, aligned)
        return
    if output.numel() == 0:
        check_rois('roi_align', input, rois)
        return
    require_tensor('roi_align', 'input', input, (None,) * 4)
    require_tensor('roi_align', 'rois', rois, (None, 5), (input.dtype,))
    require(input.numel() > 0, 'roi_align', f'{len(rois)} rois on input {describe(input)}, which '
            'has no pixels')
    with torch.cuda.device_of(input):
        image, ys, xs = _filters(input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned)
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
    """Run :func:`mmrepro.ops.mmcv.roi_align.roi_align_backward`, which takes the maximum."""
    if pool_mode == roi_align.MAX:
        roi_align.roi_align_backward(
            grad_output, rois, argmax_y, argmax_x, grad_input, aligned_height, aligned_width,
            spatial_scale, sampling_ratio, pool_mode, aligned)
        return
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    with torch.cuda.device_of(grad_input):
        image, ys, xs = _filters(grad_input, rois, (aligned_height, aligned_width), spatial_scale,
                                 sampling_ratio, aligned)
        (images, channels, height, width), target = grad_input.shape, well_aligned(grad_input)[0]
        (weight, low, high), rows = ys, len(rois) * aligned_height
        spans = torch.empty(images * height, 2, dtype=torch.int64, device=rois.device)
        lists = torch.empty(rows * height, dtype=torch.int32, device=rois.device)
        _list_kernel[(len(spans), )](image, low, high, spans, lists, rows, height,
                                     PH=aligned_height, LOOK=_LOOK)
        block = min(_BACK_CHANNELS, triton.next_power_of_2(channels))
        grid = images * height, triton.cdiv(width, _PIXELS), triton.cdiv(channels, block)
        _scatter_kernel[grid](
            *well_aligned(gather.bags(grad_output)), weight, *xs, spans, lists, target, channels,
            height, width, PH=aligned_height, PW=aligned_width, CHANNELS=block, PIXELS=_PIXELS,
            enable_fp_fusion=False)
        if target is not grad_input:
            grad_input.copy_(target)
