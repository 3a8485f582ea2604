"""Operators on point clouds: voxelization, and points in boxes.

Semantics of mmcv 2.1.0 (csrc/pytorch/cpu/voxelization.cpp and points_in_boxes.cpp), on any device.
Nothing is added up: points are counted and copied in their order.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather
from ..contract import describe, require, require_dtype, require_shape, require_tensor
from .box_iou import TILE


def _grid_of(operator: str, voxel_size: Tensor, coors_range: Tensor, dims: int) -> list[int]:
    """Return the number of voxels along each dimension, rounded half away from zero as in C."""
    require_tensor(operator, 'voxel_size', voxel_size, (dims,), (torch.float32,))
    require_tensor(operator, 'coors_range', coors_range, (2 * dims,), (torch.float32,))
    require(bool((voxel_size > 0).all()), operator,
            f'voxel_size must be positive, got {voxel_size.tolist()}')
    extent = (coors_range[dims:] - coors_range[:dims]) / voxel_size
    count = (extent.double() + 0.5).floor()
    require(bool((count > 0).all()), operator,
            f'coors_range {coors_range.tolist()} holds no voxel of {voxel_size.tolist()}')
    return [int(number) for number in count.tolist()]


def _voxel_of(operator: str, points: Tensor, voxel_size: Tensor, coors_range: Tensor,
              grid: list[int]) -> tuple[Tensor, Tensor]:
    """Return the voxel of each point (N, D) int64, in the order of ``points``, and whether it has.

    A point out of range, or at NaN, has none; its entry is then no voxel.
    """
    require_shape(operator, 'points', points, (None, None))
    require_dtype(operator, 'points', points)
    dims = len(grid)
    require(points.shape[1] >= dims, operator,
            f'points must have at least {dims} columns, got {describe(points)}')
    at = points.detach()[:, :dims].to(gather.COMPUTE[points.dtype])
    at = ((at - coors_range[:dims].to(at)) / voxel_size.to(at)).floor()
    inside = ((at >= 0) & (at < at.new_tensor(grid))).all(1)
    return at.masked_fill(~inside[:, None], 0).to(torch.int64), inside


def dynamic_voxelize_forward(points: Tensor, voxel_size: Tensor, coors_range: Tensor,
                             coors: Tensor, NDim: int = 3) -> None:
    """Write the voxel of each point to ``coors`` (N, NDim) int32, last dimension first; or -1.

    Args:
        points: (N, C), the first ``NDim`` columns are the position.
        voxel_size: (NDim,) float32, on the CPU.
        coors_range: (2 * NDim,) float32, the lowest position, then the highest; on the CPU.
    """
    operator = 'dynamic_voxelize_forward'
    grid = _grid_of(operator, voxel_size, coors_range, NDim)
    require_tensor(operator, 'coors', coors, (len(points), NDim), (torch.int32,))
    voxel, inside = _voxel_of(operator, points, voxel_size, coors_range, grid)
    coors.copy_(voxel.flip(1).masked_fill(~inside[:, None], -1))


def hard_voxelize_forward(points: Tensor, voxel_size: Tensor, coors_range: Tensor, voxels: Tensor,
                          coors: Tensor, num_points_per_voxel: Tensor, voxel_num: Tensor,
                          max_points: int, max_voxels: int, NDim: int = 3,
                          deterministic: bool = True) -> None:
    """Sort points into voxels, which are numbered in the order of their first points.

    Points of voxels beyond ``max_voxels``, and those beyond ``max_points`` in a voxel, are dropped;
    -1 stands for no limit. ``deterministic`` has no effect: the order is always that of the points.

    Args:
        points, voxel_size, coors_range: as in :func:`dynamic_voxelize_forward`, with NDim 3.
        voxels: (V, P, C), gets the points of each voxel; what no point fills is not changed.
        coors: (V, 3) int32, gets the voxels, z first.
        num_points_per_voxel: (V,) int32.
        voxel_num: () int64, gets the number of voxels.
    """
    operator = 'hard_voxelize_forward'
    require(NDim == 3, operator, f'NDim must be 3, got {NDim}')
    grid = _grid_of(operator, voxel_size, coors_range, NDim)
    voxel, inside = _voxel_of(operator, points, voxel_size, coors_range, grid)
    require_tensor(operator, 'voxels', voxels, (None, None, points.shape[1]), (points.dtype,))
    room, depth = voxels.shape[:2]
    require_tensor(operator, 'coors', coors, (room, NDim), (torch.int32,))
    require_tensor(operator, 'num_points_per_voxel', num_points_per_voxel, (room,), (torch.int32,))
    require(max_voxels <= room and max_points <= depth, operator,
            f'voxels {describe(voxels)} do not hold max_voxels {max_voxels} of max_points '
            f'{max_points}')
    number = inside.nonzero()[:, 0]
    x, y, z = voxel.index_select(0, number).unbind(1)
    cell, order = torch.sort((z * grid[1] + y) * grid[0] + x, stable=True)
    _, run, count = torch.unique_consecutive(cell, return_inverse=True, return_counts=True)
    begin = count.cumsum(0) - count
    first = order.index_select(0, begin)  # of each voxel; the sort is stable
    by_first = torch.sort(first).indices
    name = torch.empty_like(by_first)
    name[by_first] = torch.arange(len(name), device=name.device)
    total = len(name) if max_voxels == -1 else min(len(name), max_voxels)
    most = count.amax().item() if max_points == -1 and len(count) else max_points
    require(total <= room and most <= depth, operator,
            f'{total} voxels of up to {most} points do not fit voxels {describe(voxels)}')
    owner = name.index_select(0, run)
    slot = torch.arange(len(run), device=run.device) - begin.index_select(0, run)
    kept = (owner < total) & (slot < most)
    owner, slot, source = owner[kept], slot[kept], number.index_select(0, order[kept])
    # no slot occurs twice, so nothing is written twice
    voxels.view(room * depth, -1).index_copy_(0, owner * depth + slot,
                                              points.detach().index_select(0, source))
    lead = number.index_select(0, first.index_select(0, by_first[:total]))
    coors[:total] = voxel.index_select(0, lead).flip(1).to(coors.dtype)
    filled = count.index_select(0, by_first[:total]).clamp(max=most)
    num_points_per_voxel[:total] = filled.to(num_points_per_voxel.dtype)
    voxel_num.fill_(total)


def points_in_boxes_cpu_forward(boxes_tensor: Tensor, pts_tensor: Tensor,
                                pts_indices_tensor: Tensor) -> None:
    """Write to (T, M) int32 whether box t holds point m, 1 or 0; computed in float32.

    Args:
        boxes_tensor: (T, 7) float32 x, y, z, sizes along x, y and z, rotation around z in radians;
            z is that of the bottom.
        pts_tensor: (M, 3) float32 x, y, z.
    """
    operator = 'points_in_boxes_cpu_forward'
    require_tensor(operator, 'boxes', boxes_tensor, (None, 7), (torch.float32,))
    require_tensor(operator, 'points', pts_tensor, (None, 3), (torch.float32,))
    boxes_count, points_count = len(boxes_tensor), len(pts_tensor)
    require_tensor(operator, 'indices', pts_indices_tensor, (boxes_count, points_count),
                   (torch.int32,))
    px, py, pz = pts_tensor.detach().T
    step = max(1, TILE[px.device.type] // max(1, points_count))
    for part in gather.slices(boxes_count, step):
        x, y, z, size_x, size_y, size_z, angle = boxes_tensor.detach()[part].T[:, :, None]
        # rounded once, so that the last bit of a cosine does not depend on the instruction set
        cos, sin = (-angle.double()).cos().float(), (-angle.double()).sin().float()
        dx, dy = px - x, py - y
        along, across = dx * cos + dy * -sin, dx * sin + dy * cos
        middle = (z.double() + size_z.double() / 2).float()
        inside = ((pz - middle).abs() <= size_z / 2) | (pz - middle).isnan() | size_z.isnan()
        inside &= (along > -size_x / 2) & (along < size_x / 2)
        inside &= (across > -size_y / 2) & (across < size_y / 2)
        pts_indices_tensor[part] = inside.to(torch.int32)
