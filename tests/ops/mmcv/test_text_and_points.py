"""Operators that copy, count and compare: text regions, PSAMask, voxels, points in boxes."""
import collections
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import contour_expand, pixel_group, points_in_boxes_cpu, voxelization
from mmcv.ops.psa_mask import psa_mask

pytestmark = pytest.mark.usefixtures('torch_operators')


def random(seed):
    return torch.Generator().manual_seed(seed)


# --------------------------------------------------------------------------------------- PSAMask

def naive_masks(masks, kind, mask):
    n, _, height, width = masks.shape
    out = torch.zeros(n, height * width, height, width, dtype=masks.dtype)
    for h, w, i, j in np.ndindex(height, width, *mask):
        y, x = h + i - (mask[0] - 1) // 2, w + j - (mask[1] - 1) // 2
        if 0 <= y < height and 0 <= x < width:
            value = masks[:, i * mask[1] + j, h, w]
            if kind == 0:
                out[:, y * width + x, h, w] = value
            else:
                out[:, h * width + w, y, x] = value
    return out


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_psa_mask_follows_its_definition(data):
    n, height, width, *mask = (data.draw(st.integers(1, most)) for most in (2, 4, 5, 9, 7))
    masks = torch.randn(n, mask[0] * mask[1], height, width, generator=random(0))
    for kind in (0, 1):
        assert torch.equal(psa_mask(masks, kind, mask), naive_masks(masks, kind, mask))


# ---------------------------------------------------------------------------------- text regions

def grown(labels, queue, steps, accept):
    """Search in breadth, one pixel after the other."""
    queue = collections.deque(queue)
    while queue:
        y, x = queue.popleft()
        for dy, dx in steps:
            a, b = y + dy, x + dx
            if (0 <= a < labels.shape[0] and 0 <= b < labels.shape[1] and labels[a, b] <= 0
                    and accept(a, b, labels[y, x])):
                labels[a, b] = labels[y, x]
                queue.append((a, b))
    return labels


def kernels(seed, height, width, number):
    """Return labels from 0 to ``number``, most of them 0."""
    labels = torch.randint(-6, number + 1, (height, width), generator=random(seed))
    return labels.clamp_(min=0).int()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 4), st.integers(0, 99),
       st.integers(1, 3))
def test_contours_expand_within_the_largest_mask(height, width, least, seed, masks):
    mask = (torch.rand(masks, height, width, generator=random(seed)) < 0.6).byte()
    labels = kernels(seed, height, width, 3)
    expected = labels.numpy().copy()
    area = collections.Counter(expected.ravel().tolist())
    for label in (1, 2, 3):
        if area[label] < least:
            expected[expected == label] = 0
    if masks > 1:
        queue = list(zip(*np.nonzero(expected)))
        grown(expected, queue, ((-1, 0), (1, 0), (0, -1), (0, 1)), lambda y, x, _: mask[0, y, x])
    assert contour_expand(mask, labels, least, 3) == expected.tolist()


def groups(seed, height, width):
    """Return arguments of pixel_group: three kernels and the background."""
    embedding = torch.randn(height, width, 3, generator=random(seed))
    return (torch.rand(height, width, generator=random(seed + 1)),
            torch.rand(height, width, generator=random(seed + 2)) < 0.7,
            embedding, kernels(seed, height, width, 3),
            (torch.rand(height, width, generator=random(seed + 3)) < 0.8).byte(), 4, 1.8)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(0, 99))
def test_pixels_join_the_kernel_that_reaches_them_first(height, width, seed):
    score, mask, embedding, labels, contour, number, limit = groups(seed, height, width)
    found = pixel_group(score, mask, embedding, labels, contour, number, limit)
    expected = labels.numpy().copy()
    means = [embedding[labels == label].double().mean(0) for label in range(number)]
    queue = [(y, x) for y, x in np.ndindex(height, width) if expected[y, x] > 0 and contour[y, x]]
    grown(expected, queue, ((0, -1), (0, 1), (-1, 0), (1, 0)), lambda y, x, label: mask[y, x] and (
        means[label] - embedding[y, x]).norm() < limit)
    assert len(found) == number and found[0] == [0., 0.]
    for label in range(1, number):
        y, x = np.nonzero(expected == label)
        mean = float(score[y, x].mean()) if len(y) else 0.
        assert found[label][0] == pytest.approx(mean, rel=1e-5)
        assert found[label][1:] == [len(y), *np.stack((x, y), 1).ravel().tolist()]


@pytest.mark.compiled
@pytest.mark.parametrize('seed', range(5))
def test_regions_are_those_of_compiled_mmcv(ours_and_theirs, seed):
    mask = (torch.rand(4, 40, 50, generator=random(seed)) < 0.7).byte()
    labels, arguments = kernels(seed, 40, 50, 3), groups(seed, 40, 50)
    ours, theirs = ours_and_theirs(
        lambda: (contour_expand(mask, labels, 2, 3), pixel_group(*arguments)))
    assert ours == theirs


# ---------------------------------------------------------------------------------------- voxels

SIZE, RANGE = [0.5, 1., 2.], [0., -2., -1., 4., 2., 3.]


def cloud(count, seed, dtype=torch.float32):
    """Return (N, 4) points; some out of range, some on a border, some not numbers."""
    points = torch.rand(count, 4, generator=random(seed)) * 6 - 2
    points[::5] = points[::5].mul_(2).round_().div_(2)
    points[::7, 1] = float('nan')
    points[3::11, 2] = float('inf')
    return points.to(dtype)


def naive_voxels(points, depth, most):
    """Return voxels in the order of their first points: {(z, y, x): points}."""
    grid = [round((RANGE[3 + axis] - RANGE[axis]) / SIZE[axis]) for axis in range(3)]
    voxels, where = {}, []
    for point in points.double().tolist():
        at = [(point[axis] - RANGE[axis]) / SIZE[axis] for axis in range(3)]
        inside = all(math.isfinite(a) and 0 <= math.floor(a) < n for a, n in zip(at, grid))
        where.append([math.floor(a) for a in at[::-1]] if inside else [-1] * 3)
        if not inside or len(voxels) == most and tuple(where[-1]) not in voxels:
            continue
        held = voxels.setdefault(tuple(where[-1]), [])
        if len(held) < depth:
            held.append(point)
    return voxels, where


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.integers(0, 99), st.integers(1, 4), st.integers(1, 30),
       st.booleans())
def test_points_go_to_the_voxels_of_their_definition(count, seed, depth, most, deterministic):
    points = cloud(count, seed)
    expected, where = naive_voxels(points, depth, most)
    assert voxelization(points, SIZE, RANGE, -1, -1).tolist() == where
    voxels, coors, number = voxelization(points, SIZE, RANGE, depth, most, deterministic)
    assert [tuple(row) for row in coors.tolist()] == list(expected)
    assert number.tolist() == [len(held) for held in expected.values()]
    for row, held in zip(voxels, expected.values()):
        assert row[:len(held)].double().tolist() == held and row[len(held):].count_nonzero() == 0


@pytest.mark.compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize('depth, most', [(-1, -1), (3, 1000), (2, 20), (100, 5)])
def test_voxels_are_those_of_compiled_mmcv(ours_and_theirs, depth, most, dtype):
    points = cloud(3000, 5, dtype)
    ours, theirs = ours_and_theirs(voxelization, points, SIZE, RANGE, depth, most)
    if depth == -1:
        ours, theirs = [ours], [theirs]
    for pair in zip(ours, theirs):
        assert torch.equal(*pair)


def test_points_in_boxes_follow_their_definition():
    points = torch.rand(1, 300, 3, generator=random(1)) * 10 - 5
    boxes = torch.rand(1, 20, 7, generator=random(2)) * 6
    boxes[..., :3] -= 5
    found = points_in_boxes_cpu(points, boxes)
    assert found.shape == (1, 300, 20) and 100 < found.sum() < 3000
    for (i, (x, y, z)), (j, (bx, by, bz, dx, dy, dz, angle)) in (
            (point, box) for point in enumerate(points[0].double().tolist())
            for box in enumerate(boxes[0].double().tolist())):
        along = (x - bx) * math.cos(angle) + (y - by) * math.sin(angle)
        across = (y - by) * math.cos(angle) - (x - bx) * math.sin(angle)
        inside = bz <= z <= bz + dz and abs(along) < dx / 2 and abs(across) < dy / 2
        assert found[0, i, j] == inside, (i, j)


@pytest.mark.compiled
def test_points_in_boxes_are_those_of_compiled_mmcv(ours_and_theirs):
    points = torch.rand(2, 2000, 3, generator=random(1)) * 10 - 5
    boxes = torch.rand(2, 50, 7, generator=random(2)) * 6 - 1
    points[0, 0], boxes[0, 0, 6], boxes[1, 1, 0] = float('nan'), 0., float('nan')
    points[0, 1:30] = boxes[0, 0, :3] + boxes[0, 0, 3:6] / 2  # a corner
    assert torch.equal(*ours_and_theirs(points_in_boxes_cpu, points, boxes))
