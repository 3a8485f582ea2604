"""Masked convolution; mmcv compiles it for CUDA only."""
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import masked_conv2d
from operators import draw

from mmrepro.ops.mmcv import masked_conv

pytestmark = pytest.mark.usefixtures('torch_operators')


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 5]),
       st.integers(0, 999))
def test_it_is_convolution_where_the_mask_is(channels, height, width, kernel, seed):
    x, weight = draw(1, channels, height, width, seed=seed), draw(3, channels, kernel, kernel)
    bias, pad = draw(3, seed=2), kernel // 2
    mask = draw(1, height, width, seed=seed + 1) > 0
    out = masked_conv2d(x, mask, weight, bias, pad)
    expected = F.conv2d(x, weight, bias, padding=pad) * mask
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_the_kernel_need_not_be_square_and_the_input_may_be_a_view():
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
def test_other_precisions_are_copied_as_they_are(dtype):
    x, rows = draw(1, 2, 5, 5, dtype=dtype), torch.tensor([1, 3])
    col = torch.zeros(2, 2, dtype=dtype)
    masked_conv.masked_im2col_forward(x, rows, rows, col, 1, 1, 0, 0)
    assert torch.equal(col, x[0][:, rows, rows])
    image = torch.zeros_like(x)
    masked_conv.masked_col2im_forward(col, rows, rows, image, 5, 5, 2)
    assert torch.equal(image[0][:, rows, rows], col) and image.count_nonzero() == 4
