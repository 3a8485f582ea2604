"""Chamfer distance of point sets in the plane: to the nearest point of the other set.

Semantics of mmcv 2.1.0 (csrc/common/cuda/chamfer_distance_cuda_kernel.cuh), which has it for CUDA
only. Of equally near points the first is taken. mmcv exchanges the two sizes in its backward; the
gradients here are those of the definition for sets of different sizes too.
"""
from __future__ import annotations

import torch
from torch import Tensor

from .. import gather
from ..contract import describe, require, require_shape, require_tensor


def _check(operator: str, xyz1: Tensor, xyz2: Tensor) -> None:
    require_tensor(operator, 'xyz1', xyz1, (None, None, 2))
    require_tensor(operator, 'xyz2', xyz2, (len(xyz1), None, 2))
    require(xyz1.dtype == xyz2.dtype, operator,
            f'dtypes do not match: {describe(xyz1)}, {describe(xyz2)}')
    require((xyz1.shape[1] > 0) == (xyz2.shape[1] > 0), operator,
            f'one set has no points: {describe(xyz1)}, {describe(xyz2)}')


def _nearest(points: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """Return squared distance (B, N) of each point to the nearest of ``others``, and its index."""
    step = gather.chunk_rows(points.device, max(1, len(points) * others.shape[1]))
    distances, indices = [], []
    for part in points.split(step, 1):
        apart = others[:, None] - part[:, :, None]
        square = apart[..., 0] * apart[..., 0] + apart[..., 1] * apart[..., 1]
        least = square.amin(2, keepdim=True)
        # min() does not promise which of equal values it takes; of a NaN none is equal
        number = torch.arange(others.shape[1], device=points.device)
        index = torch.where(square == least, number, others.shape[1]).amin(2)
        distances.append(least.squeeze(2))
        indices.append(index.clamp_(max=others.shape[1] - 1))
    return torch.cat(distances, 1), torch.cat(indices, 1)


def chamfer_distance_forward(xyz1: Tensor, xyz2: Tensor, dist1: Tensor, dist2: Tensor,
                             idx1: Tensor, idx2: Tensor) -> None:
    """Fill ``dist1`` (B, N) with the squared distances of ``xyz1`` (B, N, 2) to the nearest points
    of ``xyz2`` (B, M, 2), ``idx1`` (B, N) int32 with their indices, and the same from ``xyz2``."""
    operator = 'chamfer_distance_forward'
    _check(operator, xyz1, xyz2)
    dtype = gather.compute_dtype(xyz1)
    one, two = xyz1.detach().to(dtype), xyz2.detach().to(dtype)
    for points, others, distance, index in ((one, two, dist1, idx1), (two, one, dist2, idx2)):
        require_shape(operator, 'dist', distance, tuple(points.shape[:2]))
        require_tensor(operator, 'idx', index, tuple(points.shape[:2]), (torch.int32, ))
        if points.numel():
            found, number = _nearest(points, others)
            distance.copy_(found)
            index.copy_(number)


def chamfer_distance_backward(xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor,
                              graddist1: Tensor, graddist2: Tensor, gradxyz1: Tensor,
                              gradxyz2: Tensor) -> None:
    """Add the gradients of :func:`chamfer_distance_forward` to ``gradxyz1`` and ``gradxyz2``.

    Each point's own distance comes first, then those to which it is nearest, in their order.
    """
    operator = 'chamfer_distance_backward'
    _check(operator, xyz1, xyz2)
    if xyz1.numel() == 0:
        return
    dtype = gather.compute_dtype(xyz1)
    one, two = xyz1.detach().to(dtype), xyz2.detach().to(dtype)
    own_1, to_2 = _slopes(one, two, idx1, graddist1.to(dtype))
    own_2, to_1 = _slopes(two, one, idx2, graddist2.to(dtype))
    gradxyz1.add_((own_1 + to_1).to(gradxyz1.dtype))
    gradxyz2.add_((own_2 + to_2).to(gradxyz2.dtype))


def _slopes(points: Tensor, others: Tensor, index: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """What the distances of ``points`` add to the gradients of these and of the others."""
    batch, count = others.shape[:2]
    flat = (index.long() + torch.arange(batch, device=index.device)[:, None] * count).view(-1, 1)
    nearest = others.reshape(-1, 2).index_select(0, flat.view(-1)).view(points.shape)
    slope = (grad * 2).unsqueeze(2) * (points - nearest)
    scattered = gather.scatter_sum(-slope.reshape(-1, 2).contiguous(), flat,
                                   torch.ones_like(flat, dtype=slope.dtype), batch * count,
                                   padded=False)
    return slope, scattered.view(others.shape)
