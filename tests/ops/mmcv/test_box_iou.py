"""Overlaps of axis-aligned, rotated and quadrilateral boxes, and the vertex sort."""
import math

import geometry
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import bbox_overlaps, box_iou_quadri, box_iou_rotated, diff_iou_rotated_2d

from mmrepro.ops.mmcv import box_iou as kernels
from mmrepro.ops.mmcv import convex

pytestmark = pytest.mark.usefixtures('torch_operators')

NAN, INF = float('nan'), float('inf')
MODES = ['iou', 'iof']


def draw(count, seed=0, room=60.):
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=random) * room
    return torch.cat([corner, corner + torch.rand(count, 2, generator=random) * 30], 1)


def draw_rotated(count, seed=0, room=60.):
    box = draw(count, seed, room)
    random = torch.Generator().manual_seed(seed + 1)
    angle = torch.rand(count, 1, generator=random) * 7 - 3.5
    return torch.cat([box[:, :2], box[:, 2:] - box[:, :2] + 1, angle], 1)


def as_quads(rotated):
    return torch.tensor([[v for p in geometry.rotated(*row) for v in p]
                         for row in rotated.double().tolist()], dtype=torch.float32)


@pytest.mark.parametrize('aligned', [False, True])
@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_bbox_overlaps_has_mmcvs_bits(ours_and_theirs, dtype, mode, offset, aligned):
    a, b = draw(300).to(dtype), draw(300, 1).to(dtype)
    a[0, 0], a[1], a[2, 2], a[3] = NAN, 0, -5, INF
    if not aligned:
        a = a[:270]
    ours, expected = ours_and_theirs(bbox_overlaps, a, b, mode, aligned, offset)
    assert ours.dtype == dtype
    assert torch.equal(ours.isnan(), expected.isnan())
    assert ours.nan_to_num(7).numpy().tobytes() == expected.nan_to_num(7).numpy().tobytes()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 99), st.sampled_from(MODES))
def test_bbox_overlaps_is_the_definition(rows, cols, seed, mode):
    a, b = draw(rows, seed).double(), draw(cols, seed + 1).double()
    expected = np.zeros((rows, cols))
    for i, p in enumerate(a.tolist()):
        for j, q in enumerate(b.tolist()):
            w, h = min(p[2], q[2]) - max(p[0], q[0]), min(p[3], q[3]) - max(p[1], q[1])
            own, other = ((c[2] - c[0]) * (c[3] - c[1]) for c in (p, q))
            both = max(w, 0) * max(h, 0)
            expected[i, j] = both / (own + other - both if mode == 'iou' else own)
    np.testing.assert_allclose(bbox_overlaps(a, b, mode).numpy(), expected, 1e-12)


def test_bbox_overlaps_of_nothing_and_of_many():
    assert bbox_overlaps(torch.zeros(0), draw(3)).shape == (0, 3)
    assert bbox_overlaps(draw(0), draw(0), aligned=True).shape == (0,)
    a, b = draw(700), draw(300, 1)
    assert torch.equal(bbox_overlaps(a[650:651], b), bbox_overlaps(a, b)[650:651])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_bbox_overlaps_in_half_rounds_every_step_as_mmcvs_cuda_kernel_does(dtype):
    a, b = draw(50).to(dtype), draw(50, 1).to(dtype)
    ours = bbox_overlaps(a, b, aligned=True)
    x1, y1, x2, y2 = (getattr(torch, f)(p, q) for f, p, q in zip(
        ('maximum', 'maximum', 'minimum', 'minimum'), a.T, b.T))
    both = (x2 - x1).clamp(min=0) * (y2 - y1).clamp(min=0)
    own, other = ((c[:, 2] - c[:, 0]) * (c[:, 3] - c[:, 1]) for c in (a, b))
    assert ours.dtype == dtype and torch.equal(ours, both / (own + other - both))


@pytest.mark.parametrize('aligned', [False, True])
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('shape', ['rotated', 'quadri'])
def test_rotated_overlaps_are_mmcvs(ours_and_theirs, shape, mode, aligned):
    a, b = draw_rotated(60), draw_rotated(60, 5)
    a[:5] = b[:5]
    function = box_iou_rotated
    if shape == 'quadri':
        a, b, function = as_quads(a), as_quads(b), box_iou_quadri
    ours, expected = ours_and_theirs(function, a, b, mode, aligned)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-6)


def test_quadri_overlaps_of_skewed_boxes_are_mmcvs_approximation(ours_and_theirs):
    a, b = (as_quads(draw_rotated(50, seed)) for seed in (1, 2))
    a, b = a + torch.rand(50, 8, generator=torch.Generator().manual_seed(3)) * 6, b
    ours, expected = ours_and_theirs(box_iou_quadri, a, b)
    # mmcv's sort of nearly collinear points loses a corner now and then
    assert ((ours - expected).abs() < 1e-5).double().mean() > 0.999


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 999), st.sampled_from(MODES))
def test_rotated_overlaps_are_the_definition(rows, cols, seed, mode):
    a, b = draw_rotated(rows, seed, 30.), draw_rotated(cols, seed + 1, 30.)
    ours = box_iou_rotated(a, b, mode)
    assert (ours >= 0).all()
    for i, p in enumerate(a.double().tolist()):
        for j, q in enumerate(b.double().tolist()):
            expected = geometry.overlap(geometry.rotated(*p), geometry.rotated(*q), mode == 'iof')
            assert ours[i, j].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize('angle', [0., math.pi / 2, math.pi, 1e-7, -2 * math.pi])
@pytest.mark.parametrize('shift', [0., 1e-6, 1e-5, 1e-4])
def test_a_box_and_nearly_itself(angle, shift):
    a = draw_rotated(200)
    a[:, 3] = a[:, 2]
    b = a.clone()
    b[:, 0] += shift
    b[:, 4] += angle
    ours = box_iou_rotated(a, b, aligned=True)
    assert (ours - 1).abs().max() < 2e-5 + 4 * shift and ours.max() <= 1


def test_one_inside_another_and_side_by_side():
    a = torch.tensor([[0., 0, 10, 10, 0.3]])
    b = torch.tensor([[0., 0, 2, 5, 1.0], [0, 0, 20, 20, 2.], [100, 0, 10, 10, 0],
                      [0, 0, 0, 10, 0], [0, 0, -10, -10, 0.3]])
    expected = torch.tensor([[0.1, 0.25, 0, 0, 1]])
    torch.testing.assert_close(box_iou_rotated(a, b), expected, rtol=0, atol=1e-6)
    rotated = draw_rotated(300)
    beside = rotated.clone()
    beside[:, 0] += rotated[:, 4].cos() * rotated[:, 2]
    beside[:, 1] += rotated[:, 4].sin() * rotated[:, 2]
    touching = box_iou_rotated(rotated, beside, aligned=True)
    assert (touching >= 0).all() and (touching < 1e-5).all()
    # a pair that touches along an edge, and whose area rounds to less than nothing
    angle, extent = 2.538484573364258, [30.22097396850586, 25.925424575805664]
    pair = torch.tensor([[50.22446060180664, 31.101343154907227, *extent, angle],
                         [25.335171279252258, 48.24282922301956, *extent, angle]]).double()
    pair[1, :2] = torch.tensor([25.335171279252258, 48.24282922301956], dtype=torch.float64)
    shape = kernels.ROTATED
    assert kernels.overlap_matrix(shape, pair[:1].T, pair[1:].T, 0).item() >= 0


@pytest.mark.parametrize('mode', MODES)
def test_impossible_rotated_boxes_are_mmcvs(ours_and_theirs, mode):
    a = draw_rotated(10)
    for row, column, value in ((0, 0, NAN), (1, 2, NAN), (2, 4, INF), (3, 2, 0.), (5, 0, INF),
                               (6, 2, INF), (7, 4, NAN), (8, 3, -3.)):
        a[row, column] = value
    b = draw_rotated(10, 7)
    ours, expected = ours_and_theirs(box_iou_rotated, a, b, mode)
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-6, equal_nan=True)


def test_impossible_quadrilaterals_are_mmcvs(ours_and_theirs):
    a, b = as_quads(draw_rotated(12, 8)), as_quads(draw_rotated(40, 9, 200.))
    # no first edge, no last edge, both on one line, a point, NaN: what mmcv takes for inside of the
    # first three is a strip without an end
    a[0, 2:4], a[1, 6:] = a[0, :2], a[1, :2]
    a[2, 6:] = 2 * a[2, :2] - a[2, 2:4]
    a[3], a[4, 3] = a[3, :2].repeat(4), NAN
    for left, right in ((a, b), (b, a)):
        ours, expected = ours_and_theirs(box_iou_quadri, left, right)
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3, equal_nan=True)


def naive_sort(vertices, mask, number):
    """mmcv's selection of vertices, one polygon, in float32."""
    f, eps = np.float32, 1e-8

    def before(a, b):
        (x1, y1), (x2, y2) = a, b
        if abs(x1 - x2) < eps and abs(y2 - y1) < eps:
            return False
        if y1 > 0 and y2 < 0:
            return True
        if y1 < 0 and y2 > 0:
            return False
        n1, n2 = (f(float(x * x + y * y) + eps) for x, y in (a, b))
        diff = abs(x1) * x1 / n1 - abs(x2) * x2 / n2
        if y1 > 0 and y2 > 0:
            return diff > eps
        return y1 < 0 and y2 < 0 and diff < eps

    free = next((k for k in range(8, len(mask)) if not mask[k]), 8)
    out = [free] * 9
    if number < 3:
        return out
    for j in range(number):
        best, take = (f(1), f(-eps)), 0
        for k in range(len(mask)):
            if mask[k] and before(vertices[k], best) and (
                    j == 0 or before(vertices[out[j - 1]], vertices[k])):
                best, take = vertices[k], k
        out[j] = take
    out[number] = out[0]
    if number == 8 and sum(out[j] == out[k] for j in range(4) for k in range(4, 8)) == 4:
        out[4:] = [out[0]] + [free] * 4
    return out


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), st.sampled_from([1, 2, 4]))
def test_the_vertex_sort_is_mmcvs(seed, grid):
    random = np.random.default_rng(seed)
    vertices = (random.integers(-grid, grid + 1, (2, 3, 24, 2)) / grid).astype(np.float32)
    vertices += random.normal(size=vertices.shape).astype(np.float32) * (grid == 4)
    mask = np.zeros((2, 3, 24), bool)
    number = random.integers(0, 9, (2, 3)).astype(np.int32)
    for b in range(2):
        for n in range(3):
            mask[b, n, random.permutation(24)[:number[b, n]]] = True
    ours = kernels.diff_iou_rotated_sort_vertices_forward(
        torch.from_numpy(vertices), torch.from_numpy(mask), torch.from_numpy(number))
    assert ours.dtype == torch.int32
    for b in range(2):
        for n in range(3):
            assert ours[b, n].tolist() == naive_sort(vertices[b, n], mask[b, n], number[b, n])


def test_diff_iou_is_the_overlap_and_has_its_gradient():
    a, b = draw_rotated(12, 3, 20.), draw_rotated(12, 4, 20.)
    a[0] = b[0]
    ours = diff_iou_rotated_2d(a[None], b[None])[0]
    torch.testing.assert_close(ours, box_iou_rotated(a, b, aligned=True), rtol=0, atol=1e-4)
    value = a[1:].clone().requires_grad_()
    diff_iou_rotated_2d(value[None], b[None, 1:]).sum().backward()
    step = 1e-4
    for i, row in enumerate(a[1:].double().tolist()):
        other = geometry.rotated(*b[1 + i].double().tolist())
        for k in range(5):
            up, down = list(row), list(row)
            up[k], down[k] = up[k] + step, down[k] - step
            slope = (geometry.overlap(geometry.rotated(*up), other)
                     - geometry.overlap(geometry.rotated(*down), other)) / (2 * step)
            assert value.grad[i, k].item() == pytest.approx(slope, abs=2e-4)


def test_the_vertex_sort_takes_nothing():
    sort = kernels.diff_iou_rotated_sort_vertices_forward
    empty = sort(torch.zeros(1, 0, 24, 2), torch.zeros(1, 0, 24).bool(), torch.zeros(1, 0).int())
    assert empty.shape == (1, 0, 9)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 9999), st.sampled_from([None, 4, 12, 40]))
def test_hulls_are_the_definition(count, seed, grid):
    random = torch.Generator().manual_seed(seed)
    sets = torch.randn(count, 9, 2, generator=random, dtype=torch.float64) * 10
    if grid is not None:  # whole numbers, for ties
        sets = (sets / grid).round() * grid
    index, number = convex.hull(*sets.permute(2, 1, 0), torch.ones(9, count, dtype=torch.bool))
    for k, row in enumerate(sets.tolist()):
        points = [tuple(point) for point in row]
        expected = geometry.hull(points)
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
    index, _ = convex.hull(x, y, torch.ones_like(x, dtype=torch.bool))
    corners = torch.stack([a, b, c])
    expected = convex.shoelace(corners[:, 0], corners[:, 1]).abs()
    ours = convex.shoelace(x.gather(0, index), y.gather(0, index))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
