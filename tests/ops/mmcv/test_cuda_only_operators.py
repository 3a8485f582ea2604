"""Operators that mmcv compiles for CUDA only, against their definitions."""
import inspect

import pytest
import torch
import torch.nn.functional as F
from harness import digest
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import carafe, masked_conv2d, multi_scale_deform_attn, sigmoid_focal_loss
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from mmcv.ops.sync_bn import SyncBatchNormFunction
from operators import batch_norm, draw, trained, with_gradients

from mmrepro import ops
from mmrepro.ops import sampling
from mmrepro.ops.mmcv import batch_norm as kernels
from mmrepro.ops.mmcv import masked_conv, ms_deform_attn

pytestmark = pytest.mark.usefixtures('torch_operators')


def naive_carafe(features, masks, kernel, groups, scale):
    """The definition: windows of the pixel below, weighted by the masks of the output pixel."""
    n, c, h, w = features.shape
    windows = F.unfold(features, kernel, padding=kernel // 2).view(n, groups, -1, kernel ** 2, h, w)
    windows = windows.repeat_interleave(scale, 4).repeat_interleave(scale, 5)
    masks = masks.view(n, groups, 1, kernel ** 2, h * scale, w * scale)
    return (windows * masks).sum(3).flatten(1, 2)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_carafe_and_its_gradients_follow_the_definition(data):
    n, groups, h, w = (data.draw(st.integers(1, 3)) for _ in range(4))
    kernel, scale = data.draw(st.sampled_from([1, 3, 5])), data.draw(st.integers(1, 3))
    c = groups * data.draw(st.integers(1, 2))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    leaves = [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
              for shape in ((n, c, h, w), (n, kernel ** 2 * groups, h * scale, w * scale))]
    with ops.using('torch'):
        found, expected = (with_gradients(function(*leaves, kernel, groups, scale), leaves)
                           for function in (carafe, naive_carafe))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_carafe_takes_what_is_empty(wave):
    features, masks = wave(2, 4, 3, 4), wave(2, 9, 6, 8, phase=1).requires_grad_()
    assert carafe(features[:0], masks[:0], 3, 1, 2).shape == (0, 4, 6, 8)
    out = carafe(features[:, :0], masks, 3, 1, 2)
    assert out.shape == (2, 0, 6, 8)
    assert torch.autograd.grad(out.sum(), masks)[0].count_nonzero() == 0


def test_a_pixel_that_is_not_read_does_not_reach_the_result_of_carafe():
    features = torch.full((1, 1, 1, 5), float('nan'))
    features[..., 3:] = 1
    out = carafe(features, torch.ones(1, 9, 1, 5), 3, 1, 1)
    assert out[..., 4].item() == 2 and out[..., 3].isnan()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 5]),
       st.integers(0, 999))
def test_masked_conv_is_convolution_where_the_mask_is(channels, height, width, kernel, seed):
    x, weight = draw(1, channels, height, width, seed=seed), draw(3, channels, kernel, kernel)
    bias, pad = draw(3, seed=2), kernel // 2
    mask = draw(1, height, width, seed=seed + 1) > 0
    out = masked_conv2d(x, mask, weight, bias, pad)
    expected = F.conv2d(x, weight, bias, padding=pad) * mask
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_kernel_of_masked_conv_need_not_be_square_and_the_input_may_be_a_view():
    x = draw(1, 9, 8, 4).permute(0, 3, 1, 2)
    weight, bias = draw(2, 4, 3, 5), draw(2)
    mask = torch.ones(1, 9, 8)
    out = masked_conv2d(x, mask, weight, bias, (1, 2))
    torch.testing.assert_close(out, F.conv2d(x, weight, bias, padding=(1, 2)), rtol=1e-4, atol=1e-5)


def test_columns_are_windows_with_zeros_outside_even_around_nan():
    x = torch.ones(1, 2, 1, 4)
    x[..., 0] = float('nan')
    col, origin = torch.full((18, 1), 7.), torch.tensor([0])
    masked_conv.masked_im2col_forward(x, origin, origin, col, kernel_h=3, kernel_w=3, pad_h=1,
                                      pad_w=1)
    window = [0., 0, 0, 0, -1, 1, 0, 0, 0]
    assert col[:, 0].nan_to_num(-1).tolist() == window * 2


@pytest.mark.parametrize('dtype', [torch.float64, torch.float16])
def test_columns_of_other_precisions_are_copied_as_they_are(dtype):
    x, rows = draw(1, 2, 5, 5, dtype=dtype), torch.tensor([1, 3])
    col = torch.zeros(2, 2, dtype=dtype)
    masked_conv.masked_im2col_forward(x, rows, rows, col, 1, 1, 0, 0)
    assert torch.equal(col, x[0][:, rows, rows])
    image = torch.zeros_like(x)
    masked_conv.masked_col2im_forward(col, rows, rows, image, 5, 5, 2)
    assert torch.equal(image[0][:, rows, rows], col) and image.count_nonzero() == 4


def sync_bn(layer, x, mode='default'):
    return SyncBatchNormFunction.apply(x, layer.running_mean, layer.running_var, layer.weight,
                                       layer.bias, layer.momentum, layer.eps, None, 1, mode)


@pytest.mark.parametrize('mode', ['default', 'N'])
@pytest.mark.parametrize('shape', [(4, 3, 5, 7), (2, 16, 1, 1), (1, 5, 9, 9)])
def test_sync_bn_on_one_rank_is_batch_norm(shape, mode):
    """The module of mmcv would take torch's on one rank."""
    x, upstream = draw(*shape), draw(*shape, seed=9)
    found = trained(batch_norm(shape[1]), x, upstream, lambda layer, x: sync_bn(layer, x, mode))
    torch.testing.assert_close(found, trained(batch_norm(shape[1]), x, upstream), rtol=1e-5,
                               atol=1e-5)


def test_sync_bn_sums_half_in_float32():
    x = torch.full((1, 1, 100000), 1.5).half()
    mean = torch.zeros(1)
    kernels.sync_bn_forward_mean(x, mean)
    assert mean.item() == 1.5
    layer = batch_norm(3)
    value = draw(2, 3, 4, 4, dtype=torch.float16).requires_grad_()
    out = sync_bn(layer, value)
    out.sum().backward()
    assert out.dtype == value.grad.dtype == torch.float16
    assert layer.weight.grad.dtype == torch.float32


def test_sync_bn_of_an_empty_batch_changes_nothing():
    layer = batch_norm(3)
    before = digest(dict(layer.named_buffers()))
    value = torch.zeros(0, 3, 4, 4, requires_grad=True)
    sync_bn(layer, value, 'N').sum().backward()
    assert digest(dict(layer.named_buffers())) == before and value.grad.shape == (0, 3, 4, 4)


@pytest.mark.parametrize('shape', [(2, 64, 50, 68), (1, 1, 400, 400), (16, 1, 100, 100),
                                   (1, 256, 13, 13)])
def test_sync_bn_does_not_depend_on_threads(check_same_bytes, shape):
    x, upstream = draw(*shape), draw(*shape, seed=5)
    check_same_bytes(lambda: trained(batch_norm(shape[1]), x, upstream, sync_bn))


TINY = torch.finfo(torch.float32).tiny


def sigmoid_formula(x, target, gamma, alpha, weight=None):
    """Focal loss (Lin et al. 2017, equation 5) with mmcv's floor under the logarithm."""
    p = 1 / (1 + (-x).exp())
    own = target[:, None] == torch.arange(x.shape[1])
    loss = torch.where(own, -alpha * (1 - p) ** gamma * p.clamp(min=TINY).log(),
                       -(1 - alpha) * p ** gamma * (1 - p).clamp(min=TINY).log())
    return loss if weight is None else loss * weight[target][:, None]


def predictions(rows, classes, seed=0, background=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=random, dtype=torch.float64).to(dtype) * 3
    target = torch.randint(0, classes + background, (rows,), generator=random)
    return x, target, torch.rand(classes, generator=random, dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 999), st.booleans(),
       st.sampled_from([0., .5, 1., 1.5, 2., 3., 4.]), st.sampled_from(['none', 'mean', 'sum']))
def test_focal_loss_is_the_formula_and_so_is_its_gradient(rows, classes, seed, weighted, gamma,
                                                          reduction):
    x, target, weight = predictions(rows, classes, seed, background=not weighted)
    weight = weight if weighted else None
    reduction = reduction if rows else 'none'
    with ops.using('torch'):
        out = sigmoid_focal_loss(x.requires_grad_(), target, gamma, 0.3, weight, reduction)
    expected = sigmoid_formula(x, target, gamma, 0.3, weight)
    if reduction != 'none':
        expected = expected.sum() / (rows if reduction == 'mean' else 1)
    torch.testing.assert_close(with_gradients(out, x), with_gradients(expected, x),
                               rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64])
def test_certain_predictions_have_finite_losses(dtype):
    x = torch.tensor([[200., -200., 30.], [-200., 200., -30.]], dtype=dtype)
    for label in range(4):
        value = x.clone().requires_grad_()
        out = sigmoid_focal_loss(value, torch.tensor([label, label]), 2., 0.25, None, 'none')
        out.sum().backward()
        assert out.isfinite().all() and value.grad.isfinite().all()
    assert sigmoid_focal_loss(x, torch.tensor([0, 1]), 2., 0.25, None, 'none')[0, 0] == 0


def test_nan_stays_where_it_is_and_a_negative_label_is_background():
    x, target, _ = predictions(5, 3)
    losses = [sigmoid_focal_loss(x, torch.full((5,), label), 2., 0.25, None, 'none')
              for label in (3, -1)]
    assert torch.equal(*losses)
    x[2, 1] = float('nan')
    out = sigmoid_focal_loss(x, target, 2., 0.25, None, 'none')
    assert out.isnan().nonzero().tolist() == [[2, 1]]


SHAPES = torch.tensor([[5, 4], [3, 2], [1, 1]])
STARTS = torch.tensor([0, 20, 26])


def attend(value, locations, weights, shapes=SHAPES, starts=STARTS, step=64):
    return MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, step)


@pytest.fixture
def inputs(wave):
    """value (2, 27, 3, 4), locations inside and a little outside, weights; 3 levels, 2 points."""
    return (wave(2, 27, 3, 4), wave(2, 5, 3, 3, 2, 2, phase=1) * 0.8 + 0.5,
            wave(2, 5, 3, 3, 2, phase=2))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_attention_and_its_gradients_agree_with_grid_sample_for_any_shape(data):
    size = st.integers(1, 4)
    shapes = torch.tensor(data.draw(st.lists(st.tuples(size, size), min_size=1, max_size=3)))
    areas = shapes.prod(1)
    starts = areas.cumsum(0) - areas
    b, q, heads, depth, points = (data.draw(st.integers(low, 3)) for low in (1, 0, 1, 1, 1))
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    bags = b, q, heads, len(shapes), points
    value, where, weights = leaves = [
        (torch.rand(shape, generator=random, dtype=torch.float64) * 1.6 - 0.3).requires_grad_()
        for shape in ((b, int(areas.sum()), heads, depth), (*bags, 2), bags)]
    with ops.using('torch'):
        found = with_gradients(attend(value, where, weights, shapes, starts), leaves)
    stock = inspect.unwrap(multi_scale_deform_attn.multi_scale_deformable_attn_pytorch)
    expected = with_gradients(stock(value, shapes, where, weights), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def layer_on_cpu(layer):
    """Return the output of mmcv's attention layer on a CPU, and the gradients of its inputs."""
    random = torch.Generator().manual_seed(0)
    shapes = torch.tensor([[5, 7], [3, 4]])
    query, value = (torch.randn(2, 47, 16, generator=random).requires_grad_() for _ in range(2))
    points = torch.rand(2, 47, 2, 2, generator=random)
    out = layer(query, value=value, reference_points=points, spatial_shapes=shapes,
                level_start_index=torch.tensor([0, 35]))
    return out, torch.autograd.grad(out.square().sum(), (query, value))


def test_attention_on_a_cpu_takes_the_operator(monkeypatch):
    layer = multi_scale_deform_attn.MultiScaleDeformableAttention(
        16, num_heads=2, num_levels=2, num_points=3, batch_first=True, dropout=0.)
    torch.nn.init.normal_(layer.sampling_offsets.weight)
    calls = []
    forward = MultiScaleDeformableAttnFunction.forward
    monkeypatch.setattr(MultiScaleDeformableAttnFunction, 'forward', staticmethod(
        lambda *args: calls.append('called') or forward(*args)))
    ops.uninstall()
    expected = layer_on_cpu(layer)
    assert not calls
    ops.install()
    with ops.using('torch'):
        found = layer_on_cpu(layer)
        assert calls == ['called']
        traced = torch.jit.trace(multi_scale_deform_attn.multi_scale_deformable_attn_pytorch, (
            torch.rand(1, 4, 1, 2), torch.tensor([[2, 2]]), torch.rand(1, 3, 1, 1, 1, 2),
            torch.rand(1, 3, 1, 1, 1)))
        assert 'grid_sampler' in str(traced.graph)
    torch.testing.assert_close(found, expected)
    calls.clear()
    layer_on_cpu(layer)
    assert not calls


def test_attention_on_a_cpu_takes_sizes_as_a_list():
    """As mmcv's form does, which loops over them."""
    value, where, weights = (torch.rand(shape) for shape in (
        (1, 5, 1, 2), (1, 3, 1, 2, 2, 2), (1, 3, 1, 2, 2)))
    with ops.using('torch'):
        attention = multi_scale_deform_attn.multi_scale_deformable_attn_pytorch
        found, expected = (attention(value, shapes, where, weights)
                           for shapes in ([(2, 2), (1, 1)], torch.tensor([[2, 2], [1, 1]])))
    assert torch.equal(found, expected)


def test_attention_takes_what_is_empty_or_lost(inputs):
    value, locations, weights = inputs
    assert attend(value, locations[:, :0], weights[:, :0]).shape == (2, 0, 12)
    assert attend(value[:0], locations[:0], weights[:0]).shape == (0, 5, 12)
    lost = locations.clone()
    lost[0, 0] = float('nan')
    lost[1, 0] = 7.
    lost.requires_grad_()
    out = attend(value, lost, weights)
    assert out[:, 0].count_nonzero() == 0
    grad, = torch.autograd.grad(out.sum(), lost)
    assert grad.isfinite().all() and grad[:, 0].count_nonzero() == 0


def test_gradients_are_added_to_what_is_there(inputs):
    value, locations, weights = inputs
    grad = torch.ones(2, 5, 12, dtype=torch.float64)
    plain, more = ([torch.full_like(t, start) for t in inputs] for start in (0., 1.))
    for out in (plain, more):
        ms_deform_attn.ms_deform_attn_backward(
            value, SHAPES, STARTS, locations, weights, grad, *out, 64)
    torch.testing.assert_close(more, [tensor + 1 for tensor in plain])


def test_stacked_corners_have_the_same_bits(wave):
    """The form for CUDA, whose calls are fewer."""
    y, x = wave(300, 4) * 6 + 3, wave(300, 4, phase=1.) * 6 + 3
    y[3, 2], x[5], y[7], x[9] = float('nan'), -1., 8., float('inf')
    for dtype in (torch.float32, torch.float64):
        for height, width in ((9, 7), (torch.tensor([[1], [9]]).repeat(150, 1), torch.tensor(7))):
            arguments = y.to(dtype), x.to(dtype), height, width
            one, other = sampling.padded_corners(*arguments), sampling._stacked_corners(*arguments)
            assert torch.equal(one.live, other.live) and 0 < int(one.live.sum()) < one.live.numel()
            assert torch.equal(one.row[one.live], other.row[one.live])
            for name in ('weight', 'dy', 'dx'):
                found, expected = getattr(other, name), getattr(one, name)
                assert found.dtype == dtype and torch.equal(found, expected)
                assert torch.equal(found.signbit(), expected.signbit())


def test_sizes_of_levels_are_read_once_and_again_when_they_change():
    shapes, starts = torch.tensor([[2, 3]]), torch.tensor([0])
    first = ms_deform_attn._sizes(shapes, starts)
    assert first == [[2, 3, 0]] and ms_deform_attn._sizes(shapes, starts) is first
    shapes[0, 0] = 4
    assert ms_deform_attn._sizes(shapes, starts) == [[4, 3, 0]]
    assert ms_deform_attn._sizes(shapes.clone(), starts + 1) == [[4, 3, 1]]
    with torch.inference_mode():
        assert ms_deform_attn._sizes(torch.tensor([[5, 6]]), torch.tensor([0])) == [[5, 6, 0]]
