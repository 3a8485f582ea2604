"""Rotated and curved RoI operators, rotated anchors, borders."""
import math

import pytest
import torch
from mmcv.ops import (
    bezier_align,
    border_align,
    riroi_align_rotated,
    roi_align,
    roi_align_rotated,
    rotated_feature_align,
)

from mmrepro import ops
from mmrepro.ops import gather

pytestmark = pytest.mark.usefixtures('torch_operators')

# image, center x, center y, width, height, angle: inside, across edges, outside, tiny, empty.
ROTATED = [[0, 5, 6, 8, 5, 0.4], [1, 0, 1, 9, 4, -1.3], [1, 12, 9, 6, 20, 3.0],
          [0, 40, 30, 5, 5, 0.1], [1, 5, 5, 0.3, 0.4, 7.], [0, 6, 5, 0, 0, 1.],
          [1, 6, 5, 30, 30, 2.]]

# How each operator is called, on features (N, 8, 11, 13) and a scale of 0.75.
OPERATORS = {
    'rotated': lambda f, boxes: roi_align_rotated(f, boxes['rotated'], (3, 2), 0.75, 0, True,
                                                  False),
    'rotated_2': lambda f, boxes: roi_align_rotated(f, boxes['rotated'], (3, 2), 0.75, 2, False,
                                                    True),
    'bezier': lambda f, boxes: bezier_align(f, boxes['curved'], (2, 4), 0.75, 0, True),
    'bezier_2': lambda f, boxes: bezier_align(f, boxes['curved'], (2, 4), 0.75, 2, False),
    'anchors_1': lambda f, boxes: rotated_feature_align(f, boxes['anchors'], 0.75, 1),
    'anchors_5': lambda f, boxes: rotated_feature_align(f, boxes['anchors'], 0.75, 5),
    'orientations': lambda f, boxes: riroi_align_rotated(f, boxes['rotated'], (3, 2), 0.75, 0, 4,
                                                         False),
    'orientations_2': lambda f, boxes: riroi_align_rotated(f, boxes['rotated'], (3, 2), 0.75, 2, 8,
                                                           True),
    'border': lambda f, boxes: border_align(f, boxes['sides'], 3),
}
COMPILED_ON_CPU = ['rotated', 'rotated_2', 'bezier', 'bezier_2', 'anchors_1', 'anchors_5']


@pytest.fixture
def inputs(wave):
    """Features and the boxes of every operator."""

    def make(dtype=torch.float64, size=(11, 13), channels=8):
        h, w = size
        curved = wave(6, 17, phase=1) * 12 + 6
        curved[:, 0] = torch.arange(6) % 2
        anchors = wave(2, h, w, 5, phase=2) * 8 + 6
        sides = wave(2, h * w, 4, phase=3) * 5 + 4
        sides[..., 2:] += sides[..., :2].abs()
        boxes = dict(rotated=torch.tensor(ROTATED, dtype=torch.float64), curved=curved,
                     anchors=anchors, sides=sides)
        return (wave(2, channels, h, w).to(dtype).requires_grad_(),
                {name: box.to(dtype) for name, box in boxes.items()})

    return make


def run(name, feature, boxes):
    out = OPERATORS[name](feature, boxes)
    up = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad(out, feature, up)


def sample(feature, image, y, x):
    """A bilinear sample (C,) under the clamping rule."""
    _, channels, height, width = feature.shape
    if y < -1 or y > height or x < -1 or x > width:
        return torch.zeros(channels, dtype=feature.dtype)
    y, x = min(max(y, 0.), height - 1.), min(max(x, 0.), width - 1.)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    fy, fx = y - top, x - left
    return ((1 - fy) * (1 - fx) * feature[image, :, top, left]
            + (1 - fy) * fx * feature[image, :, top, right]
            + fy * (1 - fx) * feature[image, :, bottom, left]
            + fy * fx * feature[image, :, bottom, right])


def naive_rotated(feature, rois, bins, scale, ratio, offset, at_least_one, clockwise):
    out = torch.zeros(len(rois), feature.shape[1], *bins, dtype=feature.dtype)
    for k, (image, x, y, w, h, angle) in enumerate(rois.tolist()):
        cx, cy, w, h = x * scale - offset, y * scale - offset, w * scale, h * scale
        if at_least_one:
            w, h = max(w, 1.), max(h, 1.)
        angle = -angle if clockwise else angle
        rows = ratio if ratio > 0 else math.ceil(h / bins[0])
        columns = ratio if ratio > 0 else math.ceil(w / bins[1])
        for i in range(bins[0]):
            for j in range(bins[1]):
                for a in range(rows):
                    for b in range(columns):
                        v = -h / 2 + (i + (a + 0.5) / rows) * h / bins[0]
                        u = -w / 2 + (j + (b + 0.5) / columns) * w / bins[1]
                        out[k, :, i, j] += sample(
                            feature, int(image), v * math.cos(angle) - u * math.sin(angle) + cy,
                            v * math.sin(angle) + u * math.cos(angle) + cx) / (rows * columns)
    return out


@pytest.mark.parametrize('clockwise', [True, False])
@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 2])
def test_rotated_roi_align_follows_its_definition(inputs, ratio, aligned, clockwise):
    feature, boxes = inputs()
    out = roi_align_rotated(feature, boxes['rotated'], (3, 2), 0.75, ratio, aligned, clockwise)
    expected = naive_rotated(feature, boxes['rotated'], (3, 2), 0.75, ratio,
                             0.5 if aligned else 0., not aligned, clockwise)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_box_that_is_not_turned_is_roi_align(inputs):
    feature, _ = inputs()
    out = roi_align_rotated(feature, torch.tensor([[1, 6, 5, 8, 6, 0.]]).double(), 3, 1., 2, True)
    expected = roi_align(feature, torch.tensor([[1, 2, 2, 10, 8]]).double(), 3, 1., 2)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('count', [1, 4, 8])
def test_orientations_follow_their_definition(inputs, count):
    feature, boxes = inputs()
    straight = naive_rotated(feature, boxes['rotated'], (3, 2), 0.75, 2, 0., True, False)
    expected = torch.zeros_like(straight)
    for k, roi in enumerate(ROTATED):
        steps = roi[5] * count / (2 * math.pi)
        first, past = math.floor(steps), steps - math.floor(steps)
        for channel in range(8):
            group, o = channel // count * count, channel % count
            near = (o - first) % count
            expected[k, channel] = ((1 - past) * straight[k, group + near]
                                    + past * straight[k, group + (near + 1) % count])
    out = riroi_align_rotated(feature, boxes['rotated'], (3, 2), 0.75, 2, count, False)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_border_align_follows_its_definition(inputs):
    feature, boxes = inputs(size=(4, 5))
    out = border_align(feature, boxes['sides'], 3)
    for image in range(2):
        for box, (x1, y1, x2, y2) in enumerate(boxes['sides'][image].tolist()):
            corners = [(x1, y1, x2, y1), (x1, y1, x1, y2), (x2, y2, x1, y2), (x2, y2, x2, y1)]
            for side, (ax, ay, bx, by) in enumerate(corners):
                quarter = feature[:, side * 2:side * 2 + 2]
                values = [sample(quarter, image, ay + (by - ay) * i / 3, ax + (bx - ax) * i / 3)
                          for i in range(4)]
                torch.testing.assert_close(out[image, :, box, side], torch.stack(values).amax(0),
                                           rtol=1e-11, atol=1e-11)


@pytest.mark.compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', COMPILED_ON_CPU)
def test_agreement_with_compiled_mmcv(inputs, compiled, name, dtype):
    ours = run(name, *inputs(dtype))
    with compiled():
        theirs = run(name, *inputs(dtype))
    # mmcv takes the cosine of an anchor's angle in float32 whatever the dtype.
    tolerance = 2e-5 if dtype == torch.float32 or name == 'anchors_5' else 1e-12
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('name', ['rotated', 'bezier', 'anchors_1'])
def test_values_are_kept(inputs, golden, name):
    """Stored from mmcv's compiled CPU kernel."""
    golden(name, dict(zip(('out', 'grad'), run(name, *inputs(channels=2)))))


@pytest.mark.parametrize('name', OPERATORS)
def test_chunks_are_invisible_in_the_forward_and_rounding_in_the_backward(inputs, monkeypatch,
                                                                          name):
    whole = run(name, *inputs())
    monkeypatch.setattr(gather, 'CHUNK_TAPS', {'cpu': 1})
    monkeypatch.setattr(gather, 'CHUNK_SHARE', 0)
    monkeypatch.setattr(gather, 'CHUNK_ELEMENTS', {'cpu': 1})
    parts = run(name, *inputs())
    assert torch.equal(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', OPERATORS)
def test_low_precision_sums_in_float32(inputs, name, dtype):
    feature, boxes = inputs(dtype)
    wide = feature.detach().float().requires_grad_()
    out, expected = OPERATORS[name](feature, boxes), OPERATORS[name](
        wide, {key: box.float() for key, box in boxes.items()})
    up = torch.ones_like(out)
    grads = torch.autograd.grad(out, feature, up), torch.autograd.grad(expected, wide, up.float())
    assert out.dtype == dtype and torch.equal(out, expected.to(dtype))
    assert torch.equal(grads[0][0], grads[1][0].to(dtype))


@pytest.mark.parametrize('name', OPERATORS)
def test_what_is_empty_or_strided_is_taken(inputs, name):
    feature, boxes = inputs()
    expected = OPERATORS[name](feature, boxes)
    last = feature.detach().contiguous(memory_format=torch.channels_last)
    assert torch.equal(OPERATORS[name](last, boxes), expected)
    if name.startswith(('anchors', 'border')):
        none = {key: box[:0] for key, box in boxes.items()}
        assert OPERATORS[name](feature[:0], none).numel() == 0
    else:
        none = {key: box[:0] for key, box in boxes.items()}
        out = OPERATORS[name](feature, none)
        assert out.shape == (0, *expected.shape[1:])
        assert torch.autograd.grad(out.sum(), feature)[0].count_nonzero() == 0


def test_what_is_refused_is_named_with_its_shape(inputs):
    feature, boxes = inputs()
    for name, box, message in (
            ('rotated', dict(rotated=torch.zeros(3, 5).double()), r'rois must have shape \(N, 6\)'),
            ('bezier', dict(curved=torch.zeros(1, 17)), 'rois must be float64'),
            ('anchors_5', dict(anchors=torch.zeros(2, 3, 3, 5)), r'shape \(2, 11, 13, 5\)'),
            ('orientations', dict(rotated=torch.full((1, 6), 2.).double()), 'images 2 to 2')):
        with pytest.raises((RuntimeError, AssertionError), match=message):
            OPERATORS[name](feature, {**boxes, **box})
    with pytest.raises(RuntimeError, match='8 channels are not divisible by num_orientations 3'):
        riroi_align_rotated(feature, boxes['rotated'], 2, 1., 2, 3)
    with pytest.raises(RuntimeError, match=r'on input \(2, 8, 0, 13\), which has no pixels'):
        border_align(feature[:, :, :0], boxes['sides'], 2)


def test_a_malformed_size_is_read_as_on_cuda(inputs):
    feature, _ = inputs()
    with ops.using('torch'):
        out = roi_align_rotated(feature, torch.tensor([[0, 5, 5, -4, -3, 0.]]).double(), 2, 1., 2)
    assert out.isfinite().all() and out.count_nonzero() == out.numel()
