"""Point sets and polygons: convex_iou, convex_giou, min_area_polygons, points_in_polygons, and the
rotated filters of oriented detectors.

Semantics of mmcv 2.1.0 (csrc/common/cuda/convex_iou_cuda_kernel.cuh, min_area_polygons_cuda.cuh,
points_in_polygons_cuda_kernel.cuh, csrc/pytorch/cpu/active_rotated_filter.cpp); all but the last
exist on CUDA only there.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_shape, require_tensor
from .convex import clip_area, hull, shoelace
from .overlaps import TILE

# Pairs of polygons at a time, by device: each takes a few kilobytes of temporaries. On a CPU torch
# does not use several threads for so few angles, which would change their last bits.
_PAIRS = {'cpu': 1 << 11, 'cuda': 1 << 17}
_POINTS = 9
_CORNERS = 4
# mmcv's PI, a float32 constant below pi by 5e-8, and its half.
_PI = float(torch.tensor(3.1415926))
_QUARTER = _PI / 2


def _check(operator: str, pointsets: Tensor, polygons: Tensor, out: Tensor,
           shape: tuple[int, ...]) -> None:
    require_shape(operator, 'pointsets', pointsets, (None, 2 * _POINTS))
    require_shape(operator, 'polygons', polygons, (None, 2 * _CORNERS))
    for name, tensor in (('pointsets', pointsets), ('polygons', polygons), ('result', out)):
        require_dtype(operator, name, tensor)
        require(tensor.dtype == pointsets.dtype, operator,
                f'{name} must have the dtype of pointsets {describe(pointsets)}, '
                f'got {describe(tensor)}')
    require(tuple(out.shape) == shape, operator,
            f'the result must have shape {shape}, got {describe(out)}')


def _corners(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Convert (N, 2K) x1 y1 x2 y2 ... to float64 x, y (K, N)."""
    columns = tensor.detach().double().T
    return columns[0::2].contiguous(), columns[1::2].contiguous()


def _meet(x: Tensor, y: Tensor, qx: Tensor, qy: Tensor) -> Tensor:
    """Return areas (P,) of the intersections of convex polygons (K, P) with quadrilaterals (4, P).

    A quadrilateral is the sum of two triangles, signed by their orientation; for one that is not
    convex this is a difference.
    """
    total = 0
    for corners in ([0, 1, 2], [0, 2, 3]):
        tx, ty = qx[corners], qy[corners]
        area = shoelace(tx, ty)
        flip = (area < 0)[None]
        tx, ty = torch.where(flip, tx.flip(0), tx), torch.where(flip, ty.flip(0), ty)
        total = total + area.sign() * clip_area(x, y, tx, ty)
    return torch.where(shoelace(qx, qy) < 0, -total, total)


def _hull_of(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    index = hull(x, y)[0]
    return x.gather(0, index), y.gather(0, index)


def convex_iou(pointsets: Tensor, polygons: Tensor, ious: Tensor) -> None:
    """Write the overlaps (N, K) of the convex hulls of point sets with quadrilaterals to ``ious``.

    ``pointsets`` is (N, 18), nine points x1 y1 ... x9 y9, and ``polygons`` (K, 8), x1 y1 ... x4 y4.
    Computed in float64.
    """
    sets, quads = len(pointsets), len(polygons)
    _check('convex_iou', pointsets, polygons, ious, (sets, quads))
    if ious.numel() == 0:
        return
    x, y = _hull_of(*_corners(pointsets))
    qx, qy = _corners(polygons)
    flat = ious.view(-1)
    for part in torch.arange(len(flat), device=ious.device).split(_PAIRS[ious.device.type]):
        first, second = part.div(quads, rounding_mode='floor'), part % quads
        a, b = (x[:, first], y[:, first]), (qx[:, second], qy[:, second])
        # move to the origin, for the precision of products
        middle_x, middle_y = b[0].mean(0), b[1].mean(0)
        a, b = ((px - middle_x, py - middle_y) for px, py in (a, b))
        inter = _meet(*a, *b)
        union = shoelace(*a).abs() + shoelace(*b).abs() - inter
        flat[part] = (inter / union).to(ious.dtype)


def convex_giou(pointsets: Tensor, polygons: Tensor, output: Tensor) -> None:
    """Write the generalized overlap of each point set's hull with its polygon, and its gradient.

    ``pointsets`` is (N, 18), ``polygons`` (N, 8), and ``output`` (N, 19): the gradient by the
    points, then the overlap. Computed in float64.
    """
    operator = 'convex_giou'
    _check(operator, pointsets, polygons, output, (len(pointsets), 2 * _POINTS + 1))
    require(len(pointsets) == len(polygons), operator, 'point sets and polygons come in pairs: '
            f'pointsets {describe(pointsets)}, polygons {describe(polygons)}')
    step = _PAIRS[output.device.type]
    for points, quads, out in zip(*(t.split(step) for t in (pointsets, polygons, output))):
        if len(points) == 0:
            continue
        qx, qy = _corners(quads)
        middle_x, middle_y = qx.mean(0), qy.mean(0)
        with torch.enable_grad():
            x, y = ((value - middle).requires_grad_() for value, middle in
                    zip(_corners(points), (middle_x, middle_y)))
            qx, qy = qx - middle_x, qy - middle_y
            ax, ay = _hull_of(x, y)
            inter = _meet(ax, ay, qx, qy)
            union = shoelace(ax, ay).abs() + shoelace(qx, qy).abs() - inter
            around = shoelace(*_hull_of(torch.cat([ax, qx]), torch.cat([ay, qy]))).abs()
            giou = inter / union - (around - union) / around
            gradient = torch.autograd.grad(giou.sum(), (x, y))
        out[:, :-1] = torch.stack(gradient, -1).transpose(0, 1).flatten(1).to(out.dtype)
        out[:, -1] = giou.detach().to(out.dtype)


def min_area_polygons(pointsets: Tensor, polygons: Tensor) -> None:
    """Write the smallest rectangles around ``pointsets`` (N, 18) to ``polygons`` (N, 8).

    One side lies along an edge of the hull; of equal areas the first edge's is taken, counted from
    the lowest (then leftmost) point. Computed in float32, as in mmcv.
    """
    operator = 'min_area_polygons'
    _check(operator, pointsets, polygons, polygons, (len(pointsets), 2 * _CORNERS))
    step = _PAIRS[polygons.device.type]
    for points, out in zip(pointsets.detach().float().split(step), polygons.split(step)):
        if len(points) == 0:
            continue
        index, number = hull(*_corners(points))
        x, y = (value.float().gather(0, index) for value in _corners(points))
        edges = torch.arange(_POINTS, device=x.device)[:, None] < number.clamp(min=1)
        # angles of the edges modulo a right angle, as mmcv reduces them
        angle = torch.atan2((y.roll(-1, 0) - y).double(), (x.roll(-1, 0) - x).double()).float()
        above = torch.fmod(angle.double(), _QUARTER).float()
        quarters = (angle / _QUARTER - 1).trunc()
        angle = torch.where(angle >= 0, above, angle - quarters * _QUARTER)
        cos, sin = angle.cos(), angle.sin()
        u = cos[:, None] * x + sin[:, None] * y
        v = -sin[:, None] * x + cos[:, None] * y
        low_u, high_u, low_v, high_v = u.amin(1), u.amax(1), v.amin(1), v.amax(1)
        area = torch.where(edges, (high_u - low_u) * (high_v - low_v), torch.inf)
        best = area.argmin(0)[None]
        cos, sin, low_u, high_u, low_v, high_v = (
            value.gather(0, best)[0] for value in (cos, sin, low_u, high_u, low_v, high_v))
        corners = ((high_u, low_v), (low_u, low_v), (low_u, high_v), (high_u, high_v))
        out.copy_(torch.stack([value for a, b in corners
                               for value in (a * cos - b * sin, a * sin + b * cos)], 1))


def points_in_polygons_forward(points: Tensor, polygons: Tensor, output: Tensor) -> None:
    """Write to (B, M) 1 where a point (B, 2) lies in a quadrilateral (M, 8), else 0.

    Crossed edges are counted. Points on the boundary are treated as in mmcv: the count stops at the
    edge that they lie on.
    """
    operator = 'points_in_polygons_forward'
    require_shape(operator, 'points', points, (None, 2))
    require_shape(operator, 'polygons', polygons, (None, 2 * _CORNERS))
    require(points.dtype == polygons.dtype == output.dtype, operator,
            f'dtypes differ: points {describe(points)}, polygons {describe(polygons)}, '
            f'output {describe(output)}')
    require_shape(operator, 'output', output, (len(points), len(polygons)))
    corners = polygons.detach().float().T.contiguous().view(_CORNERS, 2, -1)
    step = max(1, TILE[output.device.type] // max(1, len(polygons)))
    for part, out in zip(points.detach().float().split(step), output.split(step)):
        px, py = part[:, :1], part[:, 1:]
        odd = torch.zeros(len(part), len(polygons), dtype=torch.bool, device=part.device)
        over = torch.zeros_like(odd)
        for here in range(_CORNERS):
            (sx, sy), (tx, ty) = corners[here], corners[here - 1]
            beside = (py < torch.minimum(sy, ty)) | (py > torch.maximum(sy, ty))
            corner = ((sx == px) & (sy == py)) | ((tx == px) & (ty == py))
            spans = ((sy < py) & (ty >= py)) | ((sy >= py) & (ty < py))
            x = sx + (py - sy) * (tx - sx) / (ty - sy)
            over |= ~beside & (corner | (spans & (x == px)))
            odd ^= ~over & ~beside & spans & (x > px)
        out.copy_(odd)


def _filter_shape(operator: str, indices: Tensor, outer: Tensor, inner: Tensor) -> tuple[int, int]:
    """Entries and rotations of ``indices`` (O, H, W, R), if the two filter tensors fit them."""
    require_tensor(operator, 'indices', indices, (None, None, None, None), (torch.int32,))
    require_dtype(operator, 'filters', outer)
    orientations, height, width, rotations = indices.shape
    fits = (inner.dim() == 5 and tuple(inner.shape[2:]) == (orientations, height, width)
            and tuple(outer.shape) == (inner.shape[0] * rotations, inner.shape[1] * orientations,
                                       height, width) and outer.dtype == inner.dtype)
    require(fits, operator, 'shapes do not match: filters (O, I, o, H, W) and (O * r, I * o, H, W) '
            f'with indices (o, H, W, r), got {describe(inner)}, {describe(outer)}, '
            f'{describe(indices)}')
    return orientations * height * width, rotations


def active_rotated_filter_forward(input: Tensor, indices: Tensor, output: Tensor) -> None:
    """Write every rotation of filters ``input`` (O, I, o, H, W) to ``output`` (O * r, I * o, H, W).

    ``indices`` (o, H, W, r) int32 are one-based: the target of each entry in each rotation. Entries
    that are no target keep their values; of several sources of a target the last one is taken.
    """
    entries, rotations = _filter_shape('active_rotated_filter_forward', indices, output, input)
    goes = indices.view(1, entries, rotations).long() - 1
    arrives = goes == torch.arange(entries, device=goes.device)[:, None, None]
    number = torch.arange(1, entries + 1, device=goes.device)[:, None]
    source = (arrives * number).amax(1).T - 1
    outputs, inputs = input.shape[:2]
    values = input.detach().reshape(outputs * inputs, entries)
    table = output.view(outputs, rotations, inputs, entries)
    # S2A-Net's indices are permutations, so every entry is a target
    whole = not source.is_cuda and bool((source >= 0).all())
    for rotation in range(rotations):
        picked = values.index_select(1, source[rotation].clamp(min=0))
        picked = picked.view(outputs, inputs, entries)
        table[:, rotation] = picked if whole else torch.where(
            source[rotation] >= 0, picked, table[:, rotation])


def active_rotated_filter_backward(grad_out: Tensor, indices: Tensor, grad_in: Tensor) -> None:
    """Write the sum over rotations, in their order, of ``grad_out`` to ``grad_in``."""
    entries, rotations = _filter_shape('active_rotated_filter_backward', indices, grad_out, grad_in)
    goes = indices.view(entries, rotations).long() - 1
    outputs, inputs = grad_in.shape[:2]
    table = grad_out.detach().reshape(outputs, rotations, inputs, entries)
    total = torch.zeros(outputs, inputs, entries, dtype=grad_in.dtype, device=grad_in.device)
    for rotation in range(rotations):
        total += table[:, rotation].index_select(2, goes[:, rotation])
    grad_in.copy_(total.view_as(grad_in))
