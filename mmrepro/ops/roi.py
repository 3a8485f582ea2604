"""RoIAlign: mean or maximum of bilinear samples in every bin of axis-aligned boxes.

Signatures: ``mmcv/ops/roi_align.py``. Formulas: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). The
mean is one sparse matrix: :func:`mmrepro.ops.sampling.axis_taps` gives a filter per axis, their
product is the taps of a bin. The maximum visits the samples in mmcv's order and keeps the first.

Where mmcv's CPU and CUDA kernels differ, this is the CUDA one: boxes of negative size are read, not
refused, and the maximum over no samples is the lowest float32, not -10000.
"""
from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mmrepro.ops import gather, roi_max, sampling
from mmrepro.ops.contract import describe, require, require_dtype, require_shape

__all__ = ['Boxes', 'check_rois', 'roi_align_backward', 'roi_align_forward']


class Boxes(NamedTuple):
    """Boxes in pixels of the map, (K,) each."""

    image: Tensor
    y: Tensor
    x: Tensor
    bin_h: Tensor
    bin_w: Tensor
    grid: sampling.Grid

    def part(self, a: int, b: int) -> Boxes:
        grid = self.grid._replace(y=self.grid.y[a:b], x=self.grid.x[a:b])
        return Boxes(*(t[a:b] for t in self[:5]), grid)

    def pick(self, which: Tensor) -> Boxes:
        grid = self.grid._replace(y=self.grid.y[which], x=self.grid.x[which])
        return Boxes(*(t[which] for t in self[:5]), grid)


def check_rois(operator: str, feature: Tensor, rois: Tensor, columns: int) -> Tensor:
    """The image index of each RoI as (K,) int64, after the checks that mmcv's kernels lack.

    Raises:
        RuntimeError: shapes or dtypes that do not fit, or a RoI of an image not in the batch.
    """
    require_shape(operator, 'input', feature, (None,) * 4)
    require_shape(operator, 'rois', rois, (None, columns))
    require_dtype(operator, 'input', feature)
    require_dtype(operator, 'rois', rois, (feature.dtype,))
    image = rois[:, 0].nan_to_num(-1).to(torch.int64)
    if image.numel():
        low, high = torch.stack(image.aminmax()).tolist()
        require(low >= 0 and high < len(feature), operator,
                f'rois name images {low} to {high}, but input {describe(feature)} has images 0 to '
                f'{len(feature) - 1}')
    return image


def _boxes(feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
           sampling_ratio: int, aligned: bool) -> Boxes:
    image = check_rois('roi_align', feature, rois, 5)
    edges = rois[:, 1:].to(gather.compute_dtype(rois)) * gather.single(scale)
    edges = edges - (0.5 if aligned else 0.)
    x, y, x2, y2 = edges.unbind(1)
    width, height = x2 - x, y2 - y
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    bin_h, bin_w = height / bins[0], width / bins[1]
    return Boxes(image, y, x, bin_h, bin_w, sampling.grid_of(bin_h, bin_w, sampling_ratio))


def _runs(boxes: Boxes, shape: torch.Size, bins: tuple[int, int], adaptive: bool,
          budget: int) -> list[tuple[int, int]]:
    """RoIs to work on together, by the number of taps that they will have."""
    per_sample = 1 if adaptive else 2
    tall = (boxes.grid.y * per_sample + adaptive).clamp(max=2 * shape[2])
    wide = (boxes.grid.x * per_sample + adaptive).clamp(max=2 * shape[3])
    taps = tall * wide * (bins[0] * bins[1])
    # The padded filters of a run are as long as its longest; see axis_taps.
    filters = (bins[0] * (boxes.grid.y + 1) + bins[1] * (boxes.grid.x + 1)) * 4
    costs, widths = torch.stack((taps + filters, filters)).tolist()
    return gather.cut(costs, budget, widths)


def _mean_taps(boxes: Boxes, shape: torch.Size, bins: tuple[int, int],
               adaptive: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """All taps of some RoIs: row, weight and bag (E,), and where each bag begins (B + 1,).

    A bag is a bin; a *line* is the part of a bin in one row of pixels, contiguous taps.
    """
    height, width = shape[2:]
    most_y, most_x = torch.stack((boxes.grid.y.amax(), boxes.grid.x.amax())).tolist()
    ys = sampling.axis_taps(boxes.y, boxes.bin_h, boxes.grid.y, most_y, bins[0], height, adaptive)
    xs = sampling.axis_taps(boxes.x, boxes.bin_w, boxes.grid.x, most_x, bins[1], width, adaptive)
    k, ph, pw = len(boxes.image), *bins
    lines_of = ys.count[:, :, None].expand(k, ph, pw).reshape(-1)
    line_bag = torch.repeat_interleave(lines_of)
    roi = torch.div(line_bag, ph * pw, rounding_mode='floor')
    first_line = lines_of.cumsum(0) - lines_of
    in_bag = line_bag - roi * (ph * pw)
    bag_y = torch.div(in_bag, pw, rounding_mode='floor')
    slot = torch.arange(len(line_bag), device=roi.device) - first_line.index_select(0, line_bag)
    y_at = (roi * ph + bag_y) * ys.weight.shape[2] + slot
    column = roi * pw + in_bag - bag_y * pw
    line_row = (boxes.image.index_select(0, roi) * height
                + ys.position.flatten().index_select(0, y_at)) * width
    line_weight = ys.weight.flatten().index_select(0, y_at)
    taps_of = xs.count.flatten().index_select(0, column)
    line = torch.repeat_interleave(taps_of)
    ends = taps_of.cumsum(0)
    x_start = column * xs.weight.shape[2] - (ends - taps_of)
    x_at = x_start.index_select(0, line) + torch.arange(len(line), device=roi.device)
    row = line_row.index_select(0, line) + xs.position.flatten().index_select(0, x_at)
    weight = line_weight.index_select(0, line) * xs.weight.flatten().index_select(0, x_at)
    taps_before = torch.cat((ends.new_zeros(1), ends))
    lines_before = torch.cat((first_line, first_line[-1:] + lines_of[-1:]))
    starts = taps_before.index_select(0, lines_before)
    return (row.to(torch.int32), weight, line_bag.index_select(0, line).to(torch.int32),
            starts.to(torch.int32))


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """Fill ``output`` (K, C, aligned_height, aligned_width) from ``input`` (N, C, H, W).

    Args:
        rois: (K, 5): image index, x1, y1, x2, y2 in pixels of the image.
        argmax_y, argmax_x: shape of ``output`` for the maximum, where they get the position of the
            sample that won; unused for the mean.
        spatial_scale: pixels of the map per pixel of the image.
        sampling_ratio: samples per bin and axis; 0 or less: one per started pixel.
        pool_mode: 0 is the maximum, 1 the mean.
        aligned: subtract half a pixel; without it boxes are at least 1 x 1 pixels.

    Raises:
        RuntimeError: as :func:`check_rois`.
    """
    bins = (aligned_height, aligned_width)
    boxes = _boxes(input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if output.numel() == 0:
        return
    if pool_mode == 0:
        roi_max.align_forward(input, boxes, output, argmax_y, argmax_x)
        return
    rows = gather.rows_of(input)
    adaptive = sampling_ratio <= 0
    for a, b in _runs(boxes, input.shape, bins, adaptive, gather.tap_budget(input, output)):
        row, weight, _, starts = _mean_taps(boxes.part(a, b), input.shape, bins, adaptive)
        gather.put_rows(output[a:b], gather.read(rows, row, weight, starts))


def roi_align_backward(grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor,
                       grad_input: Tensor, aligned_height: int, aligned_width: int,
                       spatial_scale: float, sampling_ratio: int, pool_mode: int,
                       aligned: bool) -> None:
    """Add the gradient of :func:`roi_align_forward` to ``grad_input`` (N, C, H, W).

    ``grad_output`` is (K, C, aligned_height, aligned_width); the others as in the forward.
    """
    bins = (aligned_height, aligned_width)
    boxes = _boxes(grad_input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    if pool_mode == 0:
        roi_max.align_backward(grad_output, boxes, argmax_y, argmax_x, grad_input)
        return
    n, c, h, w = shape = grad_input.shape
    adaptive = sampling_ratio <= 0
    total = None
    for a, b in _runs(boxes, shape, bins, adaptive, gather.tap_budget(grad_input, grad_output)):
        row, weight, bag, _ = _mean_taps(boxes.part(a, b), shape, bins, adaptive)
        part = gather.spread(gather.bags(grad_output[a:b]), row, weight, n * h * w, bag)
        total = part if total is None else total.add_(part)
    if total is not None:
        gather.add_rows(grad_input, total)
