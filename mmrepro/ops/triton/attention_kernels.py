"""Multi-scale deformable attention: one kernel forward, and one backward for each query.

A program handles some bags, (image, query, head), and visits their samples in mmcv's order. In the
backward pass it computes the gradients of locations and weights and writes the taps, for one image
and a few heads at a time; the gradient of the maps is their scattered sum, in fixed point
(:mod:`.scatter_kernels`) or, for float64, sorted as in the PyTorch form.
"""
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import gather
from ..mmcv import ms_deform_attn as plain
from . import scatter_kernels, well_aligned

# Bags of a program.
_BAGS = 8


@triton.jit
def _corner(xy, exists, height, width, REAL: tl.constexpr):
    """Locate samples at x, y from 0 to 1.

    Returns whether they are inside, row and column of the first of the four pixels around each,
    and the distances from it.
    """
    half = tl.full([], 0.5, REAL)
    x = tl.load(xy, mask=exists, other=0.).to(REAL) * width - half
    y = tl.load(xy + 1, mask=exists, other=0.).to(REAL) * height - half
    # NaN is outside
    inside = exists & (y > -1) & (x > -1) & (y < height) & (x < width)
    y, x = tl.where(inside, y, 0.), tl.where(inside, x, 0.)
    y0, x0 = tl.floor(y), tl.floor(x)
    return inside, y0.to(tl.int64), x0.to(tl.int64), y - y0, x - x0


@triton.jit(do_not_specialize=['bags', 'queries', 'heads', 'keys', 'depth'])
def _attend_kernel(value_of, shapes, starts, xy_of, share_of, output, bags, queries, heads, keys,
                   depth, LEVELS: tl.constexpr, POINTS: tl.constexpr, BAGS: tl.constexpr,
                   DEPTH: tl.constexpr, REAL: tl.constexpr):
    """Compute the output (BAGS, depth) of some bags; REAL is the dtype of sums."""
    bag = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    exists = bag < bags
    long = bag.to(tl.int64)
    lane = tl.arange(0, DEPTH)
    image, head = long // (queries * heads), long % heads
    total = tl.zeros([BAGS, DEPTH], dtype=REAL)
    for level in range(0, LEVELS):
        height, width = tl.load(shapes + 2 * level), tl.load(shapes + 2 * level + 1)
        first = image * keys + tl.load(starts + level)
        for point in range(0, POINTS):
            sample = (long * LEVELS + level) * POINTS + point
            share = tl.load(share_of + sample, mask=exists, other=0.).to(REAL)
            inside, top, left, fy, fx = _corner(xy_of + 2 * sample, exists, height, width, REAL)
            for corner in tl.static_range(4):
                row, column = top + corner // 2, left + corner % 2
                wy = fy if corner // 2 else 1 - fy
                wx = fx if corner % 2 else 1 - fx
                live = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
                weight = wy * wx * share
                key = ((first + row * width + column) * heads + head) * depth
                value = tl.load(value_of + key[:, None] + lane[None, :],
                                mask=live[:, None] & (lane < depth)[None, :], other=0.)
                part = value.to(REAL) * weight[:, None]
                total += tl.where(live[:, None], part, 0.)
    tl.store(output + long[:, None] * depth + lane[None, :], total.to(output.dtype.element_ty),
             mask=exists[:, None] & (lane < depth)[None, :])


@triton.jit
def _add(address, change, mask):
    """Round, add and round again, as torch adds tensors of half precision."""
    before = tl.load(address, mask=mask, other=0.)
    after = before.to(change.dtype) + change.to(before.dtype).to(change.dtype)
    tl.store(address, after.to(before.dtype), mask=mask)


@triton.jit(do_not_specialize=['image', 'first_head', 'group', 'queries', 'heads', 'keys', 'depth'])
def _slope_kernel(value_of, shapes, starts, xy_of, share_of, grad_of, grad_xy, grad_share,
                  row_of, weight_of, image, first_head, group, queries, heads, keys, depth,
                  LEVELS: tl.constexpr, POINTS: tl.constexpr, BAGS: tl.constexpr,
                  DEPTH: tl.constexpr, REAL: tl.constexpr):
    """Compute gradients by locations and weights, and taps, for an image and some heads."""
    mine = tl.program_id(0) * BAGS + tl.arange(0, BAGS)
    exists = mine < queries * group
    zero = tl.full([], 0, tl.int64)
    head = first_head + mine % group
    bag = (zero + image * queries + mine // group) * heads + head
    lane = tl.arange(0, DEPTH)
    here = exists[:, None] & (lane < depth)[None, :]
    grad = tl.load(grad_of + bag[:, None] * depth + lane[None, :], mask=here, other=0.).to(REAL)
    for level in range(0, LEVELS):
        height, width = tl.load(shapes + 2 * level), tl.load(shapes + 2 * level + 1)
        start = tl.load(starts + level)
        for point in range(0, POINTS):
            sample = (bag * LEVELS + level) * POINTS + point
            share = tl.load(share_of + sample, mask=exists, other=0.).to(REAL)
            inside, top, left, fy, fx = _corner(xy_of + 2 * sample, exists, height, width, REAL)
            amount = tl.zeros([BAGS], dtype=REAL)
            slope_y = tl.zeros([BAGS], dtype=REAL)
            slope_x = tl.zeros([BAGS], dtype=REAL)
            tap = (mine.to(tl.int64) * LEVELS + level) * POINTS + point
            for corner in tl.static_range(4):
                row, column = top + corner // 2, left + corner % 2
                wy = fy if corner // 2 else 1 - fy
                wx = fx if corner % 2 else 1 - fx
                live = inside & (row >= 0) & (row < height) & (column >= 0) & (column < width)
                key = start + row * width + column
                value = tl.load(
                    value_of + (((zero + image * keys + key) * heads + head) * depth)[:, None]
                    + lane[None, :], mask=live[:, None] & (lane < depth)[None, :], other=0.)
                dot = tl.where(live, tl.sum(grad * value.to(REAL), 1), 0.)
                amount += wy * wx * dot
                slope_y += (wx if corner // 2 else -wx) * dot
                slope_x += (wy if corner % 2 else -wy) * dot
                # samples outside have the padding index
                own = tl.where(live, key * group + mine % group, keys * group)
                tl.store(row_of + 4 * tap + corner, own.to(tl.int32), mask=exists)
                tl.store(weight_of + 4 * tap + corner, tl.where(live, wy * wx * share, 0.),
                         mask=exists)
            _add(grad_share + sample, amount, exists)
            _add(grad_xy + 2 * sample, slope_x * share * width, exists)
            _add(grad_xy + 2 * sample + 1, slope_y * share * height, exists)


_REAL = {torch.float32: tl.float32, torch.float64: tl.float64}


def ms_deform_attn_forward(value: Tensor, value_spatial_shapes: Tensor,
                           value_level_start_index: Tensor, sampling_locations: Tensor,
                           attention_weights: Tensor, im2col_step: int) -> Tensor:
    """Run :func:`mmrepro.ops.mmcv.ms_deform_attn.ms_deform_attn_forward`."""
    plain.check(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                attention_weights, im2col_step)
    (b, keys, heads, depth), queries = value.shape, sampling_locations.shape[1]
    output = value.new_zeros((b, queries, heads * depth))
    if output.numel() == 0 or keys == 0:
        return output
    bags = b * queries * heads
    levels, points = attention_weights.shape[3:]
    with torch.cuda.device_of(value):
        _attend_kernel[(triton.cdiv(bags, _BAGS), )](
            *well_aligned(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                     attention_weights), output, bags, queries, heads, keys, depth,
            LEVELS=levels, POINTS=points, BAGS=_BAGS, DEPTH=triton.next_power_of_2(depth),
            REAL=_REAL[gather.compute_dtype(value)], enable_fp_fusion=False)
    return output


def ms_deform_attn_backward(value: Tensor, value_spatial_shapes: Tensor,
                            value_level_start_index: Tensor, sampling_locations: Tensor,
                            attention_weights: Tensor, grad_output: Tensor, grad_value: Tensor,
                            grad_sampling_loc: Tensor, grad_attn_weight: Tensor,
                            im2col_step: int) -> None:
    """Run :func:`mmrepro.ops.mmcv.ms_deform_attn.ms_deform_attn_backward`.

    The forward has checked the inputs.
    """
    (b, keys, heads, depth), queries = value.shape, sampling_locations.shape[1]
    if grad_output.numel() == 0 or value.numel() == 0:
        return
    levels, points = attention_weights.shape[3:]
    taps, real = levels * points * 4, gather.compute_dtype(value)
    grads = grad_output.contiguous().view(b, queries, heads, depth)
    xy, share = well_aligned(grad_sampling_loc, grad_attn_weight)
    inputs = well_aligned(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                     attention_weights, grads)
    scatter = scatter_kernels.scatter_sum if real == torch.float32 else gather.scatter_sum
    with torch.cuda.device_of(value):
        for image, group in plain.groups(b, queries, heads, taps, plain.budget_of(value.device)):
            width = group.stop - group.start
            row = torch.empty(queries * width, taps, dtype=torch.int32, device=value.device)
            weight = torch.empty(queries * width, taps, dtype=real, device=value.device)
            _slope_kernel[(triton.cdiv(len(row), _BAGS), )](
                *inputs, xy, share, row, weight, image, group.start, width, queries, heads, keys,
                depth, LEVELS=levels, POINTS=points, BAGS=_BAGS,
                DEPTH=triton.next_power_of_2(depth), REAL=_REAL[real], enable_fp_fusion=False)
            grad = grads[image, :, group].to(real).reshape(-1, depth)
            part = scatter(grad, row, weight, keys * width)
            grad_value[image, :, group] += part.view(keys, -1, depth).to(value.dtype)
    for target, result in ((grad_sampling_loc, xy), (grad_attn_weight, share)):
        if result is not target:
            target.copy_(result)
