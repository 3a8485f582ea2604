"""Replacements of torch's own operators against torch's CPU kernels, forward and backward.

The functions that the dispatcher would call for CUDA are called on CPU tensors: through autograd,
installed for the CPU, and compared in float64 with what torch gives without them.
"""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmrepro.ops import native
from mmrepro.ops.native import dispatch


@pytest.fixture
def on_cpu(monkeypatch):
    """Install every replacement for the CPU, those that are meant for CUDA alone as well.

    In the end, check that every one that was installed can be taken away again.
    """
    rows = [row._replace(devices=('cpu',), until=(99, 0)) for row in native.TABLE if row.target]
    monkeypatch.setattr(dispatch, 'TABLE', rows)
    yield lambda: native.installing(['cpu'])
    assert native.installed() == ()


def gradients(function, leaves, upstream=None):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    if upstream is None:
        upstream = (torch.arange(out.numel(), dtype=torch.float64) * 0.7).sin().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


RESIZES = [
    ('linear', (2, 3, 7), (11,)), ('linear', (1, 2, 9), (4,)),
    ('bilinear', (2, 3, 5, 7), (9, 3)), ('bilinear', (1, 2, 6, 6), (6, 12)),
    ('bilinear', (1, 1, 1, 4), (3, 1)), ('bicubic', (2, 3, 5, 7), (9, 3)),
    ('bicubic', (1, 2, 2, 1), (5, 4)), ('trilinear', (2, 3, 3, 4, 5), (5, 4, 2)),
]


@pytest.mark.parametrize('mode,shape,size', RESIZES)
@pytest.mark.parametrize('align', [True, False])
def test_resize(on_cpu, wave, mode, shape, size, align):
    x = wave(*shape)

    def resize(x):
        return F.interpolate(x, size=size, mode=mode, align_corners=align)

    expected = gradients(resize, [x])
    with on_cpu():
        found = gradients(resize, [x])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('mode', ['bilinear', 'bicubic', 'trilinear', 'linear'])
@pytest.mark.parametrize('recompute', [None, True])
def test_resize_by_factor(on_cpu, wave, mode, recompute):
    dims = {'linear': 1, 'trilinear': 3}.get(mode, 2)
    factors = (1.7, 0.6, 2.3)[:dims]
    x = wave(2, 3, *(5, 6, 7)[:dims])

    def resize(x):
        return F.interpolate(x, scale_factor=factors, mode=mode,
                             recompute_scale_factor=recompute)

    expected = gradients(resize, [x])
    with on_cpu():
        found = gradients(resize, [x])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('mode', ['bilinear', 'bicubic'])
@pytest.mark.parametrize('size', [(3, 12), (4, 3), (9, 9)])
@pytest.mark.parametrize('align', [True, False])
def test_antialiased_resize(on_cpu, wave, mode, size, align):
    x = wave(2, 3, 8, 7)

    def resize(x):
        return F.interpolate(x, size=size, mode=mode, align_corners=align, antialias=True)

    expected = gradients(resize, [x])
    with on_cpu():
        found = gradients(resize, [x])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


POOLS = {
    'adaptive_avg2d': (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (2, 3, 7, 5)),
    'adaptive_avg2d, one image': (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (3, 7, 9)),
    'adaptive_avg2d, larger': (lambda x: F.adaptive_avg_pool2d(x, (9, 8)), (2, 3, 7, 5)),
    'adaptive_avg3d': (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), (2, 3, 5, 7, 5)),
    'adaptive_avg3d, one image': (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), (3, 5, 7, 5)),
    'avg3d': (lambda x: F.avg_pool3d(x, 2), (2, 3, 5, 6, 7)),
    'avg3d, padded': (lambda x: F.avg_pool3d(x, (3, 2, 3), (2, 1, 2), 1), (2, 3, 5, 6, 7)),
    'avg3d, ceil': (lambda x: F.avg_pool3d(x, 3, 2, 1, True, False), (2, 3, 6, 6, 7)),
    'avg3d, ceil counted': (lambda x: F.avg_pool3d(x, 3, 2, 1, True, True), (2, 3, 6, 6, 8)),
    'avg3d, divisor': (lambda x: F.avg_pool3d(x, 2, divisor_override=5), (3, 4, 4, 4)),
    'adaptive_max2d': (lambda x: F.adaptive_max_pool2d(x, (9, 4)), (2, 3, 7, 5)),
    'adaptive_max3d': (lambda x: F.adaptive_max_pool3d(x, (2, 9, 4)), (2, 3, 5, 7, 5)),
    'max3d': (lambda x: F.max_pool3d(x, 3, 1, 1), (2, 3, 5, 6, 7)),
    'max3d, dilated': (lambda x: F.max_pool3d(x, 2, 1, 0, 2), (3, 5, 6, 7)),
    'reflect 1d': (lambda x: F.pad(x, (2, 3), 'reflect'), (2, 3, 6)),
    'reflect 2d': (lambda x: F.pad(x, (2, 3, 0, 4), 'reflect'), (2, 3, 6, 5)),
    'reflect 3d': (lambda x: F.pad(x, (2, 3, 0, 4, 1, 2), 'reflect'), (2, 3, 4, 6, 5)),
    'replicate 1d': (lambda x: F.pad(x, (2, 3), 'replicate'), (2, 3, 6)),
    'replicate 2d': (lambda x: F.pad(x, (2, 3, 0, 4), 'replicate'), (2, 3, 6, 5)),
    'replicate 3d': (lambda x: F.pad(x, (2, 3, 0, 4, 7, 2), 'replicate'), (2, 3, 4, 6, 5)),
    'replicate 2d, cropped': (lambda x: F.pad(x, (-1, 3, 2, -2), 'replicate'), (2, 3, 6, 5)),
}


@pytest.mark.parametrize('name', POOLS)
def test_pooling_and_padding(on_cpu, wave, name):
    pool, shape = POOLS[name]
    expected = gradients(pool, [wave(*shape)])
    with on_cpu():
        found = gradients(pool, [wave(*shape)])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('axes,mode', [(2, 'bilinear'), (2, 'nearest'), (2, 'bicubic'),
                                       (3, 'bilinear'), (3, 'nearest')])
@pytest.mark.parametrize('padding', ['zeros', 'border', 'reflection'])
@pytest.mark.parametrize('align', [True, False])
def test_grid_sample(on_cpu, wave, axes, mode, padding, align):
    sizes, out = (4, 5, 6)[:axes], (3, 4, 5)[:axes]
    x, grid = wave(2, 3, *sizes), wave(2, *out, axes, phase=1.) * 1.9

    def sample(x, grid):
        return F.grid_sample(x, grid, mode, padding, align)

    expected = gradients(sample, [x, grid])
    with on_cpu():
        found = gradients(sample, [x, grid])
        only = gradients(lambda x: sample(x, grid), [x])
        where = gradients(lambda grid: sample(x, grid), [grid])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert torch.equal(only[1], found[1]) and torch.equal(where[1], found[2])
