"""Multi-scale deformable attention."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops.multi_scale_deform_attn import (
    MultiScaleDeformableAttnFunction,
    multi_scale_deformable_attn_pytorch,
)
from operators import with_gradients

from mmrepro import ops
from mmrepro.ops.mmcv.ms_deform_attn import ms_deform_attn_backward

pytestmark = pytest.mark.usefixtures('torch_operators')

SHAPES = torch.tensor([[5, 4], [3, 2], [1, 1]])
STARTS = torch.tensor([0, 20, 26])


def attend(value, locations, weights, shapes=SHAPES, starts=STARTS, step=64):
    return MultiScaleDeformableAttnFunction.apply(value, shapes, starts, locations, weights, step)


@pytest.fixture
def inputs(wave):
    """value (2, 27, 3, 4), locations inside and a little outside, weights; 3 levels, 2 points."""

    def make(dtype=torch.float64, queries=5, phase=0):
        value = wave(2, 27, 3, 4, phase=phase).to(dtype)
        locations = (wave(2, queries, 3, 3, 2, 2, phase=phase + 1) * 0.8 + 0.5).to(dtype)
        weights = wave(2, queries, 3, 3, 2, phase=phase + 2).to(dtype)
        return tuple(t.requires_grad_() for t in (value, locations, weights))

    return make


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
    expected = with_gradients(
        multi_scale_deformable_attn_pytorch(value, shapes, where, weights), leaves)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_attention_takes_what_is_empty_or_lost(inputs):
    value, locations, weights = (t.detach() for t in inputs())
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
    value, locations, weights = (t.detach() for t in inputs())
    grad = torch.ones(2, 5, 12, dtype=torch.float64)
    sums = []
    for start in (0., 1.):
        out = [torch.full_like(t, start) for t in (value, locations, weights)]
        ms_deform_attn_backward(value, SHAPES, STARTS, locations, weights, grad, *out, 64)
        sums.append(out)
    for plain, more in zip(*sums):
        torch.testing.assert_close(more, plain + 1)


def test_stacked_corners_have_the_same_bits(wave):
    """The form for CUDA, whose calls are fewer."""
    from mmrepro.ops import sampling
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
    from mmrepro.ops.mmcv import ms_deform_attn
    shapes, starts = torch.tensor([[2, 3]]), torch.tensor([0])
    first = ms_deform_attn._sizes(shapes, starts)
    assert first == [[2, 3, 0]] and ms_deform_attn._sizes(shapes, starts) is first
    shapes[0, 0] = 4
    assert ms_deform_attn._sizes(shapes, starts) == [[4, 3, 0]]
    assert ms_deform_attn._sizes(shapes.clone(), starts + 1) == [[4, 3, 1]]
    with torch.inference_mode():
        assert ms_deform_attn._sizes(torch.tensor([[5, 6]]), torch.tensor([0])) == [[5, 6, 0]]
