"""Convex geometry in batches: hulls and intersections of small polygons.

Polygons are pairs of tensors (x, y) of shape (K, P): K corners of P polygons. The batch is the last
dimension, so that operations run over contiguous memory. Shapes do not depend on values, so the
code runs on any device and can be differentiated.
"""
from __future__ import annotations

import torch
from torch import Tensor

# Points closer than this share of a set's extent are one point. It is about a thousand times the
# rounding of float64 and a thousandth of that of float32.
_GRAIN = 1e-11


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
