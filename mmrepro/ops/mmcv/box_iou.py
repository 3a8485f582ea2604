"""Overlaps of boxes: bbox_overlaps, box_iou_rotated, box_iou_quadri, and those of NMS.

Semantics are mmcv 2.1.0's (csrc/pytorch/cpu/bbox_overlaps_cpu.cpp, nms.cpp, common/
box_iou_rotated_utils.hpp). Results are written to the output tensor that mmcv's Python allocates.

Polygons are pairs of tensors (x, y) of shape (K, P): K corners of P polygons. The batch is the last
dimension, so that operations run over contiguous memory. Shapes do not depend on values, so the
code runs on any device.
"""
from __future__ import annotations

from typing import Callable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_shape

# Elements of a temporary matrix, by device: near the L2 cache on a CPU, few launches on CUDA.
TILE = {'cpu': 1 << 16, 'cuda': 1 << 23}
# Pairs of polygons at a time: each takes about a kilobyte of temporaries.
_PAIRS = {'cpu': 1 << 12, 'cuda': 1 << 18}
# mmcv's: boxes of less area overlap nothing.
_NO_AREA = 1e-14
# Points closer than this share of a set's extent are one point. It is about a thousand times the
# rounding of float64 and a thousandth of that of float32.
_GRAIN = 1e-11


def columns(boxes: Tensor, offset: int) -> Tensor:
    """Return x1, y1, x2, y2, area (5, N) of boxes (N, 4), whose sides are longer by ``offset``."""
    cols = boxes.new_empty((5, len(boxes)))
    cols[:4] = boxes.T
    size = (cols[2:4] - cols[:2]).add_(offset)
    torch.mul(size[0], size[1], out=cols[4])
    return cols


def overlaps(a: Tensor, b: Tensor, offset: int, memory: Tensor | None = None) -> Tensor:
    """Return intersection over union of columns (5, ...) in float32, broadcast against each other.

    The order of operations is that of mmcv's CPU kernel, and so are the bits. The result is the
    first of ``memory`` (3, ...), if that is given.
    """
    inter, height, other = memory if memory is not None else (None, None, None)
    other = torch.maximum(a[0], b[0], out=other)
    inter = torch.minimum(a[2], b[2], out=inter).sub_(other)
    height = torch.minimum(a[3], b[3], out=height).sub_(torch.maximum(a[1], b[1], out=other))
    if offset:
        inter.add_(offset)
        height.add_(offset)
    inter.clamp_(min=0).mul_(height.clamp_(min=0))
    return inter.div_(torch.add(a[4], b[4], out=other).sub_(inter))


def host_overlaps(a: np.ndarray, b: np.ndarray, offset: int) -> np.ndarray:
    """Compute :func:`overlaps` of arrays, whose calls take less time than those of tensors."""
    meet = np.minimum(a[2:4], b[2:4])
    meet -= np.maximum(a[:2], b[:2])
    if offset:
        meet += np.float32(offset)
    # NumPy compares with arrays faster than with numbers
    np.maximum(meet, np.zeros(meet.shape[-1], np.float32), out=meet)
    inter: np.ndarray = np.multiply(meet[0], meet[1], out=meet[0])
    union = np.add(a[4], b[4], out=meet[1])
    union -= inter
    np.divide(inter, union, out=inter)
    return inter


def exceeds(a: Tensor, b: Tensor, threshold: float, offset: int, equal: bool = False) -> Tensor:
    """Whether :func:`overlaps` exceed ``threshold`` (or reach it, if ``equal``); NaN does not."""
    overlap = overlaps(a, b, offset)
    if overlap.is_cuda:
        return overlap >= threshold if equal else overlap > threshold
    # NumPy compares floats six times faster than torch
    compare = np.greater_equal if equal else np.greater
    return torch.from_numpy(compare(overlap.numpy(), np.float32(threshold)))


def _check_pair(operator: str, boxes1: Tensor, boxes2: Tensor, ious: Tensor, width: int,
                aligned: bool) -> None:
    require_shape(operator, 'boxes1', boxes1, (None, width))
    require_shape(operator, 'boxes2', boxes2, (None, width))
    rows, cols = len(boxes1), len(boxes2)
    # format messages only when needed: that takes longer than the overlaps of a few boxes
    if aligned and rows != cols:
        require(False, operator, 'aligned boxes come in pairs: '
                f'boxes1 {describe(boxes1)}, boxes2 {describe(boxes2)}')
    if ious.numel() != (rows if aligned else rows * cols):
        require(False, operator, f'ious {describe(ious)} does not hold {rows} x {cols} overlaps '
                                 f'(aligned={aligned})')


def _fits_numpy(boxes: Tensor) -> bool:
    return not (boxes.is_cuda or boxes.dtype == torch.bfloat16
                or boxes.requires_grad and torch.is_grad_enabled())


def _host_overlap(a: np.ndarray, b: np.ndarray, mode: int, offset: int) -> np.ndarray:
    """Compute :func:`_overlap` of (4, ...) arrays x1, y1, x2, y2, faster than torch's calls."""
    with np.errstate(all='ignore'):
        areas = []
        for box in (a, b):
            size = box[2:] - box[:2]
            size += box.dtype.type(offset)
            areas.append(size[0] * size[1])
        size = np.minimum(a[2:], b[2:])
        size -= np.maximum(a[:2], b[:2])
        size += size.dtype.type(offset)
        np.maximum(size, size.dtype.type(0), out=size)
        inter: np.ndarray = np.multiply(size[0], size[1], out=size[0])
        whole = areas[0] + areas[1] - inter if mode == 0 else areas[0]
        np.divide(inter, whole, out=inter)
        return inter


class _Boxes(NamedTuple):
    """Corners (2, ...) with x before y, and areas (...)."""

    low: Tensor
    high: Tensor
    area: Tensor

    @classmethod
    def of(cls, boxes: Tensor, offset: int) -> _Boxes:
        low, high = boxes.T.contiguous().split(2)
        size = (high - low).add_(offset)
        return cls(low, high, size[0] * size[1])


def _overlap(a: _Boxes, b: _Boxes, mode: int, offset: int) -> Tensor:
    """Return overlaps of boxes, broadcast, in mmcv's order of operations."""
    size = torch.minimum(a.high, b.high).sub_(torch.maximum(a.low, b.low)).add_(offset)
    size.clamp_(min=0)
    inter = size[0] * size[1]
    return inter / ((a.area + b.area).sub_(inter) if mode == 0 else a.area)


def bbox_overlaps(bboxes1: Tensor, bboxes2: Tensor, ious: Tensor, mode: int, aligned: bool,
                  offset: int) -> None:
    """Write the overlaps of axis-aligned boxes to ``ious``.

    Args:
        bboxes1, bboxes2: (M, 4) and (N, 4) x1 y1 x2 y2, of any floating dtype; computed in that
            dtype, as in mmcv.
        ious: (M, N), or (M,) if ``aligned``.
        mode: 0 for intersection over union, 1 for intersection over the first box.
        aligned: box i with box i only.
        offset: 0 or 1; widths and heights are ``x2 - x1 + offset``.
    """
    _check_pair('bbox_overlaps', bboxes1, bboxes2, ious, 4, aligned)
    if ious.numel() <= TILE['cpu'] and _fits_numpy(bboxes1) and _fits_numpy(bboxes2):
        first, second = (np.ascontiguousarray(boxes.detach().numpy().T)
                         for boxes in (bboxes1, bboxes2))
        if not aligned:
            first, second = first[:, :, None], second[:, None]
        ious.copy_(torch.from_numpy(_host_overlap(first, second, mode, offset)).view_as(ious))
        return
    a, b = _Boxes.of(bboxes1, offset), _Boxes.of(bboxes2, offset)
    if aligned:
        ious.copy_(_overlap(a, b, mode, offset).view_as(ious))
        return
    table = ious.view(len(bboxes1), len(bboxes2))
    step = max(1, TILE[ious.device.type] // max(1, len(bboxes2)))
    b = _Boxes(*(value.unsqueeze(-2) for value in b))
    for start in range(0, len(bboxes1), step):
        part = slice(start, start + step)
        rows = _Boxes(a.low[:, part, None], a.high[:, part, None], a.area[part, None])
        table[part].copy_(_overlap(rows, b, mode, offset))


# ------------------------------------------------- convex polygons: (x, y), each (K corners, P)

def _next(corners: Tensor) -> Tensor:
    return corners.roll(-1, dims=-2)


def _cross(ax: Tensor, ay: Tensor, bx: Tensor, by: Tensor) -> Tensor:
    return ax * by - ay * bx


def shoelace(x: Tensor, y: Tensor) -> Tensor:
    """Return signed areas (P,) of polygons (K, P), positive if corners turn from x to y."""
    return _cross(x, y, _next(x), _next(y)).sum(0) / 2


def clip_area(ax: Tensor, ay: Tensor, bx: Tensor, by: Tensor) -> Tensor:
    """Return areas (P,) of the intersections of convex polygons (M, P) and (K, P) of positive area.

    Green's theorem over the boundary: the parts of a's edges inside b, and the parts of b's edges
    inside a. Both are clipped by the same signed distances, so the boundary closes even where edges
    nearly coincide. Corners may repeat. The function is differentiable wherever no corner touches
    an edge.
    """
    ex, ey = _next(bx) - bx, _next(by) - by
    vx, vy = _next(ax) - ax, _next(ay) - ay
    rx, ry = ax - bx[:, None], ay - by[:, None]
    side = _cross(ex[:, None], ey[:, None], rx, ry)
    following = _next(side)
    inside, stays = side >= 0, following >= 0
    leaves, enters = inside & ~stays, ~inside & stays
    crosses = leaves | enters
    t = side / torch.where(crosses, side - following, 1)

    last = torch.where(leaves, t, 1).amin(0)
    first = torch.where(enters, t, 0).amax(0)
    lost = (~inside & ~stays).any(0)
    length = torch.where(lost, 0, (last - first).clamp(min=0))
    own = (length * _cross(ax, ay, vx, vy)).sum(0)

    square = ex * ex + ey * ey
    along = (rx + t * vx) * ex[:, None] + (ry + t * vy) * ey[:, None]
    position = along / torch.where(square > 0, square, 1)[:, None]
    start = torch.where(leaves, position, torch.inf).amin(1).clamp(min=0)
    end = torch.where(enters, position, -torch.inf).amax(1).clamp(max=1)
    chord = torch.where(start < end, end - start, 0)
    return (own + (chord * _cross(bx, by, ex, ey)).sum(0)) / 2


def hull(x: Tensor, y: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return convex hulls of point sets (N, P), float64, by gift wrapping; not differentiated.

    The path rises from the lowest point and falls back to it. Rounding may make it miss that point,
    so it also ends where it would rise again. Points closer than the rounding error count as one,
    because noise would determine the direction between them. ``valid`` (N, P) tells the points that
    count.

    Returns:
        index (N, P) of the hull's corners in positive order from the lowest (then leftmost) point,
        padded with that first one; and their number (P,). Points on an edge are left out; of equal
        points the one with the lowest index is taken.
    """
    x, y = x.detach(), y.detach()
    low = torch.where(valid, y, torch.inf)
    low = torch.where(valid & (y == low.amin(0)), x, torch.inf)
    first = low.argmin(0)
    x, y = x - _pick(x, first), y - _pick(y, first)
    grain = _GRAIN * torch.where(valid, torch.maximum(x.abs(), y.abs()), 0).amax(0)
    current, done = first, ~valid.any(0)
    corners, number, falling = [first], (~done).long(), torch.zeros_like(done)
    step, rise = torch.zeros_like(grain), torch.zeros_like(grain)
    for _ in range(len(x) - 1):
        before, current = current, _wrap(x, y, valid, current, grain, step, rise)
        step, rise = _pick(x, current) - _pick(x, before), _pick(y, current) - _pick(y, before)
        back = torch.maximum(_pick(x, current).abs(), _pick(y, current).abs()) <= grain
        done = done | back | (falling & (rise > grain)) | (current == before)
        falling = falling | (rise < -grain)
        corners.append(torch.where(done, first, current))
        number = number + (~done)
        if not x.is_cuda and bool(done.all()):
            break
    corners += [first] * (len(x) - len(corners))
    return torch.stack(corners), number


def _pick(value: Tensor, index: Tensor) -> Tensor:
    return value.gather(0, index[None])[0]


def _wrap(x: Tensor, y: Tensor, valid: Tensor, current: Tensor, grain: Tensor, step: Tensor,
          rise: Tensor) -> Tensor:
    """Return the rightmost point as seen from ``current`` (P,); the farthest of several in line.

    Points behind, on the line (step, rise) that led here, are excluded: they are in line with those
    ahead, and rounding would decide between them.
    """
    dx, dy = x - _pick(x, current), y - _pick(y, current)
    far = dx * dx + dy * dy
    beside = _cross(step, rise, dx, dy) > grain * (step.abs() + rise.abs())
    good = valid & (torch.maximum(dx.abs(), dy.abs()) > grain)
    good &= beside | (step * dx + rise * dy >= 0)
    best = current
    bx, by, reach = (torch.zeros_like(grain) for _ in range(3))
    for index in range(len(x)):
        turn = _cross(dx[index], dy[index], bx, by)
        better = good[index] & ((turn > 0) | ((turn == 0) & (far[index] > reach)))
        best = torch.where(better, index, best)
        bx, by = torch.where(better, dx[index], bx), torch.where(better, dy[index], by)
        reach = torch.where(better, far[index], reach)
    return best


# ------------------------------------------------------------- rotated boxes, quadrilaterals

def _rotated_corners(boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Return corners (4, P) of boxes (5, P) x, y, w, h, angle in radians, in positive order."""
    x, y, w, h, angle = boxes
    cos, sin = angle.cos() / 2, angle.sin() / 2
    px = torch.stack([-sin * h - cos * w, sin * h - cos * w])
    py = torch.stack([cos * h - sin * w, -cos * h - sin * w])
    return x + torch.cat([px, -px]), y + torch.cat([py, -py])


def _ratio(inter: Tensor, area1: Tensor, area2: Tensor, mode: int) -> Tensor:
    nothing = (area1 < _NO_AREA) | (area2 < _NO_AREA)
    return torch.where(nothing, 0, inter / (area1 + area2 - inter if mode == 0 else area1))


def _rotated_pair(a: Tensor, b: Tensor, mode: int) -> Tensor:
    """Return overlap of rotated boxes (5, P) with (5, P), in float64."""
    area1, area2 = a[2] * a[3], b[2] * b[3]
    center = (a[:2] + b[:2]) / 2
    a, b = (torch.cat([box[:2] - center, box[2:]]) for box in (a, b))
    inter = clip_area(*_rotated_corners(a), *_rotated_corners(b)).nan_to_num(0)
    return _ratio(inter.clamp(min=0), area1, area2, mode)


def _rotated_frame(boxes: Tensor) -> Tensor:
    x, y = _rotated_corners(boxes)
    return torch.stack([x.amin(0), y.amin(0), x.amax(0), y.amax(0)])


def _quadri_pair(a: Tensor, b: Tensor, mode: int) -> Tensor:
    """Compute mmcv's overlap of quadrilaterals (8, P) with (8, P), in float64.

    The intersection is taken as the convex hull of edge crossings and of the corners that project
    onto the other's first and last edge: exact for rectangles, an approximation for others.
    """
    ax, ay, bx, by = a[0::2], a[1::2], b[0::2], b[1::2]
    middle_x, middle_y = (ax + bx).sum(0) / 8, (ay + by).sum(0) / 8
    ax, ay, bx, by = ax - middle_x, ay - middle_y, bx - middle_x, by - middle_y
    vx, vy, ex, ey = (value.roll(-1, 0) - value for value in (ax, ay, bx, by))
    det = ex[None] * vy[:, None] - vx[:, None] * ey[None]
    gap_x, gap_y = bx[None] - ax[:, None], by[None] - ay[:, None]
    t = (ex[None] * gap_y - gap_x * ey[None]) / det
    u = (vx[:, None] * gap_y - gap_x * vy[:, None]) / det
    meet = (det.abs() > _NO_AREA) & (t >= 0) & (t <= 1) & (u >= 0) & (u <= 1)
    x = torch.cat([(ax[:, None] + vx[:, None] * t).flatten(0, 1), ax, bx])
    y = torch.cat([(ay[:, None] + vy[:, None] * t).flatten(0, 1), ay, by])
    within = [_between(ax, ay, bx, by, ex, ey), _between(bx, by, ax, ay, vx, vy)]
    valid = torch.cat([meet.flatten(0, 1), *within])
    # few of 24 candidates exist, and the cost of a hull is quadratic
    few = valid.byte().argsort(dim=0, descending=True, stable=True)
    few = few[:max(1, int(valid.sum(0).max()))]
    x, y, valid = (value.gather(0, few) for value in (x, y, valid))
    x, y = torch.where(valid, x, 0), torch.where(valid, y, 0)
    index, _ = hull(x, y, valid)
    inter = shoelace(x.gather(0, index), y.gather(0, index))
    return _ratio(inter, _fan_area(ax, ay), _fan_area(bx, by), mode)


def _between(px: Tensor, py: Tensor, qx: Tensor, qy: Tensor, ex: Tensor, ey: Tensor) -> Tensor:
    """Whether points (4, P) project onto both the first and the last edge of polygons (4, P)."""
    dx, dy = px - qx[0], py - qy[0]
    first = dx * ex[0] + dy * ey[0]
    last = -(dx * ex[3] + dy * ey[3])
    return ((first >= 0) & (first <= ex[0] * ex[0] + ey[0] * ey[0])
            & (last >= 0) & (last <= ex[3] * ex[3] + ey[3] * ey[3]))


def _fan_area(x: Tensor, y: Tensor) -> Tensor:
    dx, dy = x[1:] - x[0], y[1:] - y[0]
    return (dx[:-1] * dy[1:] - dx[1:] * dy[:-1]).abs().sum(0) / 2


def _quadri_frame(boxes: Tensor) -> Tensor:
    """Return bounds of a quadrilateral and of the region in which :func:`_between` finds points."""
    x, y = boxes[0::2], boxes[1::2]
    ux, uy, vx, vy = x[1] - x[0], y[1] - y[0], x[3] - x[0], y[3] - y[0]
    det = ux * vy - uy * vx
    across_x, across_y = (ux * ux + uy * uy) * vy / det, -(ux * ux + uy * uy) * vx / det
    along_x, along_y = -(vx * vx + vy * vy) * uy / det, (vx * vx + vy * vy) * ux / det
    x = torch.cat([x, x[:1] + torch.stack([across_x, along_x, across_x + along_x])])
    y = torch.cat([y, y[:1] + torch.stack([across_y, along_y, across_y + along_y])])
    frame = torch.stack([x.amin(0), y.amin(0), x.amax(0), y.amax(0)])
    everywhere = frame.new_tensor([-torch.inf, -torch.inf, torch.inf, torch.inf])[:, None]
    return torch.where(frame.isfinite().all(0), frame, everywhere)


class BoxKind(NamedTuple):
    """A kind of box: bounds (4, N) and areas (N,) of columns (C, N), and overlaps of pairs."""

    width: int
    frame: Callable[[Tensor], Tensor]
    area: Callable[[Tensor], Tensor]
    pair: Callable[[Tensor, Tensor, int], Tensor]


ROTATED = BoxKind(5, _rotated_frame, lambda boxes: boxes[2] * boxes[3], _rotated_pair)
QUADRI = BoxKind(8, _quadri_frame, lambda boxes: _fan_area(boxes[0::2], boxes[1::2]), _quadri_pair)


def overlap_matrix(kind: BoxKind, a: Tensor, b: Tensor, mode: int) -> Tensor:
    """Return overlaps (M, N), float64, of float64 columns (C, M) with (C, N).

    Only pairs whose bounds touch are computed, a bounded number at a time.
    """
    rows, cols = a.shape[1], b.shape[1]
    out = torch.zeros(rows, cols, dtype=a.dtype, device=a.device)
    area_a, area_b = kind.area(a), kind.area(b)
    if bool(area_a.isnan().any()) or bool(area_b.isnan().any()):
        # an area of NaN makes all overlaps of its box NaN, as in mmcv
        out += _ratio(out, area_a[:, None], area_b[None], mode)
    frame_a, frame_b = kind.frame(a)[:, :, None], kind.frame(b)[:, None]
    step = max(1, TILE[out.device.type] // max(1, cols))
    pairs = _PAIRS[out.device.type]
    for start in range(0, rows, step):
        # bounds that touch; those at NaN do not
        x1, y1, x2, y2 = frame_a[:, start:start + step]
        near = ((x1 <= frame_b[2]) & (frame_b[0] <= x2)
                & (y1 <= frame_b[3]) & (frame_b[1] <= y2))
        first, second = near.nonzero(as_tuple=True)
        if not len(first):
            continue
        for i, j in zip((first + start).split(pairs), second.split(pairs)):
            out[i, j] = kind.pair(a.index_select(1, i), b.index_select(1, j), mode)
    return out


def _iou(operator: str, kind: BoxKind, boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode: int,
         aligned: bool) -> None:
    for name, tensor in (('boxes1', boxes1), ('boxes2', boxes2), ('ious', ious)):
        require_dtype(operator, name, tensor, (torch.float32,))
    _check_pair(operator, boxes1, boxes2, ious, kind.width, aligned)
    if ious.numel() == 0:
        return
    a, b = (boxes.detach().double().T.contiguous() for boxes in (boxes1, boxes2))
    if aligned:
        flat = ious.view(-1)
        for part in torch.arange(len(flat), device=ious.device).split(_PAIRS[ious.device.type]):
            flat[part] = kind.pair(a[:, part], b[:, part], mode).to(ious.dtype)
        return
    rows = max(1, TILE[ious.device.type] // max(1, len(boxes2)))
    table = ious.view(len(boxes1), len(boxes2))
    for start in range(0, len(boxes1), rows):
        part = slice(start, start + rows)
        table[part].copy_(overlap_matrix(kind, a[:, part], b, mode))


def box_iou_rotated(boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode_flag: int,
                    aligned: bool) -> None:
    """Write the overlaps of rotated boxes (M, 5) and (N, 5) to ``ious``; computed in float64.

    Boxes are float32: center x, y, width, height, angle in radians. The other arguments are those
    of :func:`bbox_overlaps`.
    """
    _iou('box_iou_rotated', ROTATED, boxes1, boxes2, ious, mode_flag, aligned)


def box_iou_quadri(boxes1: Tensor, boxes2: Tensor, ious: Tensor, mode_flag: int,
                   aligned: bool) -> None:
    """Write the overlaps of quadrilaterals (M, 8) and (N, 8), x1 y1 ... x4 y4, to ``ious``.

    As :func:`box_iou_rotated`; an approximation, as in mmcv, unless they are rectangles.
    """
    _iou('box_iou_quadri', QUADRI, boxes1, boxes2, ious, mode_flag, aligned)
