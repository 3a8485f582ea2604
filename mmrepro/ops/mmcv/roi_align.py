"""RoIAlign: the mean of bilinear samples in every bin of axis-aligned boxes.

Signatures: ``mmcv/ops/roi_align.py``. Formulas: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). The
mean is a filter per axis (:func:`mmrepro.ops.sampling.axis_taps`): the taps of a bin are the
product of two filters, or, with few channels, the filters are applied one after the other. mmcv's
maximum is refused.

Where mmcv's CPU and CUDA kernels differ, this follows the CUDA one: boxes of negative size are
pooled, not rejected.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require
from .rois import Rois, check_images, edges_of, images_of, pool


def check_mode(pool_mode: int) -> None:
    """Raise RuntimeError unless ``pool_mode`` is 1, the mean."""
    require(pool_mode == 1, 'roi_align',
            "pool_mode='max' has no deterministic form in mmrepro; use 'avg', as the detectors of "
            "MMDetection do, or a compiled mmcv with deterministic=False and operators=None")


def _boxes(feature: Tensor, rois: Tensor, bins: tuple[int, int], scale: float,
           sampling_ratio: int, aligned: bool) -> tuple[Rois, Tensor]:
    """Return the RoIs, and a copy of their grid on the host."""
    image = images_of('roi_align', feature, rois)
    y, x, bin_h, bin_w = edges_of(rois, bins, scale, aligned)
    grid = sampling.samples_per_bin(bin_h, bin_w, sampling_ratio)
    host = torch.cat((image[None], grid)).cpu()  # the host waits once for all that it must know
    check_images('roi_align', feature, host[0], len(rois))
    sampling.check_grid(host[1:], sampling_ratio)
    return Rois(image, y, x, bin_h, bin_w, grid), host[1:]


def _runs(grid: Tensor, shape: torch.Size, bins: tuple[int, int], adaptive: bool,
          budget: int) -> list[tuple[int, int]]:
    """Return runs of RoIs to process together, by their number of taps."""
    per_sample = 1 if adaptive else 2
    tall = (grid[0] * per_sample + adaptive).clamp(max=2 * shape[2])
    wide = (grid[1] * per_sample + adaptive).clamp(max=2 * shape[3])
    taps = tall * wide * (bins[0] * bins[1])
    # the filters of a run are padded to its longest one; see axis_taps
    filters = (bins[0] * (grid[0] + 1) + bins[1] * (grid[1] + 1)) * 4
    costs, widths = torch.stack((taps + filters, filters)).tolist()
    return gather.chunk_by_cost(costs, budget, widths)


def _filters(boxes: Rois, grid: Tensor, shape: torch.Size, bins: tuple[int, int],
             adaptive: bool) -> tuple[sampling.AxisTaps, sampling.AxisTaps]:
    """Return the filters of RoIs along y and x; ``grid`` is that of the same RoIs, on the host."""
    axes = (boxes.y, boxes.x), (boxes.bin_h, boxes.bin_w), boxes.grid
    most = grid.amax(1).tolist()
    if boxes.y.is_cuda and bins[0] == bins[1]:
        return sampling.both_axes(*axes, max(most), bins[0], shape[2:], adaptive)
    ys, xs = (sampling.axis_taps(start, bin_size, samples, largest, number, length, adaptive)
              for start, bin_size, samples, largest, number, length in zip(
                  *axes, most, bins, shape[2:]))
    return ys, xs


def _taps(boxes: Rois, grid: Tensor, shape: torch.Size, bins: tuple[int, int], adaptive: bool,
          a: int, b: int) -> sampling.Taps:
    some = boxes.select(slice(a, b))
    filters = _filters(some, grid[:, a:b], shape, bins, adaptive)
    return sampling.product_taps(some.image, *filters, *shape[2:])


def _few_channels(grid: Tensor, shape: torch.Size, bins: tuple[int, int],
                  adaptive: bool) -> bool:
    """Whether :func:`_mean_by_lines` is faster than taps, as for mask targets.

    The constants are nanoseconds on one core: per pixel of a line and tap, per transposed pixel,
    and per tap of a bin. They affect speed and rounding only.
    """
    channels, width = shape[1], shape[3]
    if channels > 4 or not adaptive:
        return False
    tall, wide = (g.to(torch.float64) + 1 for g in grid)
    lines = (channels * bins[0] * width * (tall * 0.15 + 3)).sum()
    taps = (bins[0] * bins[1] * tall * wide * 12).sum()
    return bool(lines < taps)


def _mean_by_lines(input: Tensor, boxes: Rois, grid: Tensor, output: Tensor) -> None:
    """Compute the mean for few channels: a vertical filter, then a horizontal one.

    The first sum gathers lines of pixels, the second columns of its result, so the features are
    not transposed.
    """
    (n, c, h, w), (k, _, ph, pw) = input.shape, output.shape
    lines = input.reshape(n * c * h, w).to(gather.compute_dtype(input))
    for part in gather.slices(k, gather.chunk_taps(input.device) * 4 // (c * ph * w)):
        some = boxes.select(part)
        ys, xs = _filters(some, grid[:, part], input.shape, (ph, pw), True)
        plane = some.image[:, None] * c + torch.arange(c, device=input.device)
        down = gather.gather_sum(lines, *sampling.plane_taps(plane * h, ys))
        across = down.view(-1, ph, w).transpose(1, 2).reshape(-1, ph)
        own = torch.arange(len(some.image) * c, device=input.device).view(-1, c)
        result = gather.gather_sum(across, *sampling.plane_taps(own * w, xs))
        output[part] = result.view(-1, c, pw, ph).transpose(2, 3).to(output.dtype)


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """Fill ``output`` (K, C, aligned_height, aligned_width) from ``input`` (N, C, H, W).

    ``pool_mode`` must be 1, the mean, which has no use for ``argmax_y`` and ``argmax_x``.
    """
    check_mode(pool_mode)
    bins = (aligned_height, aligned_width)
    boxes, grid = _boxes(input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if output.numel() == 0:
        return
    adaptive = sampling_ratio <= 0
    if _few_channels(grid, input.shape, bins, adaptive):
        _mean_by_lines(input, boxes, grid, output)
        return
    pool(input, output, _runs(grid, input.shape, bins, adaptive, gather.tap_budget(input, output)),
         functools.partial(_taps, boxes, grid, input.shape, bins, adaptive))


def roi_align_backward(grad_output: Tensor, rois: Tensor, argmax_y: Tensor, argmax_x: Tensor,
                       grad_input: Tensor, aligned_height: int, aligned_width: int,
                       spatial_scale: float, sampling_ratio: int, pool_mode: int,
                       aligned: bool) -> None:
    """Add the gradient of :func:`roi_align_forward` to ``grad_input`` (N, C, H, W).

    ``grad_output`` is (K, C, aligned_height, aligned_width); the others are as in the forward.
    """
    check_mode(pool_mode)
    bins = (aligned_height, aligned_width)
    boxes, grid = _boxes(grad_input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    adaptive, shape, sink = sampling_ratio <= 0, grad_input.shape, gather.Sink(grad_input)
    for a, b in _runs(grid, shape, bins, adaptive, gather.tap_budget(grad_input, grad_output)):
        taps = _taps(boxes, grid, shape, bins, adaptive, a, b)
        sink.scatter_sum(gather.bags(grad_output[a:b]), taps.row, taps.weight, taps.bag,
                         padded=False)
    sink.close()
