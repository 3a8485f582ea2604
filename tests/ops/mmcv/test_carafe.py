"""CARAFE."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import carafe
from operators import with_gradients

from mmrepro import ops

pytestmark = pytest.mark.usefixtures('torch_operators')


def naive(features, masks, kernel, groups, scale):
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
                           for function in (carafe, naive))
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_carafe_takes_what_is_empty(wave):
    features, masks = wave(2, 4, 3, 4), wave(2, 9, 6, 8, phase=1)
    assert carafe(features[:0], masks[:0], 3, 1, 2).shape == (0, 4, 6, 8)
    none = masks.clone().requires_grad_()
    out = carafe(features[:, :0], none, 3, 1, 2)
    assert out.shape == (2, 0, 6, 8)
    assert torch.autograd.grad(out.sum(), none)[0].count_nonzero() == 0


def test_a_pixel_that_is_not_read_does_not_reach_the_result():
    features = torch.full((1, 1, 1, 5), float('nan'))
    features[..., 3:] = 1
    out = carafe(features, torch.ones(1, 9, 1, 5), 3, 1, 1)
    assert out[..., 4].item() == 2 and out[..., 3].isnan()
