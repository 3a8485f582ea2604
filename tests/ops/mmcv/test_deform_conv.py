"""Deformable convolution, with and without masks."""
import pytest
import torch
import torch.nn.functional as F
from harness import python
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import deform_conv2d, modulated_deform_conv2d
from operators import with_gradients

from mmrepro import ops
from mmrepro.ops.mmcv import deform_conv

pytestmark = pytest.mark.usefixtures('torch_operators')

# channels in, out, kernel, stride, padding, dilation, groups, deform_groups
CASES = {
    'plain': (2, 3, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1),
    'both': (8, 4, (2, 3), (1, 1), (0, 0), (1, 1), 4, 2),
}


def out_size(size, kernel, stride, padding, dilation):
    return (size + 2 * padding - (dilation * (kernel - 1) + 1)) // stride + 1


@pytest.fixture
def inputs(wave):
    """input, offset, mask, weight, bias of a case; offsets reach two pixels, some outside."""

    def make(case, dtype=torch.float64, size=(6, 7), batch=2):
        c, c_out, kernel, stride, padding, dilation, groups, deform_groups = CASES[case]
        out = [out_size(*args) for args in zip(size, kernel, stride, padding, dilation)]
        taps = kernel[0] * kernel[1] * deform_groups
        tensors = (wave(batch, c, *size), wave(batch, 2 * taps, *out, phase=1) * 2,
                   wave(batch, taps, *out, phase=2), wave(c_out, c // groups, *kernel, phase=3),
                   wave(c_out, phase=4))
        return [t.to(dtype).requires_grad_() for t in tensors]

    return make


def convolve(version, case, *tensors):
    return deformed(version, *tensors, *CASES[case][3:])


def deformed(version, feature, offset, mask, weight, bias, *geometry):
    if version == 1:
        return deform_conv2d(feature, offset, weight, *geometry)
    return modulated_deform_conv2d(feature, offset, mask, weight, bias, *geometry)


def leaves(version, tensors):
    feature, offset, mask, weight, bias = tensors
    return (feature, offset, weight) if version == 1 else (feature, offset, mask, weight, bias)


def naive(feature, offset, mask, weight, bias, stride, padding, dilation, groups, deform_groups):
    """Compute the definition by grid_sample, tap after tap; mask and bias may be None."""
    (n, c, h, w), (kh, kw), (rows, columns) = feature.shape, weight.shape[2:], offset.shape[2:]
    offset = offset.view(n, deform_groups, kh * kw, 2, rows, columns)
    taps = []
    for tap in range(kh * kw):
        at = []
        for axis, (out, step) in enumerate(((rows, tap // kw), (columns, tap % kw))):
            start = torch.arange(out) * stride[axis] - padding[axis] + step * dilation[axis]
            start = start[:, None] if axis == 0 else start
            at.append((start + offset[:, :, tap, axis]) * 2 + 1)
        grid = torch.stack((at[1] / w - 1, at[0] / h - 1), -1).flatten(0, 1)
        part = F.grid_sample(feature.reshape(n * deform_groups, -1, h, w), grid,
                             align_corners=False).view(n, deform_groups, -1, rows, columns)
        if mask is not None:
            part = part * mask.view(n, deform_groups, kh * kw, 1, rows, columns)[:, :, tap]
        taps.append(part.reshape(n, groups, c // groups, rows, columns))
    out = torch.einsum('tngcyx,goct->ngoyx', torch.stack(taps),
                       weight.view(groups, -1, c // groups, kh * kw)).flatten(1, 2)
    return out if bias is None else out + bias.view(1, -1, 1, 1)


def test_more_offsets_than_pixels_are_read_from_the_front_as_in_mmcv(wave):
    """Offsets and a mask of twice the height and width, as DyHead hands to the next level."""
    feature, weight, bias = wave(2, 4, 8, 9), wave(3, 4, 3, 3, phase=1), wave(3, phase=2)
    offset, mask = wave(2, 18, 8, 10, phase=3) * 2, wave(2, 9, 8, 10, phase=4)
    tensors = [t.requires_grad_() for t in (feature, offset, mask, weight, bias)]
    front = [t.flatten(1)[:, :t.shape[1] * 20].unflatten(1, (-1, 4, 5)) for t in (offset, mask)]
    results = []
    for used, provider in (((offset, mask), 'torch'), (front, 'torch'), (
            (offset, mask), 'compiled' if ops.is_compiled() else 'torch')):
        with ops.using(provider):
            out = modulated_deform_conv2d(feature, *used, weight, bias, 2, 1)
            results.append(with_gradients(out, tensors))
    assert results[0][0].shape == (2, 3, 4, 5)
    for ours, expected, theirs in zip(*results):
        assert torch.equal(ours, expected)
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('version', [1, 2])
def test_convolution_keeps_its_values(inputs, check_golden, version):
    """Stored from mmcv's compiled CPU kernel."""
    tensors = inputs('both')
    found = with_gradients(convolve(version, 'both', *tensors), leaves(version, tensors))
    check_golden(f'deform_conv_v{version}', {f'result_{i}': one for i, one in enumerate(found)})


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_convolution_and_its_gradients_follow_the_definition_for_any_shape(data):
    small = st.integers(1, 2)
    groups, deform_groups = data.draw(small), data.draw(small)
    c = 2 * data.draw(small)
    kernel = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride, dilation, padding = (data.draw(st.tuples(st.integers(low, 2), st.integers(low, 2)))
                                 for low in (1, 1, 0))
    version = data.draw(small)  # in version 2, an input may be smaller than the kernel
    size = [max(1, (k - 1) * d + 1 - 2 * p * (version - 1) + data.draw(st.integers(0, 3)))
            for k, d, p in zip(kernel, dilation, padding)]
    out = [out_size(*args) for args in zip(size, kernel, stride, padding, dilation)]
    taps = deform_groups * kernel[0] * kernel[1]
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64).requires_grad_()

    tensors = [draw(1, c, *size), draw(1, 2 * taps, *out), draw(1, taps, *out),
               draw(2, c // groups, *kernel), draw(2)]
    geometry = stride, padding, dilation, groups, deform_groups
    used = tensors if version == 2 else [*tensors[:2], None, tensors[3], None]
    with ops.using('torch'):
        found = with_gradients(deformed(version, *tensors, *geometry), leaves(version, tensors))
    expected = with_gradients(naive(*used, *geometry), leaves(version, tensors))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason='torch without MKL')
def test_one_code_path_of_mkl_gives_the_same_bytes_for_any_number_of_threads():
    """What docs/reference/limits.md says of MKL_CBWR: products, attention, deform_conv."""
    code = '''
import torch
import mmrepro
from mmcv.ops import modulated_deform_conv2d
from torch.nn.functional import scaled_dot_product_attention
torch.manual_seed(0)
left, right, query = torch.randn(64, 2048), torch.randn(2048, 576), torch.randn(2, 4, 300, 32)
tensors = [torch.randn(*shape).requires_grad_() for shape in (
    (2, 64, 32, 32), (2, 18, 32, 32), (2, 9, 32, 32), (64, 64, 3, 3))]
found = []
for count in (1, 2):
    torch.set_num_threads(count)
    out = modulated_deform_conv2d(*tensors, None, 1, 1)
    made = (left @ right, scaled_dot_product_attention(query, query, query), out,
            *torch.autograd.grad(out.square().sum(), tensors))
    found.append([tensor.detach().numpy().tobytes() for tensor in made])
assert found[0] == found[1], [one == other for one, other in zip(*found)]
'''
    assert python('-c', code, MKL_CBWR='AVX2,STRICT') == ''


def test_autocast_does_not_lower_the_precision(inputs):
    tensors = [t.detach() for t in inputs('both', torch.float32)]
    expected = convolve(2, 'both', *tensors)
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(convolve(2, 'both', *tensors), expected)


def test_convolution_takes_what_is_empty_or_lost(inputs):
    feature, offset, mask, weight, bias = (t.detach() for t in inputs('plain'))
    expected = convolve(2, 'plain', feature, offset, mask, weight, bias)
    # mmcv's Python refuses an empty batch, its kernels do not.
    out = expected[:0].clone()
    deform_conv.modulated_deform_conv_forward(feature[:0], weight, bias, bias, offset[:0], mask[:0],
                                         out, bias, 3, 3, 1, 1, 1, 1, 1, 1, 1, 1, True)
    lost = offset.clone()
    lost[0, :, 0, 0] = float('nan')
    lost.requires_grad_()
    out = convolve(2, 'plain', feature, lost, mask, weight, bias)
    assert torch.equal(out[0, :, 0, 0], bias) and torch.equal(out[1], expected[1])
    grad, = torch.autograd.grad(out.sum(), lost)
    assert grad.isfinite().all() and grad[0, :, 0, 0].count_nonzero() == 0


def test_a_pixel_that_is_not_read_does_not_reach_the_result():
    feature = torch.ones(1, 1, 4, 4)
    feature[0, 0, 0, 0] = float('inf')
    away = torch.full((1, 2, 4, 4), 9.)
    out = deform_conv2d(feature, away, torch.ones(1, 1, 1, 1))
    assert out.count_nonzero() == 0
