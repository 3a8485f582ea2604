"""RoIPool, precise RoI pooling and deformable RoI pooling; mmcv has no CPU kernels for them."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import deform_roi_pool, roi_align, roi_pool
from mmcv.ops import prroi_pool as float32_prroi_pool

from mmrepro import ops
from mmrepro.ops.mmcv import roi_pool as pool
from mmrepro.ops.mmcv.prroi_pool import (
    prroi_pool_backward,
    prroi_pool_coor_backward,
    prroi_pool_forward,
)

pytestmark = pytest.mark.usefixtures('torch_operators')

# Inside, across every edge, outside, tiny, one pixel, larger than the map.
ROIS = [[0, 1, 2, 9, 7], [1, -4, -3, 5, 6], [1, 8, 5, 20, 19], [0, 30, 30, 50, 44],
        [0, 3.3, 2.2, 3.9, 2.4], [0, 5, 5, 6, 6], [1, -20, -20, 40, 40], [0, 0, 0, 13, 11]]
SCALE = 0.75


class Precise(torch.autograd.Function):
    """mmcv's ``prroi_pool`` without its check that everything is float32."""

    @staticmethod
    def forward(ctx, feature, rois, bins, scale):
        bins = (bins, bins) if isinstance(bins, int) else bins
        out = feature.new_zeros(len(rois), feature.shape[1], *bins)
        prroi_pool_forward(feature, rois, out, *bins, scale)
        ctx.save_for_backward(feature, rois, out)
        ctx.args = (*bins, scale)
        return out

    @staticmethod
    def backward(ctx, grad):
        feature, rois, out = ctx.saved_tensors
        grads = torch.zeros_like(feature), torch.zeros_like(rois)
        prroi_pool_backward(grad, rois, grads[0], *ctx.args)
        prroi_pool_coor_backward(out, grad, feature, rois, grads[1], *ctx.args)
        return *grads, None, None


prroi_pool = Precise.apply


def naive_pool(feature, rois, bins, scale):
    _, channels, height, width = feature.shape
    out = torch.zeros(len(rois), channels, *bins, dtype=feature.dtype)
    for k, (image, x1, y1, x2, y2) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = x1 * scale, y1 * scale, (x2 + 1) * scale, (y2 + 1) * scale
        if x2 <= x1 or y2 <= y1:
            continue
        for i in range(bins[0]):
            for j in range(bins[1]):
                top = min(max(math.floor(i * (y2 - y1) / bins[0] + y1), 0), height)
                bottom = min(max(math.ceil((i + 1) * (y2 - y1) / bins[0] + y1), 0), height)
                left = min(max(math.floor(j * (x2 - x1) / bins[1] + x1), 0), width)
                right = min(max(math.ceil((j + 1) * (x2 - x1) / bins[1] + x1), 0), width)
                if bottom > top and right > left:
                    out[k, :, i, j] = feature[int(image), :, top:bottom, left:right].amax((1, 2))
    return out


def surface(feature, image, y, x):
    """The bilinear surface that falls to zero outside, at one point: (C,)."""
    _, channels, height, width = feature.shape
    value = torch.zeros(channels, dtype=feature.dtype)
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            if 0 <= row < height and 0 <= column < width:
                value = value + ((1 - abs(y - row)) * (1 - abs(x - column))
                                 * feature[image, :, row, column])
    return value


def cuts(start, end):
    """Where a bilinear surface may bend between two points, and the two."""
    return [start, *(i for i in range(math.ceil(start), math.floor(end) + 1) if start < i < end),
            end]


def naive_precise(feature, rois, bins, scale):
    """The integral, exact by the midpoint rule: the surface is linear in y and x between cuts."""
    out = torch.zeros(len(rois), feature.shape[1], *bins, dtype=feature.dtype)
    for k, (image, *box) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (edge * scale for edge in box)
        h, w = max(y2 - y1, 0) / bins[0], max(x2 - x1, 0) / bins[1]
        if h * w == 0:
            continue
        for i in range(bins[0]):
            for j in range(bins[1]):
                ys = cuts(y1 + i * h, y1 + (i + 1) * h)
                xs = cuts(x1 + j * w, x1 + (j + 1) * w)
                for a, b in zip(ys, ys[1:]):
                    for c, d in zip(xs, xs[1:]):
                        out[k, :, i, j] += ((b - a) * (d - c) / (h * w) * surface(
                            feature, int(image), (a + b) / 2, (c + d) / 2))
    return out


def test_roi_pool_follows_its_definition(wave):
    feature, rois = wave(2, 3, 11, 13), torch.tensor([*ROIS, [1, 5, 5, 2, 9]], dtype=torch.float64)
    out = roi_pool(feature, rois, (3, 2), SCALE)
    assert torch.equal(out, naive_pool(feature, rois, (3, 2), SCALE))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_roi_pool_and_precise_pooling_follow_their_definitions_for_any_shape(data):
    n, c, h, w = (data.draw(st.integers(1, high)) for high in (2, 3, 6, 6))
    bins = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    corner, size = st.floats(-4, 10, width=16), st.floats(0, 9, width=16)
    rois = []
    for _ in range(data.draw(st.integers(0, 3))):
        x, y = data.draw(corner), data.draw(corner)
        rois.append([data.draw(st.integers(0, n - 1)), x, y, x + data.draw(size),
                     y + data.draw(size)])
    rois = torch.tensor(rois, dtype=torch.float64).view(-1, 5)
    feature = torch.randn(n, c, h, w, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    scale = data.draw(st.sampled_from([1., 0.5, 0.3125]))
    with ops.using('torch'):
        assert torch.equal(roi_pool(feature, rois, bins, scale),
                           naive_pool(feature, rois, bins, scale))
        torch.testing.assert_close(prroi_pool(feature, rois, bins, scale),
                                   naive_precise(feature, rois, bins, scale), rtol=1e-9, atol=1e-9)


def test_ties_go_to_the_first_pixel_and_nan_never_wins():
    feature = torch.zeros(1, 1, 3, 3, requires_grad=True)
    roi = torch.tensor([[0., 0, 0, 2, 2]])
    out = roi_pool(feature, roi, 1)
    grad, = torch.autograd.grad(out, feature)
    assert grad.flatten().tolist() == [1] + [0] * 8
    nan = torch.full((1, 1, 3, 3), float('nan'))
    assert roi_pool(nan, roi, 1).item() == pool.LOWEST
    nan[0, 0, 1, 1] = -5
    assert roi_pool(nan, roi, 1).item() == -5


def test_gradients_of_precise_pooling_of_features_and_of_boxes(wave):
    feature = wave(2, 2, 6, 5).requires_grad_()
    # Edges away from whole pixels, where the integral along an edge has no kink.
    rois = torch.tensor([[0, 0.3, 0.2, 4.1, 3.7], [1, -1.3, 1.1, 2.2, 7.9], [1, 2.1, 2.2, 2.9, 2.8],
                         [0, 20.2, 20.3, 24.7, 25.1]], dtype=torch.float64)
    box = rois[:, 1:].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f, b: prroi_pool(f, torch.cat((rois[:, :1], b), 1), (2, 3), SCALE), (feature, box),
        fast_mode=True)


def test_precise_pooling_through_mmcv(wave):
    feature, rois, _ = inputs(wave, torch.float32)
    results = []
    for form in (float32_prroi_pool, prroi_pool):
        leaves = feature.clone().requires_grad_(), rois.clone().requires_grad_()
        out = form(*leaves, (3, 2), SCALE)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_precise_pooling_of_an_empty_box_is_zero_and_has_no_gradient(wave):
    feature = wave(1, 2, 6, 5).requires_grad_()
    rois = torch.tensor([[0, 2, 2, 2, 4], [0, 3, 3, 1, 1]], dtype=torch.float64).requires_grad_()
    out = prroi_pool(feature, rois, 2, 1.)
    grads = torch.autograd.grad(out, (feature, rois), torch.ones_like(out))
    assert out.count_nonzero() == 0 and all(g.count_nonzero() == 0 for g in grads)


@pytest.mark.parametrize('ratio', [0, 2])
def test_deformable_pooling_without_offsets_is_roi_align(wave, ratio):
    feature, rois = wave(2, 3, 11, 13), torch.tensor(ROIS, dtype=torch.float64)
    out = deform_roi_pool(feature, rois, None, (3, 2), SCALE, ratio, 0.125)
    expected = roi_align(feature, rois, (3, 2), SCALE, ratio)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    zeros = torch.zeros(len(rois), 2, 3, 2, dtype=torch.float64)
    assert torch.equal(deform_roi_pool(feature, rois, zeros, (3, 2), SCALE, ratio, 0.125), out)


def test_deformable_pooling_moves_each_bin_by_its_offset(wave):
    feature, rois = wave(2, 3, 11, 13), torch.tensor(ROIS, dtype=torch.float64)
    offset = wave(len(rois), 2, 3, 2, phase=1)
    out = deform_roi_pool(feature, rois, offset, (3, 2), SCALE, 2, 0.125)
    for k in range(len(rois)):
        size = rois[k, 3:] - rois[k, 1:3]
        for i in range(3):
            for j in range(2):
                moved = rois[k:k + 1].clone()
                moved[0, 1:] += (0.125 * offset[k, :, i, j] * size).repeat(2)
                expected = roi_align(feature, moved, (3, 2), SCALE, 2)[0, :, i, j]
                torch.testing.assert_close(out[k, :, i, j], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize('ratio', [0, 2])
def test_gradients_of_deformable_pooling(wave, ratio):
    feature = wave(2, 2, 12, 12).requires_grad_()
    # Inside: on the edge mmcv's gradient of an offset is not the derivative.
    rois = torch.tensor([[0, 2.3, 2.1, 9.2, 8.7], [1, 3.2, 3.4, 6.1, 9.3]], dtype=torch.float64)
    offset = wave(2, 2, 2, 3, phase=1).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda f, o: deform_roi_pool(f, rois, o, (2, 3), 1., ratio, 0.1), (feature, offset),
        fast_mode=True)


def test_gradient_of_an_offset_beyond_the_edge_is_that_of_mmcv(wave):
    feature = wave(1, 1, 4, 4)
    # One sample, at y = -0.5, x = 1.25: clamped to row 0, slope from rows 0 and 1.
    rois = torch.tensor([[0, 1.25, -0.5, 2.25, 0.5]], dtype=torch.float64)
    offset = torch.zeros(1, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    out = deform_roi_pool(feature, rois, offset, 1, 1., 1, 1.)
    grad, = torch.autograd.grad(out, offset)
    f = feature[0, 0]
    # mmcv: input_11 (y - y0) + input_10 (y1 - y) + input_01 (y0 - y) + input_00 (y - y1).
    by_x = f[1, 2] * -0.5 + f[0, 2] * 1.5 + f[1, 1] * 0.5 + f[0, 1] * -1.5
    by_y = f[1, 2] * 0.25 + f[1, 1] * 0.75 + f[0, 2] * -0.25 + f[0, 1] * -0.75
    torch.testing.assert_close(grad.flatten(), torch.stack((by_x, by_y)), rtol=1e-12, atol=1e-12)


OPERATORS = {
    'pool': lambda f, rois, offset: roi_pool(f, rois, (3, 2), SCALE),
    'precise': lambda f, rois, offset: prroi_pool(f, rois, (3, 2), SCALE),
    'deform': lambda f, rois, offset: deform_roi_pool(f, rois, offset, (3, 2), SCALE, 0, 0.1),
}
# What each operator has a gradient for.
LEAVES = {'pool': (0,), 'precise': (0, 1), 'deform': (0, 2)}


def run(name, *tensors):
    leaves = [tensors[i].requires_grad_() for i in LEAVES[name]]
    out = OPERATORS[name](*tensors)
    up = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    return out, *torch.autograd.grad(out, leaves, up)


def inputs(wave, dtype=torch.float64, copies=1, size=(11, 13), channels=3):
    rois = torch.tensor(ROIS * copies)
    return (wave(2, channels, *size).to(dtype), rois.to(dtype),
            wave(len(rois), 2, 3, 2, phase=1).to(dtype))


@pytest.mark.parametrize('name', OPERATORS)
def test_values_are_kept(wave, golden, name):
    found = run(name, *inputs(wave))
    golden(f'roi_{name}', {f'result_{i}': one for i, one in enumerate(found)})


@pytest.mark.parametrize('name', OPERATORS)
def test_chunks_change_rounding_at_most(wave, monkeypatch, name):
    from mmrepro.ops import gather
    whole = run(name, *inputs(wave))
    monkeypatch.setattr(gather, 'CHUNK_TAPS', {'cpu': 1})
    monkeypatch.setattr(gather, 'CHUNK_SHARE', 0)
    monkeypatch.setattr(gather, 'CHUNK_ELEMENTS', {'cpu': 1})
    for one, other in zip(whole, run(name, *inputs(wave))):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('name', OPERATORS)
def test_what_is_empty_strided_or_lost_is_taken(wave, name):
    feature, rois, offset = inputs(wave)
    expected = OPERATORS[name](feature, rois, offset)
    last = feature.contiguous(memory_format=torch.channels_last)
    assert torch.equal(OPERATORS[name](last, rois, offset), expected)
    none = OPERATORS[name](feature.requires_grad_(), rois[:0], offset[:0])
    assert none.shape == (0, 3, 3, 2)
    assert torch.autograd.grad(none.sum(), feature)[0].count_nonzero() == 0
    lost = rois.clone()
    lost[0, 1] = float('nan')
    out = OPERATORS[name](feature, lost, offset)
    assert torch.equal(out[1:], expected[1:]) and out[0].count_nonzero() == 0


@pytest.mark.parametrize('name', OPERATORS)
def test_what_is_refused_is_named_with_its_shape(wave, name):
    feature, rois, offset = inputs(wave)
    with pytest.raises(RuntimeError, match='rois must be float64'):
        OPERATORS[name](feature, rois.float(), offset)
    with pytest.raises(RuntimeError, match='images 0 to 1.*images 0 to 0'):
        OPERATORS[name](feature[:1], rois, offset)
    if name == 'deform':
        with pytest.raises(RuntimeError, match=r'offset must have shape \(8, 2, 3, 2\)'):
            OPERATORS[name](feature, rois, offset[:, :1])
    with pytest.raises(RuntimeError, match='images 0 to 1.*no images'):
        OPERATORS[name](feature[:0], rois, offset)
    with pytest.raises(RuntimeError, match=r'8 rois on input \(2, 3, 0, 13\).*has no pixels'):
        OPERATORS[name](feature[:, :, :0], rois, offset)


def test_a_zero_has_no_sign_wherever_a_vector_ends(wave):
    """The maximum of -0 and 0 is either, by position in a vector; equal boxes must not differ."""
    feature = torch.where(wave(1, 17, 16, 16) < 0, -0., 0.)
    out = roi_pool(feature, torch.tensor([[0, 2., 2, 9, 9]]).repeat(101, 1), 7, 1.)
    assert out.count_nonzero() == 0 and not out.signbit().any()
