"""Functions, products and convolutions of ``cpu='portable'`` compute what torch's own do."""
import math

import pytest
import torch
import torch.nn.functional as F

from mmrepro.errors import DeterminismError
from mmrepro.ops import portable
from mmrepro.ops.portable.table import REFUSED, ROUTED

FUNCTIONS = [row.operator for row in ROUTED if row.target.startswith('functions:')
             and '.' not in row.operator]
SPECIAL = torch.tensor([0., -0., math.inf, -math.inf, math.nan, 1, -1, 2, -2, 1e-30, -1e-30, 1e30,
                        1e-45, 0.5, 88.7, -103, 1e5, 1e9])


@pytest.fixture(autouse=True)
def without_mkl(monkeypatch):
    """Install the kernels for a test; no fused attention, as with cpu='portable'."""
    flash = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    portable.install()
    yield
    portable.uninstall()
    torch.backends.cuda.enable_flash_sdp(flash)


def stock(function, *args):
    """Call a function while torch's own kernels answer."""
    portable.uninstall()
    try:
        return function(*args)
    finally:
        portable.install()


def arguments(name):
    random = torch.Generator().manual_seed(1)
    x = torch.randn(5, 4, 1000, generator=random)
    if name in ('sqrt', 'log', 'log2', 'log10'):
        return (x * 6).exp2()
    return x.tanh() if name in ('asin', 'acos', 'erfinv') else x * 6


@pytest.mark.parametrize('name', FUNCTIONS)
def test_float32_is_rounded_from_the_exact_value(name):
    x, function = arguments(name), getattr(torch, name)
    expected = stock(function, x.double()).float()
    assert torch.equal(function(x), expected)
    found = function(SPECIAL)
    assert torch.allclose(found[:-1], stock(function, SPECIAL)[:-1], rtol=1e-6, atol=0,
                          equal_nan=True) or name in ('sin', 'cos', 'tan')
    small = SPECIAL.abs() < 1e6
    assert torch.allclose(found[small], stock(function, SPECIAL)[small], rtol=1e-6, atol=0,
                          equal_nan=True)
    zero = function(torch.tensor([0., -0.]))
    assert torch.equal(zero.signbit(), stock(function, torch.tensor([0., -0.])).signbit())


@pytest.mark.parametrize('name', FUNCTIONS)
def test_every_form_of_a_function(name):
    x, function = arguments(name), getattr(torch, name)
    expected = function(x)
    assert torch.equal(function(x.transpose(0, 2)), expected.transpose(0, 2))
    channels_last = x[None].contiguous(memory_format=torch.channels_last)
    assert torch.equal(function(channels_last), expected[None])
    assert function(channels_last).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(function(x[:, ::2].expand(3, 5, 2, 1000)), expected[:, ::2].expand(
        3, 5, 2, 1000))
    out = torch.empty(0)
    assert function(x, out=out) is out and torch.equal(out, expected)
    changed = x.clone()
    assert getattr(changed, f'{name}_')() is changed and torch.equal(changed, expected)
    assert torch.equal(function(x[0, 0, 0]), expected[0, 0, 0])
    assert function(torch.empty(0, 3)).shape == (0, 3)
    numbers = torch.tensor([0, 1])
    assert torch.equal(function(numbers), function(numbers.float()))
    with pytest.raises(RuntimeError, match="can't be cast"):
        getattr(numbers, f'{name}_')()
    assert torch.allclose(function(x.double()), stock(function, x.double()), rtol=1e-13, atol=1e-15)
    short = x.bfloat16()
    assert torch.equal(function(short), stock(function, short))
    leaf = x[0, 0, :7].clone().requires_grad_()
    assert torch.isfinite(torch.autograd.grad(function(leaf).sum(), leaf)[0]).all()


def test_other_numbers_stay_with_torch():
    x = torch.randn(9, dtype=torch.complex64)
    assert torch.equal(x.exp(), stock(torch.exp, x))
    assert torch.equal(torch.tensor(2).pow(0.5), torch.tensor(2.).sqrt())
    assert torch.equal(SPECIAL ** 0.3, stock(lambda: SPECIAL ** 0.3)) or SPECIAL.isnan().any()


PRODUCTS = {
    'mm': lambda r: r(5, 7) @ r(7, 3),
    'mm, transposed': lambda r: r(7, 5).t() @ r(3, 7).t(),
    'mm, every other row': lambda r: r(10, 7)[::2] @ r(7, 6)[:, ::2],
    'mm, expanded': lambda r: r(1, 7).expand(4, 7) @ r(7, 1).expand(7, 5),
    'mm, nothing to add': lambda r: r(5, 0) @ r(0, 3),
    'mm, no rows': lambda r: r(0, 4) @ r(4, 3),
    'large': lambda r: r(130, 300) @ r(300, 90),
    'mv': lambda r: r(50, 70) @ r(70),
    'dot': lambda r: r(999) @ r(999),
    'vdot': lambda r: torch.vdot(r(9), r(9)),
    'bmm, small': lambda r: torch.bmm(r(50, 3, 4), r(50, 4, 5)),
    'bmm, large': lambda r: torch.bmm(r(2, 60, 40), r(2, 40, 50)),
    'bmm, transposed': lambda r: torch.bmm(r(2, 60, 40), r(2, 50, 40).transpose(1, 2)),
    'bmm, empty': lambda r: torch.bmm(r(0, 3, 4), r(0, 4, 5)),
    'linear': lambda r: F.linear(r(2, 5, 7), r(4, 7), r(4)),
    'addmm': lambda r: torch.addmm(r(5, 3), r(5, 7), r(7, 3), beta=0.5, alpha=2),
    'addmm, a column': lambda r: torch.addmm(r(5, 1), r(5, 7), r(7, 3)),
    'addmv': lambda r: torch.addmv(r(5), r(5, 7), r(7), beta=2, alpha=3),
    'baddbmm': lambda r: torch.baddbmm(r(2, 5, 3), r(2, 5, 7), r(2, 7, 3), beta=0.5),
    'addbmm': lambda r: torch.addbmm(r(5, 3), r(2, 5, 7), r(2, 7, 3)),
    'einsum': lambda r: torch.einsum('bij,bkj->bik', r(2, 4, 5), r(2, 3, 5)),
    'attention': lambda r: F.scaled_dot_product_attention(r(2, 4, 9, 8), r(2, 4, 9, 8),
                                                          r(2, 4, 9, 8)),
    'sum of squares': lambda r: torch.cdist(r(30, 4), r(40, 4)),
}


def randoms(dtype):
    random = torch.Generator().manual_seed(2)
    return lambda *shape: torch.randn(*shape, generator=random).to(dtype)


# types that torch does not have these two for
MISSING = {'attention': [torch.complex64], 'sum of squares': [torch.complex64, torch.bfloat16]}


@pytest.mark.parametrize('name, dtype, error', [
    (name, dtype, error) for name in PRODUCTS for dtype, error in (
        (torch.float32, 1e-5), (torch.float64, 1e-13), (torch.bfloat16, 0.05),
        (torch.complex64, 1e-5)) if dtype not in MISSING.get(name, ())])
def test_products(name, dtype, error):
    found = PRODUCTS[name](randoms(dtype))
    expected = stock(PRODUCTS[name], randoms(dtype))
    assert found.dtype == dtype and found.shape == expected.shape
    scale = max(1., float(expected.abs().max())) if expected.numel() else 1.
    assert torch.allclose(found, expected, rtol=0, atol=error * scale)


def test_products_of_integers_are_exact():
    a, b = torch.arange(12).view(3, 4), torch.arange(8).view(4, 2)
    assert torch.equal(a @ b, (a[:, :, None] * b).sum(1))
    assert torch.equal(torch.bmm(a[None], b[None]), (a @ b)[None])


def test_a_term_whose_factor_is_zero_is_not_read():
    nothing = torch.full((2, 2), math.nan)
    assert torch.equal(torch.addmm(nothing, torch.eye(2), torch.eye(2), beta=0), torch.eye(2))
    out = torch.empty(0)
    assert torch.mm(torch.eye(2), torch.ones(2, 3), out=out) is out and out.shape == (2, 3)
    sums = torch.ones(2, 2)
    assert torch.equal(sums.addmm_(torch.eye(2), torch.eye(2)), torch.eye(2) + 1)


@pytest.mark.parametrize('a, b', [((2, 3), (2, 3)), ((2, 3, 4), (3, 4, 2)), ((2, 3), (4, ))])
def test_what_does_not_fit_has_the_error_of_torch(a, b):
    function = torch.bmm if len(a) == 3 else torch.matmul
    with pytest.raises(RuntimeError) as expected:
        stock(function, torch.ones(a), torch.ones(b))
    with pytest.raises(RuntimeError) as found:
        function(torch.ones(a), torch.ones(b))
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize('include_last, padding', [(False, None), (True, None), (False, 3)])
def test_the_gradient_of_the_weights_of_a_bag(include_last, padding):
    random = torch.Generator().manual_seed(4)
    table, weights = torch.randn(9, 5, generator=random), torch.randn(12, generator=random)
    indices = torch.randint(9, (12, ), generator=random)
    offsets = torch.tensor([0, 3, 3, 7] + [12] * include_last)

    def gradient():
        leaf = weights.clone().requires_grad_()
        bags = F.embedding_bag(indices, table, offsets, mode='sum', per_sample_weights=leaf,
                               include_last_offset=include_last, padding_idx=padding)
        return torch.autograd.grad(bags.square().sum(), leaf)[0]

    assert torch.allclose(gradient(), stock(gradient), rtol=1e-5, atol=1e-5)


def conv(dimensions, images, channels, size, filters, kernel, transposed=False, **settings):
    random = torch.Generator().manual_seed(3)
    groups = settings.get('groups', 1)
    shape = (channels, filters // groups) if transposed else (filters, channels // groups)
    leaves = [torch.randn(*shape, generator=random).requires_grad_() for shape in (
        (images, channels, *[size] * dimensions), (*shape, *[kernel] * dimensions), (filters, ))]
    function = getattr(F, f'conv{"_transpose" if transposed else ""}{dimensions}d')
    result = function(*leaves, **settings)
    upstream = torch.randn(result.shape, generator=random)
    return [result, *torch.autograd.grad(result, leaves, upstream)]


CONVOLUTIONS = {
    '1x1': (2, 2, 8, 9, 16, 1), '1x1, one image': (2, 1, 8, 3, 16, 1),
    '1x1, strided': (2, 2, 8, 9, 16, 1), '1x1, by groups': (2, 2, 8, 5, 16, 1),
    '3x3, one small image': (2, 1, 4, 6, 5, 3), '3x3': (2, 2, 4, 6, 5, 3),
    '3x3, dilated': (2, 1, 4, 9, 5, 3), '3x3, by channel': (2, 1, 8, 5, 8, 3),
    '7x7': (2, 1, 3, 20, 8, 7), 'in one dimension': (1, 1, 4, 9, 5, 3),
    '1 in one dimension': (1, 2, 4, 9, 5, 1), 'in three': (3, 1, 3, 5, 4, 3),
    '1 in three': (3, 2, 3, 5, 4, 1), '3x3, dilated by 4': (2, 2, 4, 9, 5, 3),
    '3x3, four channels a group': (2, 2, 8, 7, 16, 3), '9x9, strided': (2, 1, 2, 12, 3, 9),
    'dilated by 4 in one dimension': (1, 2, 4, 9, 5, 3),
    **{f'{kernel}x{kernel}, transposed, images: {images}': (2, images, 6, 5, 4, kernel, True)
       for kernel in (1, 2, 3) for images in (1, 2)},
}
SETTINGS = {'1x1, strided': dict(stride=2), '1x1, by groups': dict(groups=4),
            '3x3, dilated': dict(dilation=2, padding=2), '3x3, by channel': dict(groups=8),
            '3x3, dilated by 4': dict(dilation=4, padding=4),
            'dilated by 4 in one dimension': dict(dilation=4, padding=4),
            '3x3, four channels a group': dict(groups=2, padding=1),
            '9x9, strided': dict(stride=2, padding=4), '7x7': dict(stride=2, padding=3),
            'transposed': dict(stride=2)}


@pytest.mark.parametrize('name', CONVOLUTIONS)
def test_convolutions_and_their_gradients(name):
    settings = SETTINGS.get('transposed' if 'transposed' in name else name, {})
    expected = stock(lambda: conv(*CONVOLUTIONS[name], **settings))
    for found, wanted in zip(conv(*CONVOLUTIONS[name], **settings), expected):
        assert found.shape == wanted.shape and torch.allclose(found, wanted, 1e-4, 1e-4)


def test_convolutions_in_16_bits_go_through_float32():
    x, weight = torch.randn(1, 3, 5, 5), torch.randn(4, 3, 1, 1)
    found = F.conv2d(x.bfloat16(), weight.bfloat16())
    assert torch.equal(found, F.conv2d(x.bfloat16().float(), weight.bfloat16().float()).bfloat16())
    layer = torch.nn.Conv2d(3, 4, 1).bfloat16()
    layer(x.bfloat16()).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


def test_what_only_mkl_computes_is_refused_by_name():
    for call, name in ((lambda: torch.linalg.inv(torch.eye(2)), 'aten::linalg_inv_ex .LAPACK.'),
                       (lambda: torch.fft.rfft(torch.ones(4)), 'aten::_fft_r2c'),
                       (lambda: torch.eye(3).to_sparse_csr() @ torch.ones(3, 3), 'aten::mm .spar'),
                       (lambda: F.conv2d(torch.ones(1, 1, 3, 3).double(),
                                         torch.ones(1, 1, 1, 1).double()),
                        r'a convolution of torch.float64 tensors, input \[1, 1, 3, 3\]')):
        with pytest.raises(DeterminismError, match=f"{name}.* is refused with .*cpu='portable'"):
            call()


def test_mode_warn_computes_it_and_says_so():
    torch.set_deterministic_debug_mode('warn')
    try:
        with pytest.warns(UserWarning, match="aten::linalg_inv_ex .LAPACK. is not portable, with"):
            assert torch.equal(torch.linalg.inv(torch.eye(2)), torch.eye(2))
    finally:
        torch.set_deterministic_debug_mode('default')


def test_without_it_everything_is_as_it_was():
    x = arguments('exp')
    ours = torch.special.gammainc(x.abs(), x.abs()).sum(), x.exp()
    portable.uninstall()
    assert not portable.installed() and torch.linalg.inv(torch.eye(2)).equal(torch.eye(2))
    assert torch.allclose(x.exp(), ours[1])


def test_every_name_of_the_table_is_one_of_torch():
    for name in (*REFUSED, *(row.operator.partition('.')[0] for row in ROUTED)):
        assert hasattr(torch.ops.aten, name), name
