"""Regions of interest (RoIs): checks, edges, and the form that RoIAlign works on."""
from __future__ import annotations

from typing import NamedTuple, Tuple, Union

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import describe, require, require_tensor

__all__ = ['LOWEST', 'Rois', 'check_rois', 'edges_of']

# The maximum of no samples, and the initial one: mmcv's -FLT_MAX.
LOWEST = torch.finfo(torch.float32).min


class Rois(NamedTuple):
    """RoIs in pixels of the map: where they begin and the size of their bins, (K,) each."""

    image: Tensor
    y: Tensor
    x: Tensor
    bin_h: Tensor
    bin_w: Tensor
    grid: sampling.Grid

    def select(self, which: Union[slice, Tensor]) -> Rois:
        grid = self.grid._replace(y=self.grid.y[which], x=self.grid.x[which])
        return Rois(*(t[which] for t in self[:5]), grid)


def check_rois(operator: str, feature: Tensor, rois: Tensor, columns: int) -> Tensor:
    """Check RoIs, which mmcv's kernels do not, and return their image indices, (K,) int64.

    Raises RuntimeError if shapes or dtypes do not fit, or a RoI names an image not in the batch.
    """
    require_tensor(operator, 'input', feature, (None,) * 4)
    require_tensor(operator, 'rois', rois, (None, columns), (feature.dtype,))
    image = rois[:, 0].nan_to_num(-1).to(torch.int64)
    if image.numel():
        low, high = torch.stack(image.aminmax()).tolist()
        there = f'images 0 to {len(feature) - 1}' if len(feature) else 'no images'
        require(low >= 0 and high < len(feature), operator,
                f'rois name images {low} to {high}, but input {describe(feature)} has {there}')
        require(feature.shape[2] > 0 and feature.shape[3] > 0, operator,
                f'{len(rois)} rois on input {describe(feature)}, which has no pixels')
    return image


def edges_of(rois: Tensor, bins: Tuple[int, int], scale: float, aligned: bool
             ) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """First y and x of each RoI, and height and width of its bins, in pixels of the map."""
    edges = rois[:, 1:].to(gather.compute_dtype(rois)) * gather.single(scale)
    edges = edges - (0.5 if aligned else 0.)
    x, y, x2, y2 = edges.unbind(1)
    width, height = x2 - x, y2 - y
    if not aligned:
        width, height = width.clamp(min=1), height.clamp(min=1)
    return y, x, height / bins[0], width / bins[1]
