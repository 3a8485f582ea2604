"""RoIAlign: the mean or the maximum of bilinear samples in every bin of axis-aligned boxes.

Signatures: ``mmcv/ops/roi_align.py``. Formulas: ``roi_align_cuda_kernel.cuh`` (mmcv 2.1.0). The
mean is a filter per axis (:func:`mmrepro.ops.sampling.axis_taps`): the taps of a bin are the
product of two filters, or, with few channels, the filters are applied one after the other. For the
maximum, the samples of a bin are visited in mmcv's order: the first of equal ones wins, and NaN
never does.

Where mmcv's CPU and CUDA kernels differ, this follows the CUDA one: boxes of negative size are
pooled, not rejected.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from .. import gather, sampling
from .rois import LOWEST, Rois, check_images, edges_of, images_of, keep_greater, pool

# mmcv's numbers of the modes.
MAX, MEAN = 0, 1


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


class _Visits:
    """The samples of boxes, visited in order; boxes with the most samples must be first.

    Visit ``n`` has sample ``n`` of every bin that has so many: bins of the first boxes.
    """

    def __init__(self, boxes: Rois, grid: Tensor, shape: torch.Size, bins: tuple[int, int]) -> None:
        self.boxes, self.shape, self.bins = boxes, shape, bins
        self.counts = grid.prod(0).tolist()
        self.sizes = [boxes.bin_h, boxes.bin_w]
        self.first = []  # top and left of each bin, (K, PH) and (K, PW)
        for start, size, number in zip((boxes.y, boxes.x), self.sizes, bins):
            ordinal = torch.arange(number, dtype=start.dtype, device=start.device)
            self.first.append(start[:, None] + ordinal * size[:, None])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows and weights (B, 4) of a visit."""
        n, _, height, width = self.shape
        base = (self.boxes.image * (height * width))[:, None, None, None]
        grid_x, length = self.boxes.grid[1], len(self.counts)
        for ordinal in range(self.counts[0] if self.counts else 0):
            while self.counts[length - 1] <= ordinal:
                length -= 1
            iy = torch.div(ordinal, grid_x[:length], rounding_mode='floor')
            ix = ordinal - iy * grid_x[:length]
            y = self._position(0, slice(0, length), iy[:, None])
            x = self._position(1, slice(0, length), ix[:, None])
            y, x = torch.broadcast_tensors(y[:, :, None], x[:, None, :])
            taps = sampling.clamped_corners(y, x, height, width)
            row = torch.where(taps.live, taps.row + base[:length], n * height * width)
            yield row.view(-1, 4).to(torch.int32), taps.weight.view(-1, 4)

    def _position(self, axis: int, which: slice, sample: Tensor) -> Tensor:
        """Return positions along an axis of samples (K, 1) or (K, P, C) of boxes."""
        size = self.sizes[axis][which]
        first, grid = self.first[axis][which], self.boxes.grid[axis][which]
        shape = (-1, *[1] * (sample.dim() - 1))
        return (first.view(*first.shape, *[1] * (sample.dim() - 2))
                + (sample + 0.5) * size.view(shape) / grid.view(shape))

    def positions(self, winner: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and x (B, C) of winning samples (B, C); -1 for none."""
        ph, pw = self.bins
        grid_x = self.boxes.grid[1].clamp(min=1).to(winner.dtype)[:, None, None, None]
        sample = winner.view(-1, ph, pw, winner.shape[1])
        iy = torch.div(sample, grid_x, rounding_mode='floor')
        every, none = slice(None), winner < 0
        y = self._position(0, every, iy.flatten(2)).view(sample.shape)
        x = self._position(1, every, (sample - iy * grid_x).transpose(1, 2).flatten(2))
        x = x.view(-1, pw, ph, winner.shape[1]).transpose(1, 2).reshape(winner.shape)
        return y.view(winner.shape).masked_fill(none, -1), x.masked_fill(none, -1)

    def winners(self, at_y: Tensor, at_x: Tensor) -> Tensor:
        """Return the samples (B, C) int32 at positions (K, C, PH, PW); -1 for none.

        The nearest sample is taken: another kernel, or low precision, may have rounded positions.
        """
        ordinals = []
        for axis, at in enumerate((at_y, at_x)):
            size = self.sizes[axis][:, None, None, None]
            grid = self.boxes.grid[axis][:, None, None, None]
            first = self.first[axis][:, None]
            first = first[..., None] if axis == 0 else first[:, :, None]
            step = (at.to(first.dtype) - first) * (grid / size) - 0.5
            ordinal = step.nan_to_num_(0).round_().clamp_(min=0)
            ordinals.append(torch.minimum(ordinal, (grid - 1).clamp(min=0)))
        sample = ordinals[0].mul_(self.boxes.grid[1][:, None, None, None]).add_(ordinals[1])
        # mmcv marks "no sample" with y = -1, and so drops a winner at exactly that position
        return gather.bags(sample.masked_fill_(at_y == -1, -1).to(torch.int32))


def _by_samples(boxes: Rois, grid: Tensor) -> tuple[Rois, Tensor, Tensor]:
    """Return RoIs and their grid, those with the most samples first, and their order."""
    order = torch.sort(grid.prod(0), descending=True, stable=True).indices
    on_device = order.to(boxes.image.device)
    return boxes.select(on_device), grid[:, order], on_device


def _greatest(input: Tensor, boxes: Rois, grid: Tensor, output: Tensor, argmax_y: Tensor,
              argmax_x: Tensor) -> None:
    """Compute the maximum; see :func:`roi_align_forward`."""
    rows, bins = gather.rows_of(input), (output.shape[2], output.shape[3])
    boxes, grid, order = _by_samples(boxes, grid)
    for part in gather.slices(len(output), gather.chunk_taps(input.device) // output[0].numel()):
        visits = _Visits(boxes.select(part), grid[:, part], input.shape, bins)
        count = (part.stop - part.start) * bins[0] * bins[1]
        best = rows.new_full((count, output.shape[1]), LOWEST)
        winner = torch.full_like(best, -1, dtype=torch.int32)
        for ordinal, (row, weight) in enumerate(visits):
            keep_greater(best, winner, gather.gather_sum(rows, row, weight), ordinal)
        # turn -0 into 0: which of them is the maximum depends on the vector instructions
        for out, result in zip((output, argmax_y, argmax_x),
                               (best.add_(0.), *visits.positions(winner))):
            some = torch.empty_like(out[part])
            gather.put_rows(some, result)
            out.index_copy_(0, order[part], some)


def _scatter_to_winners(grad_output: Tensor, boxes: Rois, grid: Tensor, argmax_y: Tensor,
                        argmax_x: Tensor, grad_input: Tensor) -> None:
    """Add the gradient of the maximum, visit by visit, to the channels that each won.

    That is one sort for each visit instead of one tap for each element. Late visits have few bins:
    several of them are scattered together, up to the size of the first.
    """
    boxes, grid, order = _by_samples(boxes, grid)
    visits = _Visits(boxes, grid, grad_input.shape, (grad_output.shape[2], grad_output.shape[3]))
    winner = visits.winners(argmax_y.index_select(0, order), argmax_x.index_select(0, order))
    grad = gather.bags(grad_output.index_select(0, order))
    source, sink, used = torch.empty_like(grad), gather.Sink(grad_input), 0
    rows: list[Tensor] = []
    weights: list[Tensor] = []
    for ordinal, (row, weight) in enumerate(visits):
        if used + len(row) > len(source):
            sink.scatter_sum(source[:used], torch.cat(rows), torch.cat(weights))
            rows, weights, used = [], [], 0
        part = slice(0, len(row))
        source[used:used + len(row)] = grad[part].masked_fill(winner[part] != ordinal, 0)
        rows.append(row)
        # a sample at NaN never wins, but 0 times its weight must not be NaN
        weights.append(weight.nan_to_num(nan=0.))
        used += len(row)
    if used:
        sink.scatter_sum(source[:used], torch.cat(rows), torch.cat(weights))
    sink.close()


def roi_align_forward(input: Tensor, rois: Tensor, output: Tensor, argmax_y: Tensor,
                      argmax_x: Tensor, aligned_height: int, aligned_width: int,
                      spatial_scale: float, sampling_ratio: int, pool_mode: int,
                      aligned: bool) -> None:
    """Fill ``output`` (K, C, aligned_height, aligned_width) from ``input`` (N, C, H, W).

    ``pool_mode`` is 1 for the mean, or 0 for the maximum, which also fills ``argmax_y`` and
    ``argmax_x``, of the shape of ``output``: positions of the winners in pixels, -1 for none.
    """
    bins = (aligned_height, aligned_width)
    boxes, grid = _boxes(input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if output.numel() == 0:
        return
    if pool_mode == MAX:
        _greatest(input, boxes, grid, output, argmax_y, argmax_x)
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
    bins = (aligned_height, aligned_width)
    boxes, grid = _boxes(grad_input, rois, bins, spatial_scale, sampling_ratio, aligned)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    if pool_mode == MAX:
        _scatter_to_winners(grad_output, boxes, grid, argmax_y, argmax_x, grad_input)
        return
    adaptive, shape, sink = sampling_ratio <= 0, grad_input.shape, gather.Sink(grad_input)
    for a, b in _runs(grid, shape, bins, adaptive, gather.tap_budget(grad_input, grad_output)):
        taps = _taps(boxes, grid, shape, bins, adaptive, a, b)
        sink.scatter_sum(gather.bags(grad_output[a:b]), taps.row, taps.weight, taps.bag,
                         padded=False)
    sink.close()
