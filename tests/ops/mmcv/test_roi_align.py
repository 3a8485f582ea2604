"""RoIAlign (and further down RoIPool, PrRoIPool, deformable RoI pooling)."""
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import roi_align

from mmrepro import ops
from mmrepro.ops.mmcv import roi_align_max

pytestmark = pytest.mark.usefixtures('torch_operators')

# Inside, across every edge, outside, tiny, empty, one pixel, larger than the map; two images.
ROIS = [[0, 1, 2, 9, 7], [1, -4, -3, 5, 6], [1, 8, 5, 20, 19], [0, 30, 30, 50, 44],
        [0, 3.3, 2.2, 3.9, 2.4], [1, 4, 4, 4, 4], [0, 5, 5, 6, 6], [1, -20, -20, 40, 40],
        [0, -9, 1, -8.2, 5], [0, 0, 0, 13, 11]]


def naive(feature, rois, bins, scale, ratio, mode, aligned):
    """The definition, in loops. feature (N, C, H, W), all float64."""
    _, channels, height, width = feature.shape
    out = torch.zeros(len(rois), channels, *bins, dtype=torch.float64)
    offset = 0.5 if aligned else 0.

    def sample(image, y, x):
        if y < -1 or y > height or x < -1 or x > width:
            return torch.zeros(channels, dtype=torch.float64)
        y, x = min(max(y, 0.), height - 1.), min(max(x, 0.), width - 1.)
        top, left = int(y), int(x)
        bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
        fy, fx = y - top, x - left
        return ((1 - fy) * (1 - fx) * feature[image, :, top, left]
                + (1 - fy) * fx * feature[image, :, top, right]
                + fy * (1 - fx) * feature[image, :, bottom, left]
                + fy * fx * feature[image, :, bottom, right])

    for k, (image, *box) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (edge * scale - offset for edge in box)
        w, h = x2 - x1, y2 - y1
        if not aligned:
            w, h = max(w, 1.), max(h, 1.)
        bin_h, bin_w = h / bins[0], w / bins[1]
        rows = ratio if ratio > 0 else math.ceil(bin_h)
        columns = ratio if ratio > 0 else math.ceil(bin_w)
        for i in range(bins[0]):
            for j in range(bins[1]):
                values = [sample(int(image), y1 + i * bin_h + (a + 0.5) * bin_h / rows,
                                 x1 + j * bin_w + (b + 0.5) * bin_w / columns)
                          for a in range(rows) for b in range(columns)]
                if mode == 'avg' and values:
                    out[k, :, i, j] = torch.stack(values).mean(0)
                elif mode == 'max':
                    out[k, :, i, j] = (torch.stack(values).amax(0) if values
                                       else roi_align_max.LOWEST)
    return out


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 1, 2, 3])
@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_roi_align_follows_its_definition(wave, mode, ratio, aligned):
    feature = wave(2, 3, 11, 13)
    rois = torch.tensor(ROIS, dtype=torch.float64)
    out = roi_align(feature, rois, (3, 2), 0.75, ratio, mode, aligned)
    expected = naive(feature, rois, (3, 2), 0.75, ratio, mode, aligned)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_roi_align_follows_its_definition_for_any_shape(data):
    n, c = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    h, w = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    k = data.draw(st.integers(0, 3))
    bins = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    corner = st.floats(-4, 10, width=16)
    size = st.floats(0, 9, width=16)
    rois = []
    for _ in range(k):
        x, y = data.draw(corner), data.draw(corner)
        rois.append([data.draw(st.integers(0, n - 1)), x, y, x + data.draw(size),
                     y + data.draw(size)])
    rois = torch.tensor(rois, dtype=torch.float64).view(k, 5)
    feature = torch.randn(n, c, h, w, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    args = (bins, data.draw(st.sampled_from([1., 0.5, 0.3125])), data.draw(st.integers(0, 3)),
            data.draw(st.sampled_from(['avg', 'max'])), data.draw(st.booleans()))
    with ops.using('torch'):
        out = roi_align(feature, rois, *args)
    torch.testing.assert_close(out, naive(feature, rois, *args), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize('mode,ratio,aligned', [
    ('avg', 0, True), ('avg', 2, False), ('max', 0, True), ('max', 2, False)])
def test_roi_align_gradient(wave, mode, ratio, aligned):
    feature = wave(2, 2, 5, 4).requires_grad_()
    rois = torch.tensor(ROIS[:7], dtype=torch.float64) * torch.tensor([1, .4, .4, .4, .4])
    assert torch.autograd.gradcheck(
        lambda f: roi_align(f, rois, (2, 3), 0.8, ratio, mode, aligned), feature, fast_mode=True)


@pytest.mark.compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 2])
@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_roi_align_agrees_with_compiled_mmcv(wave, compiled, mode, ratio, aligned, dtype):
    # 1000 boxes of all sizes on a map of one detector level.
    rois = wave(1000, 5, phase=1).abs()
    rois[:, 0] = (rois[:, 0] * 2).floor()
    rois[:, 1:] = rois[:, 1:] * 400 - 20
    rois[:, 3:] = rois[:, 1:3] + 300 * rois[:, 3:].abs() / 400 + 1
    rois = rois.to(dtype)
    results = []
    for context in (compiled, lambda: ops.using('torch')):
        feature = wave(2, 4, 50, 44, dtype=dtype).requires_grad_()
        with context():
            out = roi_align(feature, rois, (7, 7), 0.13, ratio, mode, aligned)
            out.backward(wave(*out.shape, phase=2, dtype=dtype))
        results.append((out.detach(), feature.grad))
    tolerance = 1e-4 if dtype == torch.float32 else 1e-11
    for ours, theirs in zip(results[1], results[0]):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize('mode,ratio', [('avg', 0), ('avg', 2), ('max', 2)])
def test_roi_align_keeps_its_values(wave, golden, mode, ratio, request):
    """Stored from mmcv's compiled CPU kernel."""
    feature = wave(2, 3, 11, 13).requires_grad_()
    # mmcv's CPU kernel makes -10000 of an empty bin, its CUDA kernel and we -FLT_MAX.
    rois = torch.tensor([roi for roi in ROIS if roi[1] != roi[3]], dtype=torch.float64)
    out = roi_align(feature, rois, (3, 2), 0.75, ratio, mode, True)
    out.backward(wave(*out.shape, phase=2))
    golden(f'roi_align_{mode}_{ratio}', {'out': out, 'grad': feature.grad})


@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_chunks_are_invisible_in_the_forward_and_rounding_in_the_backward(wave, monkeypatch, mode):
    from mmrepro.ops import gather
    feature = wave(2, 3, 11, 13).requires_grad_()
    rois = torch.tensor(ROIS * 3, dtype=torch.float64)
    whole = roi_align(feature, rois, (3, 2), 0.75, 0, mode, True)
    whole_grad, = torch.autograd.grad(whole, feature, wave(*whole.shape))
    monkeypatch.setattr(gather, 'CHUNK_TAPS', {'cpu': 1})
    monkeypatch.setattr(gather, 'CHUNK_SHARE', 0)
    monkeypatch.setattr(gather, 'CHUNK_ELEMENTS', {'cpu': 1})
    parts = roi_align(feature, rois, (3, 2), 0.75, 0, mode, True)
    parts_grad, = torch.autograd.grad(parts, feature, wave(*whole.shape))
    assert torch.equal(whole, parts)
    torch.testing.assert_close(whole_grad, parts_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_roi_align_in_low_precision_sums_in_float32(wave, mode, dtype):
    feature = wave(2, 3, 11, 13).to(dtype).requires_grad_()
    rois = torch.tensor(ROIS, dtype=dtype)
    out = roi_align(feature, rois, (3, 2), 1., 2, mode, True)
    grad, = torch.autograd.grad(out, feature, torch.ones_like(out))
    wide = feature.detach().float().requires_grad_()
    expected = roi_align(wide, rois.float(), (3, 2), 1., 2, mode, True)
    wide_grad, = torch.autograd.grad(expected, wide, torch.ones_like(expected))
    assert out.dtype == grad.dtype == dtype
    assert torch.equal(out, expected.to(dtype))
    if mode == 'avg':
        assert torch.equal(grad, wide_grad.to(dtype))
    else:
        # Two samples whose positions round to the same half go to the first of them.
        torch.testing.assert_close(grad.float().sum(), wide_grad.sum(), rtol=1e-2, atol=0.1)


@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_roi_align_takes_what_is_empty_strided_or_outside(wave, mode):
    feature = wave(2, 3, 8, 9, dtype=torch.float32)
    none = roi_align(feature.requires_grad_(), torch.zeros(0, 5), 7, 1., 0, mode, True)
    assert none.shape == (0, 3, 7, 7)
    none.sum().backward()
    assert feature.grad.count_nonzero() == 0
    empty = roi_align(torch.zeros(0, 3, 8, 9), torch.zeros(0, 5), 7, 1., 0, mode, True)
    assert empty.shape == (0, 3, 7, 7)
    rois = torch.tensor(ROIS)
    strided = feature.detach().permute(0, 1, 3, 2)[:, ::2, 1:, :-1]
    expected = roi_align(strided.contiguous(), rois, (2, 3), 0.5, 0, mode, True)
    wide = torch.zeros(len(rois), 10)
    wide[:, ::2] = rois
    assert torch.equal(roi_align(strided, wide[:, ::2], (2, 3), 0.5, 0, mode, True), expected)


@pytest.mark.parametrize('by_lines', [True, False])
def test_few_channels_may_be_read_by_lines(wave, monkeypatch, by_lines):
    from mmrepro.ops.mmcv import roi_align as kernels
    monkeypatch.setattr(kernels, '_few_channels', lambda *_: by_lines)
    rois = torch.tensor(ROIS, dtype=torch.float64)
    for channels in (1, 3):
        feature = wave(2, channels, 11, 13)
        expected = naive(feature, rois, (3, 2), 0.75, 0, 'avg', True)
        out = roi_align(feature, rois, (3, 2), 0.75, 0, 'avg', True)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    feature[:, :, :, 12] = float('nan')
    inside = torch.tensor([[0., 2, 2, 9, 9]], dtype=torch.float64)
    assert roi_align(feature, inside, (3, 2), 1., 0, 'avg', True).isfinite().all()


def test_mask_targets_are_read_by_lines_and_detector_features_are_not():
    from mmrepro.ops.mmcv import roi_align as kernels
    rois = torch.tensor([[0., 100, 100, 300, 250]])
    for shape, bins, expected in (((1, 1, 800, 1333), (28, 28), True),
                                  ((1, 256, 100, 168), (7, 7), False)):
        _, grid = kernels._boxes(torch.zeros(1, 1, 1, 1), rois, bins, 1., 0, True)
        assert kernels._few_channels(grid, torch.Size(shape), bins, True) is expected


def test_nan_and_infinite_boxes_do_what_mmcv_does_on_cuda(wave):
    nan, inf = float('nan'), float('inf')
    feature = wave(1, 2, 5, 5, dtype=torch.float32).requires_grad_()
    rois = torch.tensor([[0, nan, 1, 4, 4], [0, 1, 1, 4, inf], [0, 1, 1, 4, 4]])
    adaptive = roi_align(feature, rois, 2, 1., 0, 'avg', True)
    assert adaptive[:2].count_nonzero() == 0 and adaptive[2].isfinite().all()
    fixed = roi_align(feature, rois[[0, 2]], 2, 1., 2, 'avg', True)
    assert fixed[0].isnan().all() and fixed[1].isfinite().all()
    lost = roi_align(feature, rois[:1], 2, 1., 2, 'max', True)
    assert (lost == roi_align_max.LOWEST).all()


def test_the_scale_is_rounded_to_float32_as_in_mmcv(wave):
    feature, rois = wave(2, 3, 11, 13), torch.tensor(ROIS, dtype=torch.float64)
    single = torch.tensor(0.7).item()
    assert single != 0.7
    out = roi_align(feature, rois, 2, 0.7, 2)
    assert torch.equal(out, roi_align(feature, rois, 2, single, 2))
    assert not torch.equal(out, roi_align(feature, rois, 2, 0.7000001, 2))


def test_ties_of_a_maximum_go_to_the_first_sample():
    feature = torch.ones(1, 1, 8, 8, requires_grad=True)
    out = roi_align(feature, torch.tensor([[0., 0, 0, 8, 8]]), 1, 1., 2, 'max', False)
    grad, = torch.autograd.grad(out, feature)
    assert grad[0, 0, 2, 2].item() == 1 and grad.sum().item() == 1


def test_a_pixel_that_is_not_read_does_not_reach_the_result():
    feature = torch.ones(1, 1, 6, 6)
    feature[0, 0, 0, 0] = float('nan')
    out = roi_align(feature, torch.tensor([[0., 40, 40, 50, 50], [0, 2, 2, 5, 5]]), 2, 1., 2)
    assert out.flatten().tolist() == [0] * 4 + [1] * 4


def test_nan_loses_against_negative_values():
    feature = torch.full((1, 1, 9, 9), -3.)
    feature[0, 0, 6] = float('nan')
    out = roi_align(feature, torch.tensor([[0., 0, 0, 8, 8]]), 1, 1., 2, 'max', False)
    assert out.tolist() == [[[[-3.]]]]


def test_positions_of_a_maximum_that_another_kernel_rounded_keep_their_gradient(wave):
    from mmrepro.ops.mmcv.roi_align import roi_align_backward, roi_align_forward
    feature, rois = wave(1, 3, 8, 8), torch.tensor([[0., 1, 1, 7, 6]], dtype=torch.float64)
    out, y, x = (torch.zeros(1, 3, 2, 2, dtype=torch.float64) for _ in range(3))
    args = (2, 2, 1., 2, 0, True)
    roi_align_forward(feature, rois, out, y, x, *args)
    exact, shifted = torch.zeros_like(feature), torch.zeros_like(feature)
    roi_align_backward(torch.ones_like(out), rois, y, x, exact, *args)
    roi_align_backward(torch.ones_like(out), rois, y + 1e-9, x, shifted, *args)
    assert exact.sum().item() == pytest.approx(12)
    torch.testing.assert_close(shifted, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('feature,rois,message', [
    (torch.zeros(1, 2, 3), torch.zeros(1, 5), r'input must have shape .*\(1, 2, 3\)'),
    (torch.zeros(1, 2, 3, 3), torch.zeros(1, 5).double(), r'rois must be float32, got \(1, 5\)'),
    (torch.zeros(1, 2, 3, 3), torch.ones(1, 5), r'images 1 to 1.*images 0 to 0'),
    (torch.zeros(1, 2, 3, 3), torch.tensor([[0, 0, 0, 1e9, 1e9]]), 'larger than any image'),
    (torch.zeros(1, 2, 3, 3).int(), torch.zeros(1, 5).int(), 'input must be float32'),
])
def test_what_roi_align_refuses_is_named_with_its_shape(feature, rois, message):
    from mmrepro.ops.mmcv.roi_align import roi_align_forward
    out = torch.zeros(1, 2, 2, 2, dtype=feature.dtype)
    with pytest.raises(RuntimeError, match=message):
        roi_align_forward(feature, rois, out, out, out, 2, 2, 1., 0, 1, True)


@pytest.mark.parametrize('lost', [float('nan'), float('inf'), -float('inf')])
def test_a_box_that_is_nowhere_sends_no_gradient_to_pixels_that_it_did_not_win(lost):
    feature = torch.arange(30.).view(1, 1, 5, 6).requires_grad_()
    grads = [torch.autograd.grad(roi_align(feature, torch.tensor(boxes), 1, 1., 2, 'max').sum(),
                                 feature)[0]
             for boxes in ([[0, 1, 1, 4, 4.]], [[0, 1, 1, lost, 4], [0, 1, 1, 4, 4]])]
    assert torch.equal(*grads)


@pytest.mark.parametrize('mode', ['avg', 'max'])
def test_a_map_without_pixels_is_refused_where_a_box_reads_it(mode):
    rois = torch.tensor([[0, 0, 0, 4, 4.]])
    with pytest.raises(RuntimeError, match=r'1 rois on input \(1, 4, 0, 6\).*has no pixels'):
        roi_align(torch.zeros(1, 4, 0, 6), rois, 2, 1., 2, mode)
    assert roi_align(torch.zeros(1, 4, 0, 6), rois[:0], 2, 1., 2, mode).shape == (0, 4, 2, 2)


def test_filters_of_both_axes_at_once_are_those_of_each(wave):
    """The form for CUDA. Beyond the taps that count, padding may differ."""
    from mmrepro.ops import sampling
    start, size = (wave(40) * 30 + 20, wave(40, phase=1.) * 30 + 20), (
        wave(40, phase=2.) * 5, wave(40, phase=3.) * 5)
    for ratio in (0, 2):
        grid = sampling.grid_of(*size, ratio)
        most = int(torch.stack(grid).amax())
        found = sampling.both_axes(start, size, grid, most, 3, (33, 60), ratio == 0)
        for axis, length in enumerate((33, 60)):
            expected = sampling.axis_taps(start[axis], size[axis], grid[axis], most, 3, length,
                                          ratio == 0)
            assert torch.equal(found[axis].count, expected.count)
            slot = torch.arange(min(found[axis].weight.shape[2], expected.weight.shape[2]))
            live = slot < expected.count[:, :, None]
            for one, other in zip(found[axis][:2], expected[:2]):
                assert torch.equal(one[..., :len(slot)][live], other[..., :len(slot)][live])
