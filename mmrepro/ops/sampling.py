"""Bilinear sampling: positions of samples become taps for :mod:`mmrepro.ops.gather`.

mmcv has two rules for the border of a map. RoI operators *clamp*: a sample up to one pixel outside
the map reads the border pixel, a sample further out is zero. Deformable operators *pad with zeros*:
a sample within one pixel of the map reads those of its four corners that exist.

Formulas: ``bilinear_interpolate`` of mmcv's ``common_cuda_helper.hpp`` and
``deformable_im2col_bilinear`` of ``deform_conv_cuda_kernel.cuh`` (mmcv 2.1.0).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .contract import require

# More samples than this along one axis of a bin mean a broken box, not a large one: mmcv would
# visit the square of this number for every bin and channel.
MAX_GRID = 1 << 16
# Weights that are computed at once, before they are summed over samples; on CUDA only, where a
# call costs more than the memory.
MOST_HATS = 1 << 24


class Corners(NamedTuple):
    """Four taps per sample, (..., 4): by y low, low, high, high; by x low, high, low, high.

    ``row`` is the flat position ``y * width + x``, valid only where ``live``; ``dy`` and ``dx``
    are the derivatives of the weights by the sample's y and x.
    """

    row: Tensor
    weight: Tensor
    live: Tensor
    dy: Tensor
    dx: Tensor


def _outer(low_y: Tensor, high_y: Tensor, low_x: Tensor, high_x: Tensor) -> Tensor:
    return torch.stack((low_y * low_x, low_y * high_x, high_y * low_x, high_y * high_x), -1)


def clamped_corners(y: Tensor, x: Tensor, height: int, width: int) -> Corners:
    """Return taps of samples under the clamping rule of RoI operators.

    A sample at NaN is not outside: it reads pixel 0 with a weight of NaN, as mmcv on CUDA does.

    The derivatives are mmcv's (``deform_roi_pool_cuda_kernel.cuh``). Between pixels they are exact;
    where the rule clamped a sample, they are computed from its position before clamping.
    """
    outside = ((y < -1) | (y > height) | (x < -1) | (x > width)).unsqueeze(-1)
    at_y, at_x = y.clamp(0, height - 1), x.clamp(0, width - 1)
    y0, x0 = at_y.floor(), at_x.floor()
    fy, fx = at_y - y0, at_x - x0
    low_y, low_x = y0.nan_to_num(0).to(torch.int32), x0.nan_to_num(0).to(torch.int32)
    high_y, high_x = (low_y + 1).clamp_(max=height - 1), (low_x + 1).clamp_(max=width - 1)
    row = torch.stack((low_y * width + low_x, low_y * width + high_x,
                       high_y * width + low_x, high_y * width + high_x), -1)
    weight = _outer(1 - fy, fy, 1 - fx, fx).masked_fill_(outside, 0)
    below, above = y - low_y, high_y - y
    before, after = x - low_x, high_x - x
    dy = torch.stack((-after, -before, after, before), -1).masked_fill_(outside, 0)
    dx = torch.stack((-above, above, -below, below), -1).masked_fill_(outside, 0)
    return Corners(row, weight, ~outside.expand(row.shape), dy, dx)


def padded_corners(y: Tensor, x: Tensor, height: int | Tensor,
                   width: int | Tensor) -> Corners:
    """Return taps of samples under the zero-padding rule of deformable operators.

    A sample at NaN is outside: it reads nothing, and its gradient is zero.
    ``height`` and ``width`` may be tensors that broadcast: the map of each sample.
    """
    if y.is_cuda:
        return _stacked_corners(y, x, height, width)
    inside = (y > -1) & (x > -1) & (y < height) & (x < width)
    y, x = y.masked_fill(~inside, 0), x.masked_fill(~inside, 0)
    y0, x0 = y.floor(), x.floor()
    fy, fx = y - y0, x - x0
    low_y, low_x = y0.to(torch.int32), x0.to(torch.int32)
    top, left = inside & (low_y >= 0), low_x >= 0
    bottom, right = inside & (low_y < height - 1), low_x < width - 1
    live = torch.stack((top & left, top & right, bottom & left, bottom & right), -1)
    base = low_y * width + low_x
    row = torch.stack((base, base + 1, base + width, base + width + 1), -1)
    one = torch.ones_like(fy)
    return Corners(row, _outer(1 - fy, fy, 1 - fx, fx) * live, live,
                   _outer(-one, one, 1 - fx, fx) * live, _outer(1 - fy, fy, -one, one) * live)


def _stacked_corners(y: Tensor, x: Tensor, height: int | Tensor,
                     width: int | Tensor) -> Corners:
    """Compute :func:`padded_corners`, bit for bit, in half as many calls on more memory."""
    at = torch.stack((y, x), -1)
    size = torch.stack(torch.broadcast_tensors(
        *(value if isinstance(value, Tensor) else torch.full((), value, device=y.device)
          for value in (height, width))), -1).to(torch.int32)
    inside = ((at > -1) & (at < size)).all(-1, keepdim=True)
    at = at.masked_fill_(~inside, 0)
    low = at.floor()
    high_share = (at - low).unsqueeze(-2)
    # the corners by (y, x): (0, 0), (0, 1), (1, 0), (1, 1)
    corner = torch.arange(4, dtype=torch.int32, device=y.device)
    corner = torch.stack((corner >> 1, corner & 1), -1)
    pixel = low.to(torch.int32).unsqueeze(-2) + corner
    live = ((pixel >= 0) & (pixel < size.unsqueeze(-2))).all(-1) & inside
    is_high = corner.bool()
    share = torch.where(is_high, high_share, 1 - high_share)
    share_y, share_x = share.unbind(-1)
    sign_y, sign_x = (2 * corner - 1).to(y.dtype).unbind(-1)
    row = pixel[..., 0] * size[..., 1:] + pixel[..., 1]
    return Corners(row, share_y * share_x * live, live, sign_y * share_x * live,
                   share_y * sign_x * live)


def samples_per_bin(bin_h: Tensor, bin_w: Tensor, sampling_ratio: int) -> Tensor:
    """Return the grid of each RoI: its samples per bin along y and x, (2, K) int64.

    ``sampling_ratio``, or one per started pixel if that is 0 or less. A bin whose size is not
    finite has none, as after mmcv's conversion to int. At most 2 * MAX_GRID, unchecked.
    """
    if sampling_ratio > 0:
        return torch.full((2, len(bin_h)), sampling_ratio, device=bin_h.device)
    sizes = torch.stack((bin_h, bin_w)).ceil()
    return torch.where(sizes.isfinite(), sizes, 0.).clamp(0, 2. * MAX_GRID).to(torch.int64)


def check_grid(grid: Tensor, sampling_ratio: int) -> None:
    """Raise RuntimeError if a bin has more than :data:`MAX_GRID` samples along one axis.

    The host waits for ``grid``, of :func:`samples_per_bin`, if it is on a device.
    """
    most = int(grid.amax()) if sampling_ratio <= 0 and grid.numel() else 0
    require(most <= MAX_GRID, 'sampling_ratio=0',
            f'a bin asks for {most} or more samples along one axis (allowed: {MAX_GRID}); its '
            'box is larger than any image')


class AxisTaps(NamedTuple):
    """Taps of each bin along one axis: positions and weights (K, P, T), numbers of taps (K, P)."""

    position: Tensor
    weight: Tensor
    number: Tensor


def axis_taps(start: Tensor, bin_size: Tensor, grid: Tensor, most: int, bins: int,
              size: int | Tensor, adaptive: bool) -> AxisTaps:
    """Return one axis of a mean over a regular grid of bilinear samples (clamping rule).

    The samples of a bin are a product of two axes, and so is the clamping rule; hence the average
    is a product of one small filter per axis. Samples that are at most a pixel apart share pixels;
    the filter then has one tap per pixel instead of two per sample. The weights of a bin with all
    samples inside sum to one.

    Args:
        start: (K,) where each RoI begins, in pixels. bin_size: (K,), signed.
        grid: (K,) samples per bin. most: the largest of them.
        bins: P. size: pixels along this axis; or (K, 1, 1) of the dtype of ``start``.
        adaptive: ``grid`` is one sample per started pixel, so samples are never further apart.
    """
    ordinal = torch.arange(bins, dtype=start.dtype, device=start.device)
    sample = torch.arange(most, dtype=start.dtype, device=start.device)
    step = (sample + 0.5) * bin_size[:, None] / grid.clamp(min=1)[:, None]
    y = (start[:, None] + ordinal * bin_size[:, None])[:, :, None] + step[:, None, :]
    live = ~((y < -1) | (y > size)) & (sample < grid[:, None])[:, None, :]
    y = y.clamp(min=0).clamp(max=size - 1)
    low = y.floor()
    slots = most + 1 if isinstance(size, Tensor) else min(most + 1, size)
    taps = _shared_taps(y, low, live, size, slots if adaptive else 2 * most)
    if not adaptive:
        near = (bin_size.abs() <= grid)[:, None, None]
        # two taps per sample
        position = torch.stack((low, (low + 1).clamp(max=size - 1)), -1).flatten(-2).nan_to_num(0)
        weight = torch.stack((1 - (y - low), y - low), -1).masked_fill(~live.unsqueeze(-1), 0)
        count = (live.any(-1) * (2 * grid[:, None])).to(low.dtype)
        apart = position, weight.flatten(-2), count
        taps = [torch.where(near if shared.dim() == 3 else near[:, :, 0], shared, single)
                for shared, single in zip(taps, apart)]
    position, weight, count = taps
    weight = weight / grid.clamp(min=1)[:, None, None].to(weight.dtype)
    return AxisTaps(position.to(torch.int32), weight, count.to(torch.int64))


def both_axes(starts: tuple[Tensor, Tensor], sizes: tuple[Tensor, Tensor], grid: Tensor,
              most: int, bins: int, lengths: Sequence[int], adaptive: bool
              ) -> tuple[AxisTaps, AxisTaps]:
    """Compute :func:`axis_taps` of y and x together; both have the same number of bins."""
    # not a tensor of the host, whose copy the host would wait for
    length = torch.cat([torch.full_like(start, length) for start, length in zip(starts, lengths)])
    taps = axis_taps(torch.cat(starts), torch.cat(sizes), grid.flatten(), most, bins,
                     length[:, None, None], adaptive)
    ys, xs = zip(*(part.chunk(2) for part in taps))
    return AxisTaps(*ys), AxisTaps(*xs)


def _shared_taps(y: Tensor, low: Tensor, live: Tensor, size: int | Tensor,
                 slots: int) -> list[Tensor]:
    """Return a tap per pixel that a bin touches; its weight is a sum of triangular functions."""
    outside = torch.where(live, low, size)
    base = outside.amin(-1) if y.shape[-1] else low.new_zeros(low.shape[:2])
    top = low.masked_fill(~live, -1).amax(-1) if y.shape[-1] else low.new_full(low.shape[:2], -1)
    position = base[:, :, None] + torch.arange(slots, dtype=y.dtype, device=y.device)
    weight = y.new_zeros(position.shape)
    if y.is_cuda and position.numel() * y.shape[-1] <= MOST_HATS:
        hat = (1 - (y[..., None] - position[:, :, None]).abs_()).clamp_(min=0)
        weight = hat.masked_fill_(~live[..., None], 0).sum(2)
    else:
        for i in range(y.shape[-1]):
            hat = (1 - (y[:, :, i, None] - position).abs()).clamp_(min=0)
            weight += hat.masked_fill_(~live[:, :, i, None], 0)
    end = size[:, :, 0] if isinstance(size, Tensor) else size
    count = (top + 2).clamp(max=end) - base
    return [position, weight, count.masked_fill(top < 0, 0)]


class Taps(NamedTuple):
    """Bags of taps: row, weight and bag (E,), and where each bag begins (B + 1,); int32."""

    row: Tensor
    weight: Tensor
    bag: Tensor
    starts: Tensor


def product_taps(image: Tensor, ys: AxisTaps, xs: AxisTaps, height: int, width: int) -> Taps:
    """Return taps of 2-D filters: products of the filters ``ys`` (PH) and ``xs`` (PW).

    A bag is a bin (K, PH, PW); a *line* is the part of a bin in one row of pixels. ``image`` is
    (K,).
    """
    (k, ph), pw = ys.number.shape, xs.number.shape[1]
    lines_of = ys.number[:, :, None].expand(k, ph, pw).reshape(-1)
    line_ends = lines_of.cumsum(0)
    # both totals with one wait; there may be no bins
    taps = (ys.number.sum(1) * xs.number.sum(1)).sum()
    lines, total = torch.stack((line_ends[-1], taps)).tolist() if len(line_ends) else (0, 0)
    line_bag = torch.repeat_interleave(lines_of, output_size=lines)
    roi = torch.div(line_bag, ph * pw, rounding_mode='floor')
    bin_row = torch.div(line_bag, pw, rounding_mode='floor')  # over all RoIs
    y_slot = _ordinal(line_bag, line_ends - lines_of)
    y_at = bin_row * ys.weight.shape[2] + y_slot
    line_row = (image.index_select(0, roi) * height
                + ys.position.flatten().index_select(0, y_at)) * width
    line_weight = ys.weight.flatten().index_select(0, y_at)
    column = (roi - bin_row) * pw + line_bag
    taps_of = xs.number.flatten().index_select(0, column)
    line = torch.repeat_interleave(taps_of, output_size=total)
    tap_ends = taps_of.cumsum(0)
    x_at = _ordinal(line, tap_ends - taps_of - column * xs.weight.shape[2])
    row = line_row.index_select(0, line) + xs.position.flatten().index_select(0, x_at)
    weight = line_weight.index_select(0, line) * xs.weight.flatten().index_select(0, x_at)
    nothing = line_ends.new_zeros(1)
    starts = torch.cat((nothing, tap_ends)).index_select(0, torch.cat((nothing, line_ends)))
    return Taps(row.to(torch.int32), weight, line_bag.index_select(0, line).to(torch.int32),
                starts.to(torch.int32))


def plane_taps(base: Tensor, taps: AxisTaps) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, weights (E,) and starts of bags (K, C, P) of a filter per plane and bin.

    ``base`` (K, C) is the row of position 0 of each plane; ``taps`` is of one axis, (K, P, T).
    """
    shape = (*base.shape, *taps.weight.shape[1:])
    slot = torch.arange(shape[3], device=base.device)
    real = (slot < taps.number[:, None, :, None]).expand(shape)
    row = base[:, :, None, None] + taps.position[:, None]
    counts = taps.number[:, None].expand(shape[:3]).flatten().cumsum(0)
    return (row[real].to(torch.int32), taps.weight[:, None].expand(shape)[real],
            torch.cat((counts.new_zeros(1), counts)).to(torch.int32))


def _ordinal(owner: Tensor, first: Tensor) -> Tensor:
    """Return the index of each element within its owner; ``first`` are the owners' first ones."""
    return torch.arange(len(owner), device=owner.device) - first.index_select(0, owner)


def bin_samples(grid_y: Tensor, grid_x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """List the samples of bins that have ``grid_y * grid_x`` (B,) of them each, in mmcv's order.

    Of S samples: the bin, and the row and column within the bin, (S,) int64 each; and the first
    sample of each bin (B + 1,).
    """
    counts = grid_y * grid_x
    starts = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    total = int(starts[-1])
    owner = torch.repeat_interleave(counts, output_size=total)
    ordinal = _ordinal(owner, starts)
    columns = grid_x.index_select(0, owner)
    iy = torch.div(ordinal, columns, rounding_mode='floor')
    return owner, iy, ordinal - iy * columns, starts
