"""Operators of rotated and curved boxes on feature maps, and rotated filters.

Signatures: ``mmcv/ops/roi_align_rotated.py``, ``bezier_align.py``, ``rotated_feature_align.py`` and
``active_rotated_filter.py``; formulas: the ``*_cuda_kernel.cuh`` of the same names and
csrc/pytorch/cpu/active_rotated_filter.cpp (mmcv 2.1.0). Boxes of negative size are pooled as on
CUDA, not rejected as on a CPU.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import describe, require, require_dtype, require_shape, require_tensor
from .rois import SampledBins, check_rois


class _Rotated(SampledBins):
    """Bins of boxes (K, 6): image index, center x, center y, width, height, angle in radians."""

    def __init__(self, feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
                 sampling_ratio: int, aligned: bool, clockwise: bool) -> None:
        image = check_rois('roi_align_rotated', feature, rois, 6)
        rois = rois.to(gather.COMPUTE[rois.dtype])
        box = rois[:, 1:5] * gather.single(scale)
        offset = 0.5 if aligned else 0.
        center_x, center_y = box[:, 0] - offset, box[:, 1] - offset
        width, height = box[:, 2], box[:, 3]
        if not aligned:
            width, height = width.clamp(min=1), height.clamp(min=1)
        theta = -rois[:, 5] if clockwise else rois[:, 5]
        bin_h, bin_w = height / bins[0], width / bins[1]
        grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
        sampling.check_grid(grid, sampling_ratio)
        super().__init__(feature.shape, image, grid, bins)
        self.columns = torch.stack((center_y, center_x, -height / 2, -width / 2, bin_h, bin_w,
                                    theta.cos(), theta.sin(), *grid.to(bin_h.dtype)), 1)

    def positions(self, roi: Tensor, ph: Tensor, pw: Tensor, iy: Tensor,
                  ix: Tensor) -> tuple[Tensor, Tensor]:
        (center_y, center_x, top, left, step_h, step_w, cos, sin, rows,
         cols) = self.columns.index_select(0, roi).unbind(1)
        y = top + ph * step_h + (iy + 0.5) * step_h / rows
        x = left + pw * step_w + (ix + 0.5) * step_w / cols
        return y * cos - x * sin + center_y, y * sin + x * cos + center_x


def roi_align_rotated_forward(input: Tensor, rois: Tensor, output: Tensor, pooled_height: int,
                              pooled_width: int, spatial_scale: float, sampling_ratio: int,
                              aligned: bool, clockwise: bool) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W).

    ``rois`` is (K, 6): image index, center x and y, width, height in pixels of the image, angle in
    radians, counterclockwise unless ``clockwise``.
    """
    _Rotated(input, rois, (pooled_height, pooled_width), spatial_scale, sampling_ratio, aligned,
             clockwise).mean(input, output)


def roi_align_rotated_backward(top_grad: Tensor, rois: Tensor, bottom_grad: Tensor,
                               pooled_height: int, pooled_width: int, spatial_scale: float,
                               sampling_ratio: int, aligned: bool, clockwise: bool) -> None:
    """Add the gradient of :func:`roi_align_rotated_forward` to ``bottom_grad`` (N, C, H, W)."""
    _Rotated(bottom_grad, rois, (pooled_height, pooled_width), spatial_scale, sampling_ratio,
             aligned, clockwise).add_gradient(top_grad, bottom_grad)


def _curve(points: Tensor, u: Tensor) -> Tensor:
    """Return cubic Bezier curves of control points (K, 4) at parameters ``u`` (P,): (K, P)."""
    a, b, c, d = (points[:, i, None] for i in range(4))
    v = 1 - u
    return v * v * v * a + 3 * u * v * v * b + 3 * u * u * v * c + u * u * u * d


class _Bezier(SampledBins):
    """Bins between two Bezier curves (K, 17): image index, then 4 points x, y of each edge."""

    def __init__(self, feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
                 sampling_ratio: int, aligned: bool) -> None:
        image = check_rois('bezier_align', feature, rois, 17)
        dtype = gather.COMPUTE[rois.dtype]
        points = (rois[:, 1:].to(dtype) * gather.single(scale)).view(-1, 8, 2)
        upper, lower = points[:, :4], points[:, 4:].flip(1)
        u = torch.arange(bins[1], dtype=dtype, device=rois.device) / bins[1]
        v = torch.arange(bins[0], dtype=dtype, device=rois.device)[:, None] / bins[0]
        offset = 0.5 if aligned else 0.
        # (2, K, PH, PW): x and y of the middle of each bin
        self.middle = torch.stack([_curve(lower[..., axis], u)[:, None] * v
                                   + _curve(upper[..., axis], u)[:, None] * (1 - v) - offset
                                   for axis in (0, 1)])
        size = torch.maximum((upper[:, 0] - upper[:, 3]).abs(), (lower[:, 0] - lower[:, 3]).abs())
        if not aligned:
            size = size.clamp(min=1)
        bin_w, bin_h = size[:, 0] / bins[1], size[:, 1] / bins[0]
        grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
        sampling.check_grid(grid, sampling_ratio)
        super().__init__(feature.shape, image, grid, bins)
        self.columns = torch.stack((bin_h, bin_w, *grid.to(dtype)), 1)

    def positions(self, roi: Tensor, ph: Tensor, pw: Tensor, iy: Tensor,
                  ix: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.middle[:, roi, ph, pw]
        step_h, step_w, rows, cols = self.columns.index_select(0, roi).unbind(1)
        return (y - 0.5 * step_h + (iy + 0.5) * step_h / rows,
                x - 0.5 * step_w + (ix + 0.5) * step_w / cols)


def bezier_align_forward(input: Tensor, rois: Tensor, output: Tensor, aligned_height: int,
                         aligned_width: int, spatial_scale: float, sampling_ratio: int,
                         aligned: bool) -> None:
    """Fill ``output`` (K, C, aligned_height, aligned_width) with samples between Bezier curves.

    ``rois`` is (K, 17): image index, four control points (x, y) of the upper edge from left to
    right, four of the lower edge from right to left, in pixels of the image.
    """
    _Bezier(input, rois, (aligned_height, aligned_width), spatial_scale, sampling_ratio,
            aligned).mean(input, output)


def bezier_align_backward(grad_output: Tensor, rois: Tensor, grad_input: Tensor,
                          aligned_height: int, aligned_width: int, spatial_scale: float,
                          sampling_ratio: int, aligned: bool) -> None:
    """Add the gradient of :func:`bezier_align_forward` to ``grad_input`` (N, C, H, W)."""
    _Bezier(grad_input, rois, (aligned_height, aligned_width), spatial_scale, sampling_ratio,
            aligned).add_gradient(grad_output, grad_input)


def _anchor_taps(feature: Tensor, boxes: Tensor, scale: float,
                 points: int) -> tuple[Tensor, Tensor]:
    """Return rows and weights (N * H * W, 1 + 4 * points): the pixel, the center, corners."""
    name = 'rotated_feature_align'
    require_shape(name, 'features', feature, (None,) * 4)
    n, _, h, w = feature.shape
    require_tensor(name, 'best_bboxes', boxes, (n, h, w, 5), (feature.dtype,))
    require_dtype(name, 'features', feature)
    require(points in (1, 5), name, f'points must be 1 or 5, got {points}')
    boxes = boxes.reshape(-1, 5).to(gather.COMPUTE[boxes.dtype])
    # mmcv reads y before x, unlike its documentation
    y, x, width, height = (boxes[:, :4] * gather.single(scale)).unbind(1)
    ys, xs = [y], [x]
    if points == 5:
        cos, sin = boxes[:, 4].cos(), boxes[:, 4].sin()
        wx, wy, hx, hy = cos * width / 2, sin * width / 2, -sin * height / 2, cos * height / 2
        for along, across in ((1, 1), (-1, 1), (-1, -1), (1, -1)):
            xs.append(x + along * wx + across * hx)
            ys.append(y + along * wy + across * hy)
    corners = sampling.clamped_corners(torch.stack(ys, 1), torch.stack(xs, 1), h, w)
    pixel = torch.arange(n * h * w, dtype=torch.int32, device=feature.device)[:, None]
    base = torch.div(pixel, h * w, rounding_mode='floor') * (h * w)
    row = torch.where(corners.live, corners.row + base.unsqueeze(-1), n * h * w)
    weight = corners.weight.flatten(1)
    return (torch.cat((pixel, row.flatten(1)), 1),
            torch.cat((torch.ones_like(weight[:, :1]), weight), 1))


def rotated_feature_align_forward(features: Tensor, best_bboxes: Tensor, output: Tensor,
                                  spatial_scale: float, points: int) -> None:
    """Fill ``output`` (N, C, H, W) with each pixel plus the samples at its box.

    ``best_bboxes`` is (N, H, W, 5): center y, center x, width, height, angle in radians. ``points``
    is 1 for the center, 5 for the center and the corners.
    """
    row, weight = _anchor_taps(features, best_bboxes, spatial_scale, points)
    if output.numel():
        gather.put_rows(output, gather.gather_sum(gather.rows_of(features), row, weight))


def rotated_feature_align_backward(top_grad: Tensor, best_bboxes: Tensor, bottom_grad: Tensor,
                                   spatial_scale: float, points: int) -> None:
    """Add the gradient of :func:`rotated_feature_align_forward` to ``bottom_grad``."""
    row, weight = _anchor_taps(bottom_grad, best_bboxes, spatial_scale, points)
    if top_grad.numel():
        total = gather.scatter_sum(gather.bags(top_grad), row, weight, len(row))
        gather.add_rows(bottom_grad, total)


def _filter_shape(operator: str, indices: Tensor, outer: Tensor, inner: Tensor) -> tuple[int, int]:
    """Return entries and rotations of ``indices`` (o, H, W, r), which both tensors must fit."""
    require_tensor(operator, 'indices', indices, (None, None, None, None), (torch.int32,))
    require_dtype(operator, 'filters', outer)
    orientations, height, width, rotations = indices.shape
    fits = (inner.dim() == 5 and tuple(inner.shape[2:]) == (orientations, height, width)
            and tuple(outer.shape) == (inner.shape[0] * rotations, inner.shape[1] * orientations,
                                       height, width) and outer.dtype == inner.dtype)
    require(fits, operator, 'shapes do not match: filters (O, I, o, H, W) and (O * r, I * o, H, W) '
            f'with indices (o, H, W, r), got {describe(inner)}, {describe(outer)}, '
            f'{describe(indices)}')
    return orientations * height * width, rotations


def active_rotated_filter_forward(input: Tensor, indices: Tensor, output: Tensor) -> None:
    """Write every rotation of filters ``input`` (O, I, o, H, W) to ``output`` (O * r, I * o, H, W).

    ``indices`` (o, H, W, r) int32 are one-based: the target of each entry in each rotation. Entries
    that are no target keep their values; of several sources of a target the last one is taken.
    """
    entries, rotations = _filter_shape('active_rotated_filter_forward', indices, output, input)
    goes = indices.reshape(1, entries, rotations).long() - 1
    arrives = goes == torch.arange(entries, device=goes.device)[:, None, None]
    number = torch.arange(1, entries + 1, device=goes.device)[:, None]
    source = (arrives * number).amax(1).T - 1
    outputs, inputs = input.shape[:2]
    values = input.detach().reshape(outputs * inputs, entries)
    table = output.view(outputs, rotations, inputs, entries)
    # S2A-Net's indices are permutations, so every entry is a target
    whole = not source.is_cuda and bool((source >= 0).all())
    for rotation in range(rotations):
        picked = values.index_select(1, source[rotation].clamp(min=0))
        picked = picked.view(outputs, inputs, entries)
        table[:, rotation] = picked if whole else torch.where(
            source[rotation] >= 0, picked, table[:, rotation])


def active_rotated_filter_backward(grad_out: Tensor, indices: Tensor, grad_in: Tensor) -> None:
    """Write the sum over rotations, in their order, of ``grad_out`` to ``grad_in``."""
    entries, rotations = _filter_shape('active_rotated_filter_backward', indices, grad_out, grad_in)
    goes = indices.reshape(entries, rotations).long() - 1
    outputs, inputs = grad_in.shape[:2]
    table = grad_out.detach().reshape(outputs, rotations, inputs, entries)
    total = torch.zeros(outputs, inputs, entries, dtype=gather.compute_dtype(grad_in),
                        device=grad_in.device)
    for rotation in range(rotations):
        total += table[:, rotation].index_select(2, goes[:, rotation])
    grad_in.copy_(total.view_as(grad_in))
