"""Multi-scale deformable attention: weighted bilinear samples of several maps per query and head.

Signature: ``mmcv/ops/multi_scale_deform_attn.py``; formula: ``ms_deform_attn_cuda_kernel.cuh``
(mmcv 2.1.0) with the zero-padding rule. mmcv calls this operator on CUDA only and uses
``grid_sample`` on a CPU, which takes about twice the time; these functions run on any device, and
:func:`on_cpu` puts them in the place of that form.

Groups of one image and a few heads are processed at a time. Their rows of ``value`` are disjoint,
so the size of a group bounds the memory and does not affect the bits.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import describe, require, require_dtype, require_shape, require_tensor
from ..exported import is_recorded

# of torch 2.3 and later
_is_compiling = getattr(getattr(torch, 'compiler', None), 'is_compiling', bool)


class _Levels(NamedTuple):
    """Sizes and first key of every level, shaped to broadcast over (Q, G, L, P)."""

    height: Tensor
    width: Tensor
    start: Tensor
    keys: int


def check(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor,
          weights: Tensor, im2col_step: int) -> _Levels:
    """Check shapes and dtypes, which mmcv's kernels do not, and return the levels."""
    name = 'ms_deform_attn'
    require_shape(name, 'value', value, (None,) * 4)
    require_shape(name, 'value_spatial_shapes', shapes, (None, 2))
    (b, keys, heads, _), levels = value.shape, len(shapes)
    require_shape(name, 'value_level_start_index', starts, (levels,))
    require_shape(name, 'sampling_locations', locations, (b, None, heads, levels, None, 2))
    require_tensor(name, 'attention_weights', weights, locations.shape[:5], (value.dtype,))
    require_dtype(name, 'value', value)
    require_dtype(name, 'sampling_locations', locations, (value.dtype,))
    step = min(b, im2col_step)
    require(not b or (step > 0 and b % step == 0), name,
            f'batch {b} is not divisible by im2col_step {im2col_step}')
    for h, w, first in _sizes(shapes, starts):
        require(first >= 0 and first + h * w <= keys, name,
                f'a level of {h} x {w} that starts at key {first} does not fit value '
                f'{describe(value)}')
    return _levels(shapes, starts, keys)


def _levels(shapes: Tensor, starts: Tensor, keys: int) -> _Levels:
    """Convert the levels from tensors of the device; the host does not wait for them."""
    h, w = (column.to(torch.int32).view(1, 1, -1, 1) for column in shapes.unbind(1))
    return _Levels(h, w, starts.to(torch.int32).view(1, 1, -1, 1), keys)


def _sizes(shapes: Tensor, starts: Tensor) -> list[list[int]]:
    """Return height, width and first key of each level, on the host.

    All layers of a decoder pass the same tensors; the host waits for them in the first one only.
    """
    rows: list[list[int]]
    if shapes.is_inference() or starts.is_inference():  # such tensors have no versions
        rows = torch.cat((shapes, starts.view(-1, 1)), 1).tolist()
        return rows
    versions = shapes._version, starts._version
    of, then, rows = getattr(shapes, '_mmrepro_sizes', (None, versions, []))
    if of is not starts or then != versions:
        rows = torch.cat((shapes, starts.view(-1, 1)), 1).tolist()
        setattr(shapes, '_mmrepro_sizes', (starts, versions, rows))  # noqa: B010
    return rows


def _corners(locations: Tensor, levels: _Levels) -> tuple[Tensor, sampling.Corners]:
    """Return taps of G heads: rows (Q * G, L * P * 4), and corners (Q, G, L, P, 4)."""
    # mmcv's order of rounding: loc * size - 0.5
    y = locations[..., 1] * levels.height - 0.5
    x = locations[..., 0] * levels.width - 0.5
    corners = sampling.padded_corners(y, x, levels.height, levels.width)
    heads = y.shape[1]
    head = torch.arange(heads, dtype=torch.int32, device=y.device).view(1, -1, 1, 1, 1)
    row = (corners.row + levels.start.unsqueeze(-1)) * heads + head
    row = torch.where(corners.live, row, levels.keys * heads)
    return row.view(len(y) * heads, -1), corners


def _rows(value: Tensor) -> Tensor:
    """Convert (keys, G, D) to (keys * G + 1, D) rows in compute precision; the last is zero."""
    keys, heads, depth = value.shape
    rows = value.new_empty((keys * heads + 1, depth), dtype=gather.compute_dtype(value))
    rows[:-1].view(value.shape).copy_(value)
    rows[-1].zero_()
    return rows


def budget_of(device: torch.device) -> int:
    """Return how many taps to process together: on CUDA half an image of Deformable DETR."""
    return gather.chunk_taps(device) * (2 if device.type == 'cuda' else 1)


def groups(batch: int, queries: int, heads: int, taps: int,
           budget: int) -> Iterator[tuple[int, slice]]:
    """Yield images and heads to process together; ``taps`` is per query and head."""
    for image in range(batch):
        for group in gather.slices(heads, budget // max(1, queries * taps)):
            yield image, group


def ms_deform_attn_forward(value: Tensor, value_spatial_shapes: Tensor,
                           value_level_start_index: Tensor, sampling_locations: Tensor,
                           attention_weights: Tensor, im2col_step: int) -> Tensor:
    """Sum weighted samples of the maps of all levels.

    Args:
        value: (B, keys, heads, D), the maps of all levels, flattened and one after another.
        value_spatial_shapes: (L, 2) int64, height and width of each level.
        value_level_start_index: (L,) int64, the first key of each level.
        sampling_locations: (B, Q, heads, L, P, 2), x and y from 0 to 1 over the level.
        attention_weights: (B, Q, heads, L, P).
        im2col_step: must divide the batch; otherwise not used.

    Returns:
        (B, Q, heads * D).
    """
    levels = check(value, value_spatial_shapes, value_level_start_index, sampling_locations,
                   attention_weights, im2col_step)
    b, _, heads, depth = value.shape
    queries, taps = sampling_locations.shape[1], attention_weights.shape[3:].numel() * 4
    output = value.new_zeros((b, queries, heads, depth))
    if output.numel() == 0:
        return output.view(b, queries, heads * depth)
    dtype, budget = gather.compute_dtype(value), budget_of(value.device)
    for image, group in groups(b, queries, heads, taps, budget):
        rows, width = _rows(value[image, :, group]), group.stop - group.start
        for part in gather.slices(queries, budget // max(1, taps * width)):
            row, corners = _corners(sampling_locations[image, part, group].to(dtype), levels)
            attention = attention_weights[image, part, group].to(dtype)
            weight = (corners.weight * attention.unsqueeze(-1)).view(row.shape)
            result = gather.gather_sum(rows, row, weight).view(-1, width, depth)
            output[image, part, group] = result.to(value.dtype)
    return output.view(b, queries, heads * depth)


def ms_deform_attn_backward(value: Tensor, value_spatial_shapes: Tensor,
                            value_level_start_index: Tensor, sampling_locations: Tensor,
                            attention_weights: Tensor, grad_output: Tensor, grad_value: Tensor,
                            grad_sampling_loc: Tensor, grad_attn_weight: Tensor,
                            im2col_step: int) -> None:
    """Add the gradients of :func:`ms_deform_attn_forward` to the three ``grad_`` tensors.

    They have the shapes of value, sampling_locations and attention_weights; ``grad_output`` has
    that of the result. The forward has checked the inputs.
    """
    b, keys, heads, depth = value.shape
    levels = _levels(value_spatial_shapes, value_level_start_index, keys)
    queries, taps = sampling_locations.shape[1], attention_weights.shape[3:].numel() * 4
    require_shape('ms_deform_attn', 'grad_output', grad_output, (b, queries, heads * depth))
    if grad_output.numel() == 0 or value.numel() == 0:
        return
    grads = grad_output.reshape(b, queries, heads, depth)
    for image, group in groups(b, queries, heads, taps, budget_of(value.device)):
        rows = _rows(value[image, :, group])
        grad = grads[image, :, group].to(rows.dtype).reshape(-1, depth)
        row, weight = _sample_gradients(
            rows, grad, levels, sampling_locations[image, :, group],
            attention_weights[image, :, group], grad_sampling_loc[image, :, group],
            grad_attn_weight[image, :, group])
        part = gather.scatter_sum(grad, row, weight, len(rows) - 1)
        grad_value[image, :, group] += part.view(keys, -1, depth).to(value.dtype)


def _sample_gradients(rows: Tensor, grad: Tensor, levels: _Levels, locations: Tensor,
                      attention: Tensor, grad_locations: Tensor,
                      grad_attention: Tensor) -> tuple[Tensor, Tensor]:
    """Write the gradients of locations and weights; return all taps of the group."""
    heads = locations.shape[1]
    taps = attention.shape[2:].numel() * 4
    all_rows = torch.empty((len(grad), taps), dtype=torch.int32, device=grad.device)
    all_weights = rows.new_empty((len(grad), taps))
    for part in gather.slices(len(locations), budget_of(rows.device) // max(1, heads * taps)):
        bags = slice(part.start * heads, part.stop * heads)
        row, corners = _corners(locations[part].to(rows.dtype), levels)
        share = attention[part].to(rows.dtype)
        dot = gather.dots(grad[bags], rows, row).view(corners.weight.shape)
        grad_attention[part] += (corners.weight * dot).sum(-1).to(grad_attention.dtype)
        slope = torch.stack(((corners.dx * dot).sum(-1) * share * levels.width,
                             (corners.dy * dot).sum(-1) * share * levels.height), -1)
        grad_locations[part] += slope.to(grad_locations.dtype)
        all_rows[bags] = row
        all_weights[bags] = (corners.weight * share.unsqueeze(-1)).view(row.shape)
    return all_rows, all_weights


@functools.cache  # a run that follows another in a process finds what that one left
def on_cpu(stock: Callable[..., Tensor], operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``multi_scale_deformable_attn_pytorch`` of mmcv, computed by the operator.

    Args:
        stock: mmcv's form. A model that is traced, exported or compiled keeps it: it consists of
            operators that these can describe.
        operator: ``MultiScaleDeformableAttnFunction.apply``.
    """
    @functools.wraps(stock)
    def attention(value: Tensor, value_spatial_shapes: Tensor, sampling_locations: Tensor,
                  attention_weights: Tensor) -> Tensor:
        if is_recorded() or _is_compiling():
            return stock(value, value_spatial_shapes, sampling_locations, attention_weights)
        # mmcv's form takes lists, and a tensor of another device, too
        shapes = torch.as_tensor(value_spatial_shapes, device=value.device)
        keys = shapes.prod(1)
        return operator(value, shapes, keys.cumsum(0) - keys, sampling_locations,
                        attention_weights, 1)

    return attention
