"""RoI operators for rotated boxes, and the feature alignment of rotated anchors.

Signatures: ``mmcv/ops/roi_align_rotated.py``, ``riroi_align_rotated.py`` and
``rotated_feature_align.py``; formulas: the ``*_cuda_kernel.cuh`` of the same names (mmcv 2.1.0).
Boxes of negative size are pooled as on CUDA, not rejected as on a CPU.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require, require_dtype, require_shape, require_tensor
from .bilinear_mean import Means, Visit, mean_backward, mean_forward
from .rois import check_rois


def _rotated(name: str, feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
             sampling_ratio: int, aligned: bool, clockwise: bool) -> Means:
    """Return the samples of boxes (K, 6): image index, center x, y, width, height, angle."""
    image = check_rois(name, feature, rois, 6)
    rois = rois.to(gather.COMPUTE[rois.dtype])
    box = rois[:, 1:5] * gather.single(scale)
    offset = 0.5 if aligned else 0.
    center_x, center_y = box[:, 0] - offset, box[:, 1] - offset
    width, height = box[:, 2], box[:, 3]
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    theta = -rois[:, 5] if clockwise else rois[:, 5]
    bin_h, bin_w = height / bins[0], width / bins[1]
    grid = sampling.grid_of(bin_h, bin_w, sampling_ratio)
    columns = torch.stack((center_y, center_x, -height / 2, -width / 2, bin_h, bin_w, theta.cos(),
                           theta.sin(), grid.y.to(bin_h.dtype), grid.x.to(bin_w.dtype)), 1)

    def locate(visit: Visit) -> tuple[Tensor, Tensor]:
        (cy, cx, top, left, step_h, step_w, cos, sin, rows,
         cols) = columns.index_select(0, visit.roi).unbind(1)
        y = top + visit.ph * step_h + (visit.iy + 0.5) * step_h / rows
        x = left + visit.pw * step_w + (visit.ix + 0.5) * step_w / cols
        return y * cos - x * sin + cy, y * sin + x * cos + cx

    return Means(image, grid, bins, locate)


def roi_align_rotated_forward(input: Tensor, rois: Tensor, output: Tensor, pooled_height: int,
                              pooled_width: int, spatial_scale: float, sampling_ratio: int,
                              aligned: bool, clockwise: bool) -> None:
    """Fill ``output`` (K, C, pooled_height, pooled_width) from ``input`` (N, C, H, W).

    ``rois`` is (K, 6): image index, center x and y, width, height in pixels of the image, angle in
    radians, counterclockwise unless ``clockwise``.
    """
    mean_forward(_rotated('roi_align_rotated', input, rois, (pooled_height, pooled_width),
                          spatial_scale, sampling_ratio, aligned, clockwise), input, output)


def roi_align_rotated_backward(top_grad: Tensor, rois: Tensor, bottom_grad: Tensor,
                               pooled_height: int, pooled_width: int, spatial_scale: float,
                               sampling_ratio: int, aligned: bool, clockwise: bool) -> None:
    """Add the gradient of :func:`roi_align_rotated_forward` to ``bottom_grad`` (N, C, H, W)."""
    means = _rotated('roi_align_rotated', bottom_grad, rois, (pooled_height, pooled_width),
                     spatial_scale, sampling_ratio, aligned, clockwise)
    mean_backward(means, top_grad, bottom_grad)


def _orientations(rois: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first orientation of each RoI, (K,) int64, and the fraction beyond it, (K,)."""
    dtype = gather.COMPUTE[rois.dtype]
    steps = ((rois[:, 5].to(dtype) * count).double() / (2 * math.pi)).to(dtype)
    start = steps.floor()
    return start.nan_to_num(0).to(torch.int64) % count, steps - start


def _rotate_channels(features: Tensor, out: Tensor, orientations: tuple[Tensor, Tensor],
                     count: int, back: bool) -> None:
    """Interpolate between orientations of (K, C, ...) into ``out``; the transpose if ``back``.

    ``out`` may be ``features``: every RoI is read before it is written.
    """
    ordinal = torch.arange(count, device=features.device)
    dtype, groups = gather.COMPUTE[features.dtype], (features.shape[1] // count, count)
    step = gather.chunk_rows(features.device, features[:1].numel())
    for a in range(0, len(features), step):
        start, past = (part[a:a + step, None] for part in orientations)
        near = (ordinal + (start if back else -start)) % count
        far = (near - 1 if back else near + 1) % count
        some = features[a:a + step].to(dtype).flatten(2).unflatten(1, groups)
        past = past.to(dtype)[:, :, None, None]
        blend = (some.gather(2, near[:, None, :, None].expand(some.shape)) * (1 - past)
                 + some.gather(2, far[:, None, :, None].expand(some.shape)) * past)
        out[a:a + step] = blend.view(out[a:a + step].shape)


def _check_orientations(channels: int, count: int) -> None:
    require(count > 0 and channels % count == 0, 'riroi_align_rotated',
            f'{channels} channels are not divisible by num_orientations {count}')


def riroi_align_rotated_forward(features: Tensor, rois: Tensor, output: Tensor, pooled_height: int,
                                pooled_width: int, spatial_scale: float, num_samples: int,
                                num_orientations: int, clockwise: bool) -> None:
    """Compute :func:`roi_align_rotated_forward` whose channels rotate with the box.

    Channels are groups of ``num_orientations``. A box at angle a reads each group shifted by
    a / 2 pi of its length, with linear interpolation. Boxes are at least 1 x 1 pixels.
    """
    _check_orientations(features.shape[1], num_orientations)
    means = _rotated('riroi_align_rotated', features, rois, (pooled_height, pooled_width),
                     spatial_scale, num_samples, False, clockwise)
    # low precision must not be rounded twice; full precision is rotated in place
    straight = output if output.dtype == gather.COMPUTE[output.dtype] else torch.empty_like(
        output, dtype=gather.COMPUTE[output.dtype])
    mean_forward(means, features, straight)
    _rotate_channels(straight, output, _orientations(rois, num_orientations), num_orientations,
                     back=False)


def riroi_align_rotated_backward(top_grad: Tensor, rois: Tensor, bottom_grad: Tensor,
                                 pooled_height: int, pooled_width: int, spatial_scale: float,
                                 num_samples: int, num_orientations: int, clockwise: bool) -> None:
    """Add the gradient of :func:`riroi_align_rotated_forward` to ``bottom_grad``."""
    _check_orientations(bottom_grad.shape[1], num_orientations)
    means = _rotated('riroi_align_rotated', bottom_grad, rois, (pooled_height, pooled_width),
                     spatial_scale, num_samples, False, clockwise)
    straight = torch.empty_like(top_grad, dtype=gather.COMPUTE[top_grad.dtype])
    _rotate_channels(top_grad, straight, _orientations(rois, num_orientations), num_orientations,
                     back=True)
    mean_backward(means, straight, bottom_grad)


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
