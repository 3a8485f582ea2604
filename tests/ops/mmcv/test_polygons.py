"""Point sets, polygons and rotated filters; most of them mmcv compiles for CUDA only."""
import math

import geometry
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import (
    active_rotated_filter,
    convex_giou,
    convex_iou,
    min_area_polygons,
    points_in_polygons,
)

from mmrepro.ops.mmcv import convex
from mmrepro.ops.mmcv import polygons as kernels

pytestmark = pytest.mark.usefixtures('torch_operators')


def draw_sets(count, seed=0, grid=None):
    """(N, 18) point sets within some 60 units; whole numbers, if ``grid``, for ties."""
    random = torch.Generator().manual_seed(seed)
    middle = torch.rand(count, 1, 2, generator=random) * 30
    spread = torch.randn(count, 9, 2, generator=random) * 10
    sets = (middle + spread).flatten(1)
    return sets if grid is None else (sets / grid).round() * grid


def draw_quads(count, seed=0):
    """(N, 8) convex quadrilaterals, half of them in negative direction."""
    random = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, 4, generator=random) * 1.2 + torch.arange(4) * (math.pi / 2)
    radius = torch.rand(count, 1, generator=random) * 15 + 5
    middle = torch.rand(count, 1, 2, generator=random) * 30
    quads = middle + radius[..., None] * torch.stack([angle.cos(), angle.sin()], 2)
    quads[::2] = quads[::2].flip(1)
    return quads.flatten(1)


def ordered(quad):
    quad = geometry.pairs(quad)
    return quad if geometry.area(quad) > 0 else quad[::-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 9999), st.sampled_from([None, 4, 12, 40]))
def test_hulls_are_the_definition(count, seed, grid):
    sets = draw_sets(count, seed, grid).double()
    x, y = sets.T[0::2], sets.T[1::2]
    index, number = convex.hull(x, y)
    for k, row in enumerate(sets.tolist()):
        points, expected = geometry.pairs(row), geometry.hull(geometry.pairs(row))
        corners = [points[i] for i in index[:, k].tolist()]
        lowest = min(range(len(expected)), key=lambda i: expected[i][::-1])
        assert corners[:number[k]] == expected[lowest:] + expected[:lowest]
        assert set(corners[number[k]:]) <= {corners[0]}
        assert all(points.index(points[i]) == i for i in index[:number[k], k].tolist())


def test_points_in_line_but_for_rounding_do_not_mislead_the_hull():
    random = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 2, 3000, dtype=torch.float64, generator=random)
    sides = [p + t / 6 * (q - p) for p, q in ((a, b), (b, c), (c, a)) for t in range(6)]
    sides += [p * (1 + 2e-16 * k) for k, p in enumerate((a, b, c))]
    order = torch.rand(21, 3000, generator=random).argsort(0)
    x, y = (torch.stack(sides)[:, k].gather(0, order) for k in (0, 1))
    index, _ = convex.hull(x, y)
    corners = torch.stack([a, b, c])
    expected = convex.shoelace(corners[:, 0], corners[:, 1]).abs()
    ours = convex.shoelace(x.gather(0, index), y.gather(0, index))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 999), st.sampled_from([None, 5]))
def test_convex_iou_is_the_definition(sets, quads, seed, grid):
    points, polygons = draw_sets(sets, seed, grid), draw_quads(quads, seed)
    ours = convex_iou(points, polygons)
    assert ours.shape == (sets, quads)
    for i, row in enumerate(points.double().tolist()):
        for j, quad in enumerate(polygons.double().tolist()):
            a = geometry.hull(geometry.pairs(row))
            if len(a) > 2:
                assert ours[i, j].item() == pytest.approx(geometry.overlap(a, ordered(quad)),
                                                          abs=1e-6)


def test_convex_iou_of_a_quadrilateral_that_is_not_convex():
    square = [0., 0, 10, 0, 10, 10, 0, 10] + [5., 5] * 5
    arrow = [0., 0, 10, 0, 5, 3, 5, 10]
    expected = abs(geometry.area(geometry.pairs(arrow))) / 100
    for quad in (arrow, arrow[6:] + arrow[:6], arrow[4:] + arrow[:4]):
        reversed_quad = [v for p in geometry.pairs(quad)[::-1] for v in p]
        ours = convex_iou(torch.tensor([square]), torch.tensor([quad, reversed_quad]))
        assert ours[0].tolist() == pytest.approx([expected, expected], abs=1e-6)


@pytest.mark.parametrize('far', [0., 4000.])
def test_convex_giou_and_its_gradient_are_the_definition(far):
    points, quads = draw_sets(40).double() + far, draw_quads(40, 1).double() + far
    value, gradient = convex_giou(points, quads)
    for i, (row, quad) in enumerate(zip(points.tolist(), quads.tolist())):
        row, quad = [v - far for v in row], ordered([v - far for v in quad])
        assert value[i].item() == pytest.approx(geometry.giou(geometry.pairs(row), quad), abs=1e-9)
        for k in range(18):
            step, ends = 1e-5, []
            for sign in (1, -1):
                moved = list(row)
                moved[k] += sign * step
                ends.append(geometry.giou(geometry.pairs(moved), quad))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert gradient[i, k].item() == pytest.approx(slope, abs=1e-6)


def test_equal_points_give_the_gradient_to_the_first():
    corners = [(0., 0), (8, 0), (8, 8), (0, 8)]
    points = torch.tensor([[v for p in corners * 2 + [(3., 3)] for v in p]])
    _, gradient = convex_giou(points, torch.tensor([[1., 1, 12, 1, 12, 12, 1, 12]]))
    assert gradient[0, :8].abs().sum() > 0 == gradient[0, 8:].abs().sum()


def test_precisions_of_convex_overlaps():
    points, quads = draw_sets(20), draw_quads(20)
    exact = convex_iou(points.double(), quads.double())
    torch.testing.assert_close(convex_iou(points, quads).double(), exact, rtol=0, atol=1e-6)
    half = convex_iou(points.half(), quads.half())
    assert half.dtype == torch.float16 and (half.double() - exact).abs().max() < 0.02


def naive_rectangles(points):
    """For every edge of the hull the corners of the rectangle along it, as mmcv orders them."""
    corners = geometry.hull(points)
    for a, b in zip(corners, corners[1:] + corners[:1]):
        angle = math.atan2(b[1] - a[1], b[0] - a[0]) % (math.pi / 2)
        c, s = math.cos(angle), math.sin(angle)
        u, v = [c * x + s * y for x, y in corners], [-s * x + c * y for x, y in corners]
        u0, u1, v0, v1 = min(u), max(u), min(v), max(v)
        yield (u1 - u0) * (v1 - v0), [
            (c * p - s * q, s * p + c * q) for p, q in ((u1, v0), (u0, v0), (u0, v1), (u1, v1))]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 6), st.integers(0, 9999))
def test_min_area_polygons_is_the_definition(count, seed):
    sets = draw_sets(count, seed)
    ours = min_area_polygons(sets)
    assert ours.shape == (count, 8)
    for row, polygon in zip(sets.double().tolist(), ours.double().tolist()):
        found = list(naive_rectangles(geometry.pairs(row)))
        # around a triangle all three have the same area, and rounding chooses
        least = min(found)[0] * (1 + 1e-5)
        assert any(np.allclose(geometry.pairs(polygon), corners, atol=2e-3)
                   for area, corners in found if area <= least)


def test_min_area_polygons_of_few_different_points():
    square = [0., 0, 4, 0, 4, 4, 0, 4] + [2., 2] * 5
    assert min_area_polygons(torch.tensor([square])).tolist() == [[4, 0, 0, 0, 0, 4, 4, 4]]
    same = torch.tensor([[3., 5.] * 9])
    assert min_area_polygons(same).tolist() == [[3., 5.] * 4]
    line = torch.tensor([[float(v) for i in range(9) for v in (i, 2)]])
    assert min_area_polygons(line).abs().amax().item() == 8


def naive_inside(point, quad):
    """mmcv's crossing number, in float32."""
    quad = geometry.pairs([np.float32(v) for v in quad])
    px, py = (np.float32(v) for v in point)
    crossings = 0
    for (sx, sy), (tx, ty) in zip(quad, quad[-1:] + quad[:-1]):
        if py < min(sy, ty) or py > max(sy, ty):
            continue
        if (sx, sy) == (px, py) or (tx, ty) == (px, py):
            break
        if (sy < py <= ty) or (sy >= py > ty):
            x = sx + (py - sy) * (tx - sx) / (ty - sy)
            if x == px:
                break
            crossings += x > px
    return float(crossings % 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 30), st.integers(0, 9), st.integers(0, 999), st.sampled_from([None, 3, 6]))
def test_points_in_polygons_is_mmcvs_also_on_edges(points, quads, seed, grid):
    random = torch.Generator().manual_seed(seed)
    where, polygons = torch.rand(points, 2, generator=random) * 40, draw_quads(quads, seed)
    if grid:
        where = torch.randint(0, grid, (points, 2), generator=random).float()
        polygons = torch.randint(0, grid, (quads, 8), generator=random).float()
    ours = points_in_polygons(where, polygons)
    expected = [[naive_inside(p, q) for q in polygons.tolist()] for p in where.tolist()]
    assert ours.shape == (points, quads) and ours.dtype == torch.float32
    assert ours.tolist() == expected


def rotations(orientations=8, kernel=3, count=8, seed=0):
    """Indices that send every entry of a filter to a position of its own, in each rotation."""
    random = torch.Generator().manual_seed(seed)
    entries = orientations * kernel * kernel
    index = torch.stack([torch.randperm(entries, generator=random) for _ in range(count)], 1) + 1
    return index.view(orientations, kernel, kernel, count).int()


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16])
def test_active_rotated_filter_has_mmcvs_bits(compiled, dtype):
    random = torch.Generator().manual_seed(1)
    filters, indices = torch.randn(4, 3, 8, 3, 3, generator=random).to(dtype), rotations()
    indices[0, 0, 0], indices[1, 0, 0] = indices[1, 0, 0].clone(), indices[2, 0, 0].clone()
    upstream = torch.randn(32, 24, 3, 3, generator=random).to(dtype)
    results = []
    for operators in (compiled, None):
        value = filters.clone().requires_grad_()
        if operators:
            with operators():
                out = active_rotated_filter(value, indices)
                out.backward(upstream)
        else:
            out = active_rotated_filter(value, indices)
            out.backward(upstream)
        results.append((out.detach(), value.grad))
    for expected, ours in zip(*results):
        assert ours.dtype == dtype
        assert ours.numpy().tobytes() == expected.numpy().tobytes()


def test_active_rotated_filter_puts_every_entry_where_it_belongs():
    filters, indices = torch.arange(2 * 3 * 4.).view(2, 3, 4, 1, 1), rotations(4, 1, 2)
    out = active_rotated_filter(filters, indices)
    for o in range(2):
        for i in range(3):
            for entry in range(4):
                for r in range(2):
                    target = int(indices.view(4, 2)[entry, r]) - 1
                    assert out[o * 2 + r, i * 4 + target, 0, 0] == filters[o, i, entry, 0, 0]


def test_polygons_take_nothing_and_refuse_with_the_shapes():
    assert convex_iou(torch.zeros(0, 18), torch.zeros(3, 8)).shape == (0, 3)
    assert [t.shape for t in convex_giou(torch.zeros(0, 18), torch.zeros(0, 8))] == [(0,), (0, 18)]
    points, quads = torch.zeros(3, 18), torch.zeros(2, 8)
    for call, said in (
            (lambda: convex_iou(points[:, :16], quads), r'\(N, 18\).*\(3, 16\)'),
            (lambda: convex_iou(points, quads.double()), 'polygons.*float64'),
            (lambda: convex_giou(points, quads), r'\(3, 18\).*\(2, 8\)'),
            (lambda: min_area_polygons(quads), r'\(N, 18\).*\(2, 8\)'),
            (lambda: points_in_polygons(points[:, :2].double(), quads), 'float64'),
            (lambda: kernels.points_in_polygons_forward(quads[:, :2], quads, points),
             r'output.*\(3, 18\)'),
            (lambda: active_rotated_filter(torch.zeros(2, 3, 8, 3, 3), rotations(4, 3, 8)),
             r'\(2, 3, 8, 3, 3\).*\(4, 3, 3, 8\)'),
            (lambda: active_rotated_filter(torch.zeros(2, 3, 8, 3, 3), rotations().long()),
             'int32.*int64')):
        with pytest.raises(RuntimeError, match=said):
            call()
