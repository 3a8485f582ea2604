"""Rotated boxes, quadrilaterals and curved boxes: overlaps, suppression, features, filters."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import (
    active_rotated_filter,
    bbox_overlaps,
    bezier_align,
    box_iou_quadri,
    box_iou_rotated,
    nms_quadri,
    nms_rotated,
    roi_align,
    roi_align_rotated,
    rotated_feature_align,
)
from operators import with_gradients
from shapely.geometry import Polygon
from test_roi_operators import BINS, SCALE, sample

from mmrepro.ops.mmcv import box_iou
from mmrepro.ops.mmcv import nms as nms_kernels

pytestmark = pytest.mark.usefixtures('torch_operators')

NAN, INF = float('nan'), float('inf')
MODES = ['iou', 'iof']


def boxes_in(room, count, seed=0):
    random = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=random) * room
    return torch.cat([corner, corner + torch.rand(count, 2, generator=random) * 30], 1)


def rotated_in(room, count, seed=0):
    box = boxes_in(room, count, seed)
    angle = torch.rand(count, 1, generator=torch.Generator().manual_seed(seed + 1)) * 7 - 3.5
    return torch.cat([box[:, :2], box[:, 2:] - box[:, :2] + 1, angle], 1)


def corners_of(x, y, w, h, angle):
    c, s = math.cos(angle), math.sin(angle)
    return [(x + c * a * w / 2 - s * b * h / 2, y + s * a * w / 2 + c * b * h / 2)
            for a, b in ((-1, -1), (1, -1), (1, 1), (-1, 1))]


def quads_of(rotated):
    return torch.tensor([[value for point in corners_of(*row) for value in point]
                         for row in rotated.double().tolist()])


def overlap_of(one, other, mode):
    """Return the overlap of two boxes by shapely."""
    one, other = Polygon(corners_of(*one)), Polygon(corners_of(*other))
    both = one.intersection(other).area
    return both / (one.area if mode == 'iof' else one.area + other.area - both)


# --------------------------------------------------------------------------------------- overlaps

@pytest.mark.compiled
@pytest.mark.parametrize('aligned', [False, True])
@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_bbox_overlaps_has_the_bits_of_compiled_mmcv(ours_and_theirs, dtype, mode, offset, aligned):
    a, b = boxes_in(60, 300).to(dtype), boxes_in(60, 300, 1).to(dtype)
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
    a, b = boxes_in(60, rows, seed).double(), boxes_in(60, cols, seed + 1).double()
    expected = np.zeros((rows, cols))
    for i, p in enumerate(a.tolist()):
        for j, q in enumerate(b.tolist()):
            w, h = min(p[2], q[2]) - max(p[0], q[0]), min(p[3], q[3]) - max(p[1], q[1])
            own, other = ((c[2] - c[0]) * (c[3] - c[1]) for c in (p, q))
            both = max(w, 0) * max(h, 0)
            expected[i, j] = both / (own + other - both if mode == 'iou' else own)
    np.testing.assert_allclose(bbox_overlaps(a, b, mode).numpy(), expected, 1e-12)


def test_bbox_overlaps_of_many_are_those_of_each():
    a, b = boxes_in(60, 700), boxes_in(60, 300, 1)
    assert torch.equal(bbox_overlaps(a[650:651], b), bbox_overlaps(a, b)[650:651])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 999), st.sampled_from(MODES))
def test_overlaps_of_rotated_boxes_are_those_of_polygons(rows, cols, seed, mode):
    a, b = rotated_in(30., rows, seed), rotated_in(30., cols, seed + 1)
    ours, quads = box_iou_rotated(a, b, mode), torch.zeros(rows, cols)
    if rows and cols:
        quads = box_iou_quadri(quads_of(a), quads_of(b), mode)
    for i, j in np.ndindex(rows, cols):
        expected = overlap_of(a[i].double().tolist(), b[j].double().tolist(), mode)
        assert ours[i, j].item() == pytest.approx(expected, abs=1e-6)
        assert quads[i, j].item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize('angle', [0., math.pi / 2, math.pi, 1e-7, -2 * math.pi])
@pytest.mark.parametrize('shift', [0., 1e-6, 1e-5, 1e-4])
def test_a_box_overlaps_nearly_itself(angle, shift):
    a = rotated_in(60., 200)
    a[:, 3] = a[:, 2]
    b = a.clone()
    b[:, 0] += shift
    b[:, 4] += angle
    ours = box_iou_rotated(a, b, aligned=True)
    assert (ours - 1).abs().max() < 2e-5 + 4 * shift and ours.max() <= 1


def test_boxes_inside_of_others_and_side_by_side():
    a = torch.tensor([[0., 0, 10, 10, 0.3]])
    b = torch.tensor([[0., 0, 2, 5, 1.0], [0, 0, 20, 20, 2.], [100, 0, 10, 10, 0],
                      [0, 0, 0, 10, 0], [0, 0, -10, -10, 0.3]])
    torch.testing.assert_close(box_iou_rotated(a, b), torch.tensor([[0.1, 0.25, 0, 0, 1]]), rtol=0,
                               atol=1e-6)
    far = a + torch.tensor([100., 0, 0, 0, 0])
    assert box_iou_quadri(quads_of(a), quads_of(far)).item() == 0
    rotated = rotated_in(60., 300)
    beside = rotated.clone()
    beside[:, 0] += rotated[:, 4].cos() * rotated[:, 2]
    beside[:, 1] += rotated[:, 4].sin() * rotated[:, 2]
    touching = box_iou_rotated(rotated, beside, aligned=True)
    assert (touching >= 0).all() and (touching < 1e-5).all()


@pytest.mark.compiled
@pytest.mark.parametrize('aligned', [False, True])
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('function', [box_iou_rotated, box_iou_quadri])
def test_overlaps_agree_with_compiled_mmcv(ours_and_theirs, function, mode, aligned):
    a, b = rotated_in(60., 60), rotated_in(60., 60, 5)
    a[:5] = b[:5]
    if function is box_iou_quadri:
        a, b = quads_of(a), quads_of(b)
    ours, expected = ours_and_theirs(function, a, b, mode, aligned)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-6)


@pytest.mark.compiled
def test_overlaps_of_skewed_quadrilaterals_are_the_approximation_of_compiled_mmcv(ours_and_theirs):
    a, b = (quads_of(rotated_in(60., 50, seed)) for seed in (1, 2))
    a = a + torch.rand(50, 8, generator=torch.Generator().manual_seed(3)) * 6
    ours, expected = ours_and_theirs(box_iou_quadri, a, b)
    # mmcv's sort of nearly collinear points loses a corner now and then
    assert ((ours - expected).abs() < 1e-5).double().mean() > 0.999


@pytest.mark.compiled
@pytest.mark.parametrize('mode', MODES)
def test_overlaps_of_impossible_boxes_are_those_of_compiled_mmcv(ours_and_theirs, mode):
    a, b = rotated_in(60., 10), rotated_in(60., 10, 7)
    for row, column, value in ((0, 0, NAN), (1, 2, NAN), (2, 4, INF), (3, 2, 0.), (5, 0, INF),
                               (6, 2, INF), (7, 4, NAN), (8, 3, -3.)):
        a[row, column] = value
    torch.testing.assert_close(*ours_and_theirs(box_iou_rotated, a, b, mode), rtol=0, atol=3e-6,
                               equal_nan=True)
    c, d = quads_of(rotated_in(60., 12, 8)), quads_of(rotated_in(200., 40, 9))
    # no first edge, no last edge, both on one line, a point, NaN: what mmcv takes for inside of the
    # first three is a strip without an end
    c[0, 2:4], c[1, 6:] = c[0, :2], c[1, :2]
    c[2, 6:] = 2 * c[2, :2] - c[2, 2:4]
    c[3], c[4, 3] = c[3, :2].repeat(4), NAN
    for left, right in ((c, d), (d, c)):
        torch.testing.assert_close(*ours_and_theirs(box_iou_quadri, left, right, mode), rtol=1e-3,
                                   atol=1e-3, equal_nan=True)


def test_points_in_line_but_for_rounding_do_not_mislead_the_hull():
    random = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 2, 3000, dtype=torch.float64, generator=random)
    sides = [p + t / 6 * (q - p) for p, q in ((a, b), (b, c), (c, a)) for t in range(6)]
    sides += [p * (1 + 2e-16 * k) for k, p in enumerate((a, b, c))]
    order = torch.rand(21, 3000, generator=random).argsort(0)
    x, y = (torch.stack(sides)[:, k].gather(0, order) for k in (0, 1))
    index, _ = box_iou.hull(x, y, torch.ones_like(x, dtype=torch.bool))
    corners = torch.stack([a, b, c])
    expected = box_iou.shoelace(corners[:, 0], corners[:, 1]).abs()
    ours = box_iou.shoelace(x.gather(0, index), y.gather(0, index))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)


# ------------------------------------------------------------------------------------ suppression

def scores_of(count, seed):
    """Return scores that all differ: mmcv's own sort breaks ties as it likes."""
    return (torch.randperm(count, generator=torch.Generator().manual_seed(seed)) + 1) / (count + 1)


@pytest.mark.compiled
@pytest.mark.parametrize('labels', [False, True])
@pytest.mark.parametrize('threshold', [0., 0.1, 0.5])
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_kept_boxes_are_those_of_compiled_mmcv(ours_and_theirs, dtype, threshold, labels):
    boxes, scores = rotated_in(120., 150, 1).to(dtype), scores_of(150, 1).to(dtype)
    classes = torch.arange(150).to(dtype) % 3 if labels else None
    x1, y1, x2, y2 = (boxes_in(120., 120, 2) + torch.tensor([0, 0, 3, 3])).T
    quads = torch.stack([x1, y1, x2, y1 + 2, x2 - 1, y2, x1, y2 - 1], 1)
    for found, expected in (
            ours_and_theirs(nms_rotated, boxes, scores, threshold, classes),
            ours_and_theirs(nms_quadri, quads, scores[:120].float(), max(threshold, 0.1))):
        assert torch.equal(found[1], expected[1]) and torch.equal(found[0], expected[0])


def test_kept_boxes_follow_the_definition():
    boxes, scores = rotated_in(90., 60, 4), scores_of(60, 4)
    rows, kept = boxes.double().tolist(), []
    for i in scores.argsort(descending=True).tolist():
        if all(overlap_of(rows[k], rows[i], 'iou') < 0.2 for k in kept):
            kept.append(i)
    assert 10 < len(kept) < 50
    assert nms_rotated(boxes, scores, 0.2)[1].tolist() == kept
    assert nms_quadri(quads_of(boxes), scores, 0.2)[1].tolist() == kept


def test_ties_of_rotated_boxes_go_to_the_lower_index_whatever_order_is_given():
    boxes = torch.tensor([[0., 0, 10, 10, .3], [0, 0, 10, 10, .3], [50, 0, 10, 10, .3]])
    scores, wrong = torch.full((3,), 0.5), torch.tensor([2, 1, 0])
    kept = nms_kernels.nms_rotated(boxes, scores, wrong, boxes[wrong], torch.zeros(0), 0.5, 0)
    assert kept.tolist() == [0, 2]


# --------------------------------------------------------------------------------------- features

# image, center x, center y, width, height, angle: inside, across edges, outside, tiny, empty.
ROTATED = torch.tensor([
    [0, 5, 6, 8, 5, 0.4], [1, 0, 1, 9, 4, -1.3], [1, 12, 9, 6, 20, 3.0], [0, 40, 30, 5, 5, 0.1],
    [1, 5, 5, 0.3, 0.4, 7.], [0, 6, 5, 0, 0, 1.], [1, 6, 5, 30, 30, 2.]], dtype=torch.float64)


def naive_rotated(feature, rois, bins, scale, ratio, aligned, clockwise):
    out = torch.zeros(len(rois), feature.shape[1], *bins, dtype=feature.dtype)
    for k, (image, x, y, w, h, angle) in enumerate(rois.tolist()):
        offset = 0.5 if aligned else 0.
        cx, cy, w, h = x * scale - offset, y * scale - offset, w * scale, h * scale
        if not aligned:
            w, h = max(w, 1.), max(h, 1.)
        angle = -angle if clockwise else angle
        rows = ratio if ratio > 0 else math.ceil(h / bins[0])
        columns = ratio if ratio > 0 else math.ceil(w / bins[1])
        for i, j, a, b in np.ndindex(*bins, rows, columns):
            v = -h / 2 + (i + (a + 0.5) / rows) * h / bins[0]
            u = -w / 2 + (j + (b + 0.5) / columns) * w / bins[1]
            out[k, :, i, j] += sample(feature, int(image),
                                      v * math.cos(angle) - u * math.sin(angle) + cy,
                                      v * math.sin(angle) + u * math.cos(angle) + cx
                                      ) / (rows * columns)
    return out


@pytest.mark.parametrize('clockwise', [True, False])
@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 2])
def test_roi_align_rotated_follows_its_definition(wave, ratio, aligned, clockwise):
    feature, arguments = wave(2, 3, 11, 13), (BINS, SCALE, ratio, aligned, clockwise)
    torch.testing.assert_close(roi_align_rotated(feature, ROTATED, *arguments),
                               naive_rotated(feature, ROTATED, *arguments), rtol=1e-12, atol=1e-12)


def test_a_box_that_is_not_rotated_or_curved_is_roi_align(wave):
    feature = wave(2, 3, 11, 13)
    expected = roi_align(feature, torch.tensor([[1, 2, 2, 10, 8]]).double(), 3, 1., 2)
    rotated = torch.tensor([[1, 6, 5, 8, 6, 0.]]).double()
    torch.testing.assert_close(roi_align_rotated(feature, rotated, 3, 1., 2, True), expected,
                               rtol=1e-12, atol=1e-12)


def naive_bezier(feature, rois, bins, scale, ratio):
    """One sample in a bin of the straight formula: at its upper left, between both curves."""
    out = torch.zeros(len(rois), feature.shape[1], *bins, dtype=feature.dtype)
    for k, row in enumerate(rois.tolist()):
        image, points = int(row[0]), np.array(row[1:]).reshape(8, 2) * scale
        upper, lower = points[:4], points[:3:-1]
        width, height = np.maximum(*(np.abs(edge[0] - edge[3]) for edge in (upper, lower)))
        for i, j, a, b in np.ndindex(*bins, ratio, ratio):
            u, v = j / bins[1], i / bins[0]
            share = np.array([(1 - u) ** 3, 3 * u * (1 - u) ** 2, 3 * u * u * (1 - u), u ** 3])
            x, y = share @ lower * v + share @ upper * (1 - v) - 0.5
            step_h, step_w = height / bins[0], width / bins[1]
            out[k, :, i, j] += sample(feature, image, y - step_h / 2 + (a + 0.5) * step_h / ratio,
                                      x - step_w / 2 + (b + 0.5) * step_w / ratio) / ratio ** 2
    return out


def test_bezier_align_follows_its_definition(wave):
    rois = wave(6, 17, phase=1) * 12 + 6
    rois[:, 0] = torch.arange(6) % 2
    feature = wave(2, 3, 11, 13)
    torch.testing.assert_close(bezier_align(feature, rois, (2, 4), SCALE, 2, True),
                               naive_bezier(feature, rois, (2, 4), SCALE, 2), rtol=1e-12,
                               atol=1e-12)


@pytest.mark.parametrize('points', [1, 5])
def test_rotated_feature_align_follows_its_definition(wave, points):
    feature, anchors = wave(2, 3, 4, 5), wave(2, 4, 5, 5, phase=2) * 4 + 3
    out = rotated_feature_align(feature, anchors, SCALE, points)
    for image, i, j in np.ndindex(2, 4, 5):
        # mmcv reads y before x
        y, x, w, h, angle = anchors[image, i, j].tolist()
        at = [(x * SCALE, y * SCALE)]
        if points == 5:
            at += corners_of(x * SCALE, y * SCALE, w * SCALE, h * SCALE, angle)
        expected = feature[image, :, i, j] + sum(sample(feature, image, py, px) for px, py in at)
        torch.testing.assert_close(out[image, :, i, j], expected, rtol=1e-12, atol=1e-12)


# Stored from mmcv's compiled CPU kernels.
GOLDEN = {
    'roi_align_rotated': lambda wave, feature: roi_align_rotated(
        feature, ROTATED, BINS, SCALE, 0, True, False),
    'bezier_align': lambda wave, feature: bezier_align(
        feature, torch.cat((torch.arange(6)[:, None] % 2, wave(6, 17, phase=1)[:, 1:] * 12 + 6), 1),
        (2, 4), SCALE, 0, True),
    'rotated_feature_align': lambda wave, feature: rotated_feature_align(
        feature, wave(2, 11, 13, 5, phase=2) * 8 + 6, SCALE, 1),
}


@pytest.mark.parametrize('name', GOLDEN)
def test_values_are_kept(wave, check_golden, name):
    feature = wave(2, 2, 11, 13).requires_grad_()
    check_golden(name, dict(zip(('out', 'grad'),
                                with_gradients(GOLDEN[name](wave, feature), feature))))


def test_boxes_of_negative_size_are_pooled_as_on_cuda(wave):
    malformed = torch.tensor([[0, 5, 5, -4, -3, 0.]], dtype=torch.float64)
    out = roi_align_rotated(wave(2, 3, 11, 13), malformed, 2, 1., 2)
    assert out.isfinite().all() and out.count_nonzero() == out.numel()


# ---------------------------------------------------------------------------------------- filters

def rotations(orientations=8, kernel=3, count=8):
    """Return indices that send every entry of a filter to a position of its own, each rotation."""
    random = torch.Generator().manual_seed(0)
    entries = orientations * kernel * kernel
    index = torch.stack([torch.randperm(entries, generator=random) for _ in range(count)], 1) + 1
    return index.view(orientations, kernel, kernel, count).int()


def test_rotated_filters_have_every_entry_where_it_belongs():
    filters, indices = torch.arange(2 * 3 * 4.).view(2, 3, 4, 1, 1), rotations(4, 1, 2)
    out = active_rotated_filter(filters, indices)
    for o, i, entry, turn in np.ndindex(2, 3, 4, 2):
        target = int(indices.view(4, 2)[entry, turn]) - 1
        assert out[o * 2 + turn, i * 4 + target, 0, 0] == filters[o, i, entry, 0, 0]


@pytest.mark.compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_rotated_filters_whose_entries_collide_have_the_bits_of_compiled_mmcv(ours_and_theirs,
                                                                              dtype):
    random = torch.Generator().manual_seed(1)
    filters = torch.randn(4, 3, 8, 3, 3, generator=random).to(dtype).requires_grad_()
    indices = rotations()
    indices[0, 0, 0], indices[1, 0, 0] = indices[1, 0, 0].clone(), indices[2, 0, 0].clone()
    upstream = torch.randn(32, 24, 3, 3, generator=random)
    for pair in zip(*ours_and_theirs(lambda: with_gradients(
            active_rotated_filter(filters, indices), filters, upstream))):
        assert torch.equal(*pair)
