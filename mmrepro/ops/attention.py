"""Multi-scale deformable attention: weighted bilinear samples of several maps per query and head.

Signature: ``mmcv/ops/multi_scale_deform_attn.py``; formula: ``ms_deform_attn_cuda_kernel.cuh``
(mmcv 2.1.0) with the zero-padding rule. mmcv calls this on CUDA only and samples with
``grid_sample`` on the CPU; these functions do not care where the tensors are.

One image and one head at a time: their rows of ``value`` are disjoint, so the transpose of one is
complete before the next begins, and the taps of all are never held together.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmrepro.ops import gather, sampling
from mmrepro.ops.contract import describe, require, require_dtype, require_shape

__all__ = ['ms_deform_attn_backward', 'ms_deform_attn_forward']


class _Levels(NamedTuple):
    """Sizes and first row of every level, shaped to broadcast over (Q, L, P)."""

    height: Tensor
    width: Tensor
    start: Tensor
    most_rows: int


def _check(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor,
           weights: Tensor, im2col_step: int) -> _Levels:
    name = 'ms_deform_attn'
    require_shape(name, 'value', value, (None,) * 4)
    require_shape(name, 'value_spatial_shapes', shapes, (None, 2))
    (b, keys, heads, _), levels = value.shape, len(shapes)
    require_shape(name, 'value_level_start_index', starts, (levels,))
    require_shape(name, 'sampling_locations', locations, (b, None, heads, levels, None, 2))
    require_shape(name, 'attention_weights', weights, locations.shape[:5])
    require_dtype(name, 'value', value)
    require_dtype(name, 'sampling_locations', locations, (value.dtype,))
    require_dtype(name, 'attention_weights', weights, (value.dtype,))
    step = min(b, im2col_step)
    require(not b or (step > 0 and b % step == 0), name,
            f'batch {b} is not divisible by im2col_step {im2col_step}')
    sizes = torch.cat((shapes, starts.view(-1, 1)), 1).tolist()
    for h, w, first in sizes:
        require(first >= 0 and first + h * w <= keys, name,
                f'a level of {h} x {w} that starts at key {first} does not fit value '
                f'{describe(value)}')
    table = torch.tensor(sizes, dtype=torch.int32).view(-1, 3).to(value.device)
    h, w, first = (column.view(1, -1, 1) for column in table.unbind(1))
    return _Levels(h, w, first, keys)


def _corners(locations: Tensor, levels: _Levels) -> tuple[Tensor, sampling.Corners]:
    """Taps of one image and head: rows (Q, L*P*4) of its keys, and the corners (Q, L, P, 4)."""
    # mmcv: loc * size - 0.5, in that order of rounding.
    y = locations[..., 1] * levels.height - 0.5
    x = locations[..., 0] * levels.width - 0.5
    corners = sampling.padded_corners(y, x, levels.height, levels.width)
    row = corners.row + levels.start.unsqueeze(-1)
    row = torch.where(corners.live, row, levels.most_rows).flatten(1)
    return row, corners


def _head(value: Tensor, image: int, head: int) -> Tensor:
    """Rows (keys + 1, D) of one image and head; the last is the row of zeros."""
    keys, depth = value.shape[1], value.shape[3]
    rows = value.new_empty((keys + 1, depth), dtype=gather.compute_dtype(value))
    rows[:keys].copy_(value[image, :, head])
    rows[keys:].zero_()
    return rows


def _steps(queries: int, taps_per_query: int, budget: int) -> range:
    return range(0, queries, max(1, budget // max(1, taps_per_query)))


def ms_deform_attn_forward(value: Tensor, value_spatial_shapes: Tensor,
                           value_level_start_index: Tensor, sampling_locations: Tensor,
                           attention_weights: Tensor, im2col_step: int) -> Tensor:
    """Attend.

    Args:
        value: (B, keys, heads, D), the maps of all levels, flattened and one after another.
        value_spatial_shapes: (L, 2) int64, height and width of each level.
        value_level_start_index: (L,) int64, the first key of each level.
        sampling_locations: (B, Q, heads, L, P, 2), x and y from 0 to 1 over the level.
        attention_weights: (B, Q, heads, L, P).
        im2col_step: images that mmcv works on at once; has to divide the batch, and is not used.

    Returns:
        (B, Q, heads * D).

    Raises:
        RuntimeError: shapes or dtypes that do not fit.
    """
    levels = _check(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                    attention_weights, im2col_step)
    b, _, heads, depth = value.shape
    queries = sampling_locations.shape[1]
    output = value.new_zeros((b, queries, heads, depth))
    if output.numel() == 0:
        return output.view(b, queries, heads * depth)
    dtype = gather.compute_dtype(value)
    step = _steps(queries, attention_weights[0, 0, 0].numel() * 4, gather.CHUNK_TAPS * 4)
    for image in range(b):
        for head in range(heads):
            rows = _head(value, image, head)
            for q in step:
                part = slice(q, q + step.step)
                row, corners = _corners(sampling_locations[image, part, head].to(dtype), levels)
                attention = attention_weights[image, part, head].to(dtype)
                weight = (corners.weight * attention.unsqueeze(-1)).flatten(1)
                output[image, part, head] = gather.read(rows, row, weight).to(value.dtype)
    return output.view(b, queries, heads * depth)


def ms_deform_attn_backward(value: Tensor, value_spatial_shapes: Tensor,
                            value_level_start_index: Tensor, sampling_locations: Tensor,
                            attention_weights: Tensor, grad_output: Tensor, grad_value: Tensor,
                            grad_sampling_loc: Tensor, grad_attn_weight: Tensor,
                            im2col_step: int) -> None:
    """The gradients of :func:`ms_deform_attn_forward`, written into the last three tensors.

    Args:
        grad_output: (B, Q, heads * D).
        grad_value, grad_sampling_loc, grad_attn_weight: zeros of the shapes of value,
            sampling_locations and attention_weights.
    """
    levels = _check(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                    attention_weights, im2col_step)
    b, keys, heads, depth = value.shape
    if grad_output.numel() == 0 or value.numel() == 0:
        return
    grads = grad_output.reshape(b, -1, heads, depth)
    for image in range(b):
        for head in range(heads):
            rows = _head(value, image, head)
            grad = grads[image, :, head].to(rows.dtype).contiguous()
            row, weight = _sample_gradients(
                rows, grad, levels, sampling_locations[image, :, head],
                attention_weights[image, :, head], grad_sampling_loc[image, :, head],
                grad_attn_weight[image, :, head])
            grad_value[image, :, head] += gather.spread(grad, row, weight, keys).to(value.dtype)


def _sample_gradients(rows: Tensor, grad: Tensor, levels: _Levels, locations: Tensor,
                      attention: Tensor, grad_locations: Tensor,
                      grad_attention: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradients of where and how much; return all taps of this image and head."""
    taps = attention[0].numel() * 4
    all_rows = torch.empty((len(grad), taps), dtype=torch.int32, device=grad.device)
    all_weights = rows.new_empty((len(grad), taps))
    step = _steps(len(grad), taps, gather.CHUNK_TAPS * 4)
    for q in step:
        part = slice(q, q + step.step)
        row, corners = _corners(locations[part].to(rows.dtype), levels)
        share = attention[part].to(rows.dtype)
        dot = gather.dots(grad[part], rows, row).view(corners.weight.shape)
        grad_attention[part] = (corners.weight * dot).sum(-1)
        grad_locations[part] = torch.stack((
            (corners.dx * dot).sum(-1) * share * levels.width,
            (corners.dy * dot).sum(-1) * share * levels.height), -1)
        all_rows[part] = row
        all_weights[part] = (corners.weight * share.unsqueeze(-1)).flatten(1)
    return all_rows, all_weights
