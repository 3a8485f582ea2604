"""RoI operators: RoIAlign, RoIPool and deformable pooling."""
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import deform_roi_pool, roi_align, roi_pool
from operators import with_gradients

from mmrepro import ops
from mmrepro.ops import sampling
from mmrepro.ops.mmcv import roi_align as align_kernels
from mmrepro.ops.mmcv.roi_pool import roi_pool_backward
from mmrepro.ops.mmcv.rois import LOWEST

pytestmark = pytest.mark.usefixtures('torch_operators')

NAN, INF = float('nan'), float('inf')
# Inside, across every edge, outside, tiny, empty, one pixel, larger than the map; two images.
ROIS = [[0, 1, 2, 9, 7], [1, -4, -3, 5, 6], [1, 8, 5, 20, 19], [0, 30, 30, 50, 44],
        [0, 3.3, 2.2, 3.9, 2.4], [1, 4, 4, 4, 4], [0, 5, 5, 6, 6], [1, -20, -20, 40, 40],
        [0, -9, 1, -8.2, 5], [0, 0, 0, 13, 11]]
SCALE = 0.75
BINS = (3, 2)


def sample(feature, image, y, x):
    """Return a bilinear sample (C,) under the clamping rule."""
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


def pooled(rois, bins, channels, value):
    """(K, C, *bins) of ``value(roi, i, j)``, a list of samples (C,) or their result."""
    out = torch.zeros(len(rois), channels, *bins, dtype=torch.float64)
    for k, roi in enumerate(rois.tolist()):
        for i, j in np.ndindex(*bins):
            out[k, :, i, j] = value(roi, i, j)
    return out


def naive_align(feature, rois, bins, scale, ratio, mode, aligned):
    offset = 0.5 if aligned else 0.

    def value(roi, i, j):
        x1, y1, x2, y2 = (edge * scale - offset for edge in roi[1:])
        w, h = (x2 - x1, y2 - y1) if aligned else (max(x2 - x1, 1.), max(y2 - y1, 1.))
        bin_h, bin_w = h / bins[0], w / bins[1]
        rows = ratio if ratio > 0 else math.ceil(bin_h)
        columns = ratio if ratio > 0 else math.ceil(bin_w)
        samples = [sample(feature, int(roi[0]), y1 + i * bin_h + (a + 0.5) * bin_h / rows,
                          x1 + j * bin_w + (b + 0.5) * bin_w / columns)
                   for a in range(rows) for b in range(columns)]
        if not samples:
            return 0. if mode == 'avg' else LOWEST
        return torch.stack(samples).mean(0) if mode == 'avg' else torch.stack(samples).amax(0)

    return pooled(rois, bins, feature.shape[1], value)


def naive_pool(feature, rois, bins, scale):
    _, _, height, width = feature.shape

    def value(roi, i, j):
        x1, y1, x2, y2 = roi[1] * scale, roi[2] * scale, (roi[3] + 1) * scale, (roi[4] + 1) * scale
        if x2 <= x1 or y2 <= y1:
            return 0.
        bin_h, bin_w = (y2 - y1) / bins[0], (x2 - x1) / bins[1]
        top, bottom = (min(max(edge, 0), height) for edge in (
            math.floor(i * bin_h + y1), math.ceil((i + 1) * bin_h + y1)))
        left, right = (min(max(edge, 0), width) for edge in (
            math.floor(j * bin_w + x1), math.ceil((j + 1) * bin_w + x1)))
        if bottom <= top or right <= left:
            return 0.
        return feature[int(roi[0]), :, top:bottom, left:right].amax((1, 2))

    return pooled(rois, bins, feature.shape[1], value)


def naive_deform(feature, rois, offset, bins, scale, ratio, gamma):
    """RoIAlign of the box of every bin, moved by the bin's offset."""
    out = torch.zeros(len(rois), feature.shape[1], *bins, dtype=torch.float64)
    for k, i, j in np.ndindex(len(rois), *bins):
        moved = rois[k:k + 1].clone()
        moved[0, 1:] += (gamma * offset[k, :, i, j] * (rois[k, 3:] - rois[k, 1:3])).repeat(2)
        out[k, :, i, j] = naive_align(feature, moved, bins, scale, ratio, 'avg', True)[0, :, i, j]
    return out


def boxes_of(wave, dtype=torch.float64, without=()):
    rois = torch.tensor([roi for number, roi in enumerate(ROIS) if number not in without])
    return dict(rois=rois.to(dtype), offset=wave(len(rois), 2, *BINS, phase=1).to(dtype))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_operator_follows_its_definition_for_any_shape(data):
    n, c, h, w = (data.draw(st.integers(1, high)) for high in (2, 3, 6, 6))
    bins = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    corner, size = st.floats(-4, 10, width=16), st.floats(0, 9, width=16)
    rois = []
    for _ in range(data.draw(st.integers(0, 3))):
        x, y = data.draw(corner), data.draw(corner)
        rois.append([data.draw(st.integers(0, n - 1)), x, y, x + data.draw(size),
                     y + data.draw(size)])
    rois = torch.tensor(rois, dtype=torch.float64).view(-1, 5)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    feature = torch.randn(n, c, h, w, dtype=torch.float64, generator=random)
    offset = torch.randn(len(rois), 2, *bins, dtype=torch.float64, generator=random)
    scale, ratio = data.draw(st.sampled_from([1., 0.5, 0.3125])), data.draw(st.integers(0, 3))
    arguments = (bins, scale, ratio, data.draw(st.sampled_from(['avg', 'max'])),
                 data.draw(st.booleans()))
    with ops.using('torch'):
        torch.testing.assert_close(roi_align(feature, rois, *arguments),
                                   naive_align(feature, rois, *arguments), rtol=1e-11, atol=1e-11)
        assert torch.equal(roi_pool(feature, rois, bins, scale),
                           naive_pool(feature, rois, bins, scale))
        if len(rois):  # mmcv's Python cannot take nothing
            deformed = rois, offset, bins, scale, ratio, 0.125
            torch.testing.assert_close(deform_roi_pool(feature, *deformed),
                                       naive_deform(feature, *deformed), rtol=1e-10, atol=1e-10)


# Stored from mmcv's compiled CPU kernels where these exist: channels, boxes that are left out,
# names of the stored tensors, the call and its last arguments.
GOLDEN = {
    **{f'roi_align_{mode}_{ratio}': (
        3, (5,), ('out', 'grad'),
        lambda f, b, *a: roi_align(f, b['rois'], BINS, SCALE, *a), (ratio, mode, True))
        for mode, ratio in (('avg', 0), ('avg', 2), ('max', 2))},
    'roi_pool': (3, (5, 8), ('result_0', 'result_1'),
                 lambda f, b: roi_pool(f, b['rois'], BINS, SCALE), ()),
    'roi_deform': (3, (5, 8), ('result_0', 'result_1', 'result_2'),
                   lambda f, b: deform_roi_pool(f, b['rois'], b['offset'], BINS, SCALE, 0, 0.1),
                   ()),
}


@pytest.mark.parametrize('name', GOLDEN)
def test_values_are_kept(wave, check_golden, name):
    channels, without, keys, call, arguments = GOLDEN[name]
    feature, boxes = wave(2, channels, 11, 13).requires_grad_(), boxes_of(wave, without=without)
    leaves = [feature]
    boxes['offset'].requires_grad_()
    if len(keys) == 3:
        leaves.append(boxes['offset'])
    out = call(feature, boxes, *arguments)
    upstream = wave(*out.shape, phase=2) if 'align' in name else None
    check_golden(name, dict(zip(keys, with_gradients(out, leaves, upstream))))


@pytest.mark.compiled
@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 2])
@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_boxes_of_all_sizes_agree_with_compiled_mmcv(wave, compiled, mode, ratio, aligned):
    rois = wave(1000, 5, phase=1).abs()
    rois[:, 0] = (rois[:, 0] * 2).floor()
    rois[:, 1:] = rois[:, 1:] * 400 - 20
    rois[:, 3:] = rois[:, 1:3] + 300 * rois[:, 3:].abs() / 400 + 1
    results = []
    for context in (compiled, lambda: ops.using('torch')):
        feature = wave(2, 4, 50, 44).requires_grad_()
        with context():
            out = roi_align(feature, rois, (7, 7), 0.13, ratio, mode, aligned)
            results.append(with_gradients(out, feature, wave(*out.shape, phase=2)))
    torch.testing.assert_close(*results, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('ratio', [0, 2])
def test_the_gradient_of_a_maximum_is_its_derivative(wave, ratio):
    rois = torch.tensor(ROIS[:7], dtype=torch.float64) * torch.tensor([1, .4, .4, .4, .4])
    assert torch.autograd.gradcheck(
        lambda f: roi_align(f, rois, BINS, 0.8, ratio, 'max', True),
        wave(2, 2, 5, 4).requires_grad_(), fast_mode=True)


@pytest.mark.parametrize('lost', [NAN, INF, -INF])
def test_a_box_outside_of_the_map_sends_no_gradient_to_pixels_that_it_did_not_win(lost):
    feature = torch.arange(30.).view(1, 1, 5, 6).requires_grad_()
    grads = [torch.autograd.grad(roi_align(feature, torch.tensor(boxes), 1, 1., 2, 'max').sum(),
                                 feature)[0]
             for boxes in ([[0, 1, 1, 4, 4.]], [[0, 1, 1, lost, 4], [0, 1, 1, 4, 4]])]
    assert torch.equal(*grads)


def test_positions_of_a_maximum_that_another_kernel_rounded_keep_their_gradient(wave):
    feature, rois = wave(1, 3, 8, 8), torch.tensor([[0., 1, 1, 7, 6]], dtype=torch.float64)
    out, y, x = (torch.zeros(1, 3, 2, 2, dtype=torch.float64) for _ in range(3))
    arguments = (2, 2, 1., 2, align_kernels.MAX, True)
    align_kernels.roi_align_forward(feature, rois, out, y, x, *arguments)
    exact, shifted = torch.zeros_like(feature), torch.zeros_like(feature)
    align_kernels.roi_align_backward(torch.ones_like(out), rois, y, x, exact, *arguments)
    align_kernels.roi_align_backward(torch.ones_like(out), rois, y + 1e-9, x, shifted, *arguments)
    assert exact.sum().item() == pytest.approx(12)
    assert torch.equal(shifted, exact)


@pytest.mark.parametrize('by_lines', [True, False])
def test_few_channels_may_be_read_by_lines(wave, monkeypatch, by_lines):
    monkeypatch.setattr(align_kernels, '_few_channels', lambda *_: by_lines)
    rois = torch.tensor(ROIS, dtype=torch.float64)
    for channels in (1, 3):
        feature = wave(2, channels, 11, 13)
        torch.testing.assert_close(
            roi_align(feature, rois, BINS, SCALE, 0, 'avg', True),
            naive_align(feature, rois, BINS, SCALE, 0, 'avg', True), rtol=1e-12, atol=1e-12)
    feature[:, :, :, 12] = NAN
    inside = torch.tensor([[0., 2, 2, 9, 9]], dtype=torch.float64)
    assert roi_align(feature, inside, BINS, 1., 0, 'avg', True).isfinite().all()


def test_filters_of_both_axes_at_once_are_those_of_each(wave):
    """The form for CUDA. Beyond the taps that count, padding may differ."""
    start, size = (wave(9, 2) * 20).unbind(1), ((wave(9, 2, phase=1.) + 1.1) * 6).unbind(1)
    for ratio, dtype in ((0, torch.float32), (2, torch.float64)):
        starts, sizes = [t.to(dtype) for t in start], [t.to(dtype) for t in size]
        grid = sampling.samples_per_bin(*sizes, ratio)
        most = int(grid.amax())
        both = sampling.both_axes(starts, sizes, grid, most, 7, (11, 13), ratio <= 0)
        for axis, length in enumerate((11, 13)):
            taps = sampling.axis_taps(starts[axis], sizes[axis], grid[axis], int(grid[axis].amax()),
                                      7, length, ratio <= 0)
            assert torch.equal(both[axis].number, taps.number)
            slots = min(both[axis].weight.shape[2], taps.weight.shape[2])
            real = torch.arange(slots) < taps.number[:, :, None]
            for together, alone in zip(both[axis][:2], taps[:2]):
                assert torch.equal(together[..., :slots][real], alone[..., :slots][real])


def test_boxes_that_are_not_finite_do_what_mmcv_does_on_cuda(wave):
    feature = wave(1, 2, 5, 5, dtype=torch.float32).requires_grad_()
    rois = torch.tensor([[0, NAN, 1, 4, 4], [0, 1, 1, 4, INF], [0, 1, 1, 4, 4]])
    adaptive = roi_align(feature, rois, 2, 1., 0, 'avg', True)
    assert adaptive[:2].count_nonzero() == 0 and adaptive[2].isfinite().all()
    fixed = roi_align(feature, rois[[0, 2]], 2, 1., 2, 'avg', True)
    assert fixed[0].isnan().all() and fixed[1].isfinite().all()
    assert (roi_align(feature, rois[:1], 2, 1., 2, 'max', True) == LOWEST).all()
    for lost in (roi_pool(feature, rois, BINS), deform_roi_pool(feature, rois, None, BINS)):
        assert lost[0].count_nonzero() == 0 and lost[2].isfinite().all()


def test_boxes_of_negative_size_are_empty_in_roi_pool_and_send_no_gradient(wave):
    """Whatever their argmax: mmcv's kernel leaves 0 there, the position of the first pixel."""
    malformed = torch.tensor([[1, 5, 5, 2, 9]], dtype=torch.float64)
    assert roi_pool(wave(2, 3, 11, 13), malformed, BINS, SCALE).count_nonzero() == 0
    rois = torch.tensor([[0., 0, 0, 3, 3], [0, 5, 5, 2, 9]])
    argmax, grad = torch.tensor([5, 0], dtype=torch.int32).view(2, 1, 1, 1), torch.zeros(1, 1, 4, 4)
    roi_pool_backward(torch.ones(2, 1, 1, 1), rois, argmax, grad, 1, 1, 1.)
    assert grad[0, 0, 1, 1].item() == 1 and grad.sum().item() == 1


def test_a_box_of_one_pixel_has_a_gradient_where_half_precision_has_no_odd_numbers():
    feature = torch.rand(1, 1, 4, 2050).half().requires_grad_()
    out = roi_pool(feature, torch.tensor([[0, 2048, 0, 2048, 3]]).half(), 1)
    grad, = torch.autograd.grad(out, feature, torch.ones_like(out))
    assert out.item() == feature[0, 0, :, 2048].max() and grad.sum().item() == 1


def test_the_scale_is_rounded_to_float32_as_in_mmcv(wave):
    feature, rois = wave(2, 3, 11, 13), torch.tensor(ROIS, dtype=torch.float64)
    single = torch.tensor(0.7).item()
    assert single != 0.7
    out = roi_align(feature, rois, 2, 0.7, 2)
    assert torch.equal(out, roi_align(feature, rois, 2, single, 2))
    assert not torch.equal(out, roi_align(feature, rois, 2, 0.7000001, 2))


def test_ties_go_to_the_first_and_nan_never_wins():
    feature = torch.ones(1, 1, 8, 8, requires_grad=True)
    roi = torch.tensor([[0., 0, 0, 8, 8]])
    grad, = torch.autograd.grad(roi_align(feature, roi, 1, 1., 2, 'max', False), feature)
    assert grad[0, 0, 2, 2].item() == 1 and grad.sum().item() == 1
    grad, = torch.autograd.grad(roi_pool(feature, roi, 1), feature)
    assert grad[0, 0, 0, 0].item() == 1 and grad.sum().item() == 1
    some, nan = torch.full((1, 1, 9, 9), -3.), torch.full((1, 1, 9, 9), NAN)
    some[0, 0, 6] = NAN
    assert roi_align(some, roi, 1, 1., 2, 'max', False).item() == -3
    assert roi_pool(some, roi, 1).item() == -3 and roi_pool(nan, roi, 1).item() == LOWEST


def test_a_zero_has_no_sign_wherever_a_vector_ends(wave):
    """The maximum of -0 and 0 is either, by position in a vector; equal boxes must not differ."""
    feature = torch.where(wave(1, 17, 16, 16) < 0, -0., 0.)
    out = roi_pool(feature, torch.tensor([[0, 2., 2, 9, 9]]).repeat(101, 1), 7, 1.)
    assert out.count_nonzero() == 0 and not out.signbit().any()


def test_deformable_pooling_without_offsets_has_the_bits_of_offsets_of_zero(wave):
    feature, boxes = wave(2, 3, 11, 13), boxes_of(wave)
    zeros = torch.zeros_like(boxes['offset'])
    assert torch.equal(*(deform_roi_pool(feature, boxes['rois'], offset, BINS, SCALE, 0, 0.125)
                         for offset in (None, zeros)))


def test_gradient_of_an_offset_beyond_the_edge_is_that_of_mmcv(wave):
    feature = wave(1, 1, 4, 4)
    # One sample, at y = -0.5, x = 1.25: clamped to row 0, slope from rows 0 and 1.
    rois = torch.tensor([[0, 1.25, -0.5, 2.25, 0.5]], dtype=torch.float64)
    offset = torch.zeros(1, 2, 1, 1, dtype=torch.float64, requires_grad=True)
    grad, = torch.autograd.grad(deform_roi_pool(feature, rois, offset, 1, 1., 1, 1.), offset)
    f = feature[0, 0]
    # mmcv: input_11 (y - y0) + input_10 (y1 - y) + input_01 (y0 - y) + input_00 (y - y1).
    by_x = f[1, 2] * -0.5 + f[0, 2] * 1.5 + f[1, 1] * 0.5 + f[0, 1] * -1.5
    by_y = f[1, 2] * 0.25 + f[1, 1] * 0.75 + f[0, 2] * -0.25 + f[0, 1] * -0.75
    torch.testing.assert_close(grad.flatten(), torch.stack((by_x, by_y)), rtol=1e-12, atol=1e-12)
