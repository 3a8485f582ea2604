"""Regions of interest (RoIs): checks, edges, and the form that RoIAlign works on."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import describe, require, require_tensor

# The maximum of no samples, and the initial one: mmcv's -FLT_MAX.
LOWEST = torch.finfo(torch.float32).min
# The taps of a range of RoIs, given where it begins and ends.
TapsOf = Callable[[int, int], sampling.Taps]


class Rois(NamedTuple):
    """RoIs in pixels of the map: where they begin and the size of their bins, (K,) each.

    ``grid`` (2, K) is that of :func:`mmrepro.ops.sampling.samples_per_bin`.
    """

    image: Tensor
    y: Tensor
    x: Tensor
    bin_h: Tensor
    bin_w: Tensor
    grid: Tensor

    def select(self, which: slice | Tensor) -> Rois:
        return Rois(*(column[..., which] for column in self))


def check_rois(operator: str, feature: Tensor, rois: Tensor, width: int = 5) -> Tensor:
    """Check RoIs (K, ``width``), which mmcv's kernels do not; return image indices, (K,) int64.

    Raises RuntimeError if shapes or dtypes do not fit, or a RoI names an image not in the batch.
    """
    image = images_of(operator, feature, rois, width)
    if image.numel():
        check_images(operator, feature, torch.stack(image.aminmax()).cpu(), len(image))
    return image


def images_of(operator: str, feature: Tensor, rois: Tensor, width: int = 5) -> Tensor:
    """Return unchecked image indices of RoIs: :func:`check_rois` without waiting for a device."""
    require_tensor(operator, 'input', feature, (None,) * 4)
    require_tensor(operator, 'rois', rois, (None, width), (feature.dtype,))
    return rois[:, 0].nan_to_num(-1).to(torch.int64)


def check_images(operator: str, feature: Tensor, image: Tensor, count: int) -> None:
    """Check ``image`` indices, on the host, of some of ``count`` RoIs; see :func:`check_rois`."""
    if not image.numel():
        return
    low, high = (int(bound) for bound in image.aminmax())
    there = f'images 0 to {len(feature) - 1}' if len(feature) else 'no images'
    require(low >= 0 and high < len(feature), operator,
            f'rois name images {low} to {high}, but input {describe(feature)} has {there}')
    require(feature.shape[2] > 0 and feature.shape[3] > 0, operator,
            f'{count} rois on input {describe(feature)}, which has no pixels')


def edges_of(rois: Tensor, bins: tuple[int, int], scale: float, aligned: bool
             ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return first y and x of each RoI, and height and width of its bins, in pixels of the map."""
    edges = rois[:, 1:].to(gather.compute_dtype(rois)) * gather.single(scale)
    edges = edges - (0.5 if aligned else 0.)
    x, y, x2, y2 = edges.unbind(1)
    width, height = x2 - x, y2 - y
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    return y, x, height / bins[0], width / bins[1]


def keep_greater(best: Tensor, winner: Tensor, value: Tensor, mark: int | Tensor) -> None:
    """Replace elements of ``best`` by greater ones of ``value``, and of ``winner`` by ``mark``.

    ``value`` is (B, C), for the first B rows of both, and changed: the first of equal values wins,
    and NaN never does. torch.maximum would let NaN win.
    """
    part = slice(0, len(value))
    value.nan_to_num_(nan=LOWEST, posinf=float('inf'), neginf=float('-inf'))
    wins = value > best[part]
    torch.maximum(best[part], value, out=best[part])
    if isinstance(mark, int):
        winner[part].masked_fill_(wins, mark)
    else:
        winner[part] = torch.where(wins, mark, winner[part])


def pool(feature: Tensor, output: Tensor, runs: Iterable[tuple[int, int]], taps_of: TapsOf) -> None:
    """Fill ``output`` (K, C, PH, PW) with weighted sums over ``feature`` (N, C, H, W).

    ``runs`` are ranges of RoIs to process together, ``taps_of`` returns the taps of a range.
    """
    source = gather.Source(feature)
    for a, b in runs:
        taps = taps_of(a, b)
        rows, index = source.rows(taps.row)
        gather.put_rows(output[a:b], gather.gather_sum(rows, index, taps.weight, taps.starts))


class SampledBins:
    """Bins that are means of bilinear samples; a subclass gives the positions of the samples.

    Attributes:
        shape: of the features, (N, C, H, W).
        image: (K,) int64, the image of each RoI.
        grid: (2, K), of :func:`mmrepro.ops.sampling.samples_per_bin`.
        bins: number of bins of a RoI along y and x.
    """

    def __init__(self, shape: torch.Size, image: Tensor, grid: Tensor,
                 bins: tuple[int, int]) -> None:
        self.shape, self.image, self.grid, self.bins = shape, image, grid, bins

    def positions(self, roi: Tensor, ph: Tensor, pw: Tensor, iy: Tensor,
                  ix: Tensor) -> tuple[Tensor, Tensor]:
        """Return y and x in pixels of samples (S,), given RoI, bin, and row and column in it."""
        raise NotImplementedError

    def runs(self, *tensors: Tensor) -> list[tuple[int, int]]:
        """Return runs of RoIs to process together; the caller holds ``tensors`` anyway."""
        costs = self.grid.prod(0) * (4 * self.bins[0] * self.bins[1])
        return gather.chunk_by_cost(costs.tolist(), gather.tap_budget(*tensors))

    def samples(self, a: int, b: int) -> tuple[sampling.Taps, Tensor, sampling.Corners]:
        """Return the samples of RoIs ``a`` to ``b``.

        Their taps, four for each, and what these were made from: 1 / samples of the bin (S,), and
        the corners.
        """
        n, _, height, width = self.shape
        per_roi = self.bins[0] * self.bins[1]
        grid_y, grid_x = self.grid[:, a:b].repeat_interleave(per_roi, 1)
        bag, iy, ix, starts = sampling.bin_samples(grid_y, grid_x)
        roi = torch.div(bag, per_roi, rounding_mode='floor')
        in_roi = bag - roi * per_roi
        ph = torch.div(in_roi, self.bins[1], rounding_mode='floor')
        pw, roi = in_roi - ph * self.bins[1], roi + a
        y, x = self.positions(roi, ph, pw, iy, ix)
        corners = sampling.clamped_corners(y, x, height, width)
        base = (self.image.index_select(0, roi) * (height * width)).unsqueeze(-1)
        row = torch.where(corners.live, corners.row + base, n * height * width).to(torch.int32)
        share = (1 / (grid_y * grid_x).to(y.dtype)).index_select(0, bag)
        taps = sampling.Taps(row.flatten(), (corners.weight * share.unsqueeze(-1)).flatten(),
                             bag.to(torch.int32).repeat_interleave(4), (starts * 4).to(torch.int32))
        return taps, share, corners

    def mean(self, feature: Tensor, output: Tensor) -> None:
        """Fill ``output`` (K, C, PH, PW) with the means over ``feature`` (N, C, H, W)."""
        if output.numel():
            pool(feature, output, self.runs(feature, output), lambda a, b: self.samples(a, b)[0])

    def add_gradient(self, grad_output: Tensor, grad_input: Tensor) -> None:
        """Add the gradient of :meth:`mean` to ``grad_input``."""
        if grad_output.numel() == 0 or grad_input.numel() == 0:
            return
        sink = gather.Sink(grad_input)
        for a, b in self.runs(grad_input, grad_output):
            taps = self.samples(a, b)[0]
            sink.scatter_sum(gather.bags(grad_output[a:b]), taps.row, taps.weight, taps.bag)
        sink.close()
