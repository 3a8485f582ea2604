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

    def select(self, which: slice) -> Rois:
        return Rois(*(column[..., which] for column in self))


def check_rois(operator: str, feature: Tensor, rois: Tensor) -> Tensor:
    """Check RoIs, which mmcv's kernels do not, and return their image indices, (K,) int64.

    Raises RuntimeError if shapes or dtypes do not fit, or a RoI names an image not in the batch.
    """
    image = images_of(operator, feature, rois)
    if image.numel():
        check_images(operator, feature, torch.stack(image.aminmax()).cpu(), len(image))
    return image


def images_of(operator: str, feature: Tensor, rois: Tensor) -> Tensor:
    """Return unchecked image indices of RoIs: :func:`check_rois` without waiting for a device."""
    require_tensor(operator, 'input', feature, (None,) * 4)
    require_tensor(operator, 'rois', rois, (None, 5), (feature.dtype,))
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


def pool(feature: Tensor, output: Tensor, runs: Iterable[tuple[int, int]], taps_of: TapsOf) -> None:
    """Fill ``output`` (K, C, PH, PW) with weighted sums over ``feature`` (N, C, H, W).

    ``runs`` are ranges of RoIs to process together, ``taps_of`` returns the taps of a range.
    """
    source = gather.Source(feature)
    for a, b in runs:
        taps = taps_of(a, b)
        rows, index = source.rows(taps.row)
        gather.put_rows(output[a:b], gather.gather_sum(rows, index, taps.weight, taps.starts))
