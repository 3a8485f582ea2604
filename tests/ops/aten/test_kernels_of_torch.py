"""Replacements of torch's own operators against torch's CPU kernels, forward and backward.

The functions that the dispatcher would call for CUDA are called on CPU tensors: through autograd,
installed for the CPU, and compared in float64 with what torch gives without them.
"""
import contextlib

import pytest
import torch
import torch.nn.functional as F

from mmrepro.ops import aten
from mmrepro.ops.aten import dispatch, grid_sample


@pytest.fixture
def on_cpu(monkeypatch):
    """Install every replacement for the CPU, those that are meant for CUDA alone as well.

    In the end, check that every one that was installed can be taken away again.
    """
    rows = [row._replace(devices=('cpu',), until=(99, 0)) for row in aten.TABLE if row.target]
    monkeypatch.setattr(dispatch, 'TABLE', rows)

    def installed():
        aten.install(['cpu'])
        stack = contextlib.ExitStack()
        stack.callback(aten.uninstall)
        return stack

    yield installed
    assert aten.installed() == ()


def gradients(function, leaves, upstream=None):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    if upstream is None:
        upstream = (torch.arange(out.numel(), dtype=torch.float64) * 0.7).sin().view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]


def resize(mode, **options):
    return lambda x: F.interpolate(x, mode=mode, **options)


RESIZED = [('bilinear', (2, 3, 5, 7), (9, 3)), ('bilinear', (1, 2, 6, 6), (6, 12)),
           ('bilinear', (1, 1, 1, 4), (3, 1)), ('bicubic', (2, 3, 5, 7), (9, 3)),
           ('bicubic', (1, 2, 6, 6), (6, 12)), ('bicubic', (1, 1, 1, 4), (3, 1))]
# A function of a map, and the shape of the map.
RESIZES = {
    **{f'{mode} {shape} to {size}, align {align}': (
        resize(mode, size=size, align_corners=align), shape)
        for mode, shape, size in RESIZED for align in (True, False)},
    **{f'bilinear by factors, recompute {recompute}': (
        resize('bilinear', scale_factor=(1.7, 0.6), recompute_scale_factor=recompute), (2, 3, 5, 6))
        for recompute in (None, True)},
}
POOLS = {
    'adaptive_avg2d': (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (2, 3, 7, 5)),
    'adaptive_avg2d, one image': (lambda x: F.adaptive_avg_pool2d(x, (3, 4)), (3, 7, 9)),
    'adaptive_avg2d, larger': (lambda x: F.adaptive_avg_pool2d(x, (9, 8)), (2, 3, 7, 5)),
    'adaptive_max2d': (lambda x: F.adaptive_max_pool2d(x, (9, 4)), (2, 3, 7, 5)),
    'reflect 2d': (lambda x: F.pad(x, (2, 3, 0, 4), 'reflect'), (2, 3, 6, 5)),
    'replicate 2d': (lambda x: F.pad(x, (2, 3, 0, 4), 'replicate'), (2, 3, 6, 5)),
    'replicate 2d, cropped': (lambda x: F.pad(x, (-1, 3, 2, -2), 'replicate'), (2, 3, 6, 5)),
}


@pytest.mark.parametrize('name', {**RESIZES, **POOLS})
def test_resizes_pools_and_pads(on_cpu, wave, name):
    function, shape = {**RESIZES, **POOLS}[name]
    expected = gradients(function, [wave(*shape)])
    with on_cpu():
        found = gradients(function, [wave(*shape)])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('padding', ['zeros', 'border'])
@pytest.mark.parametrize('align', [True, False])
def test_grid_sample(on_cpu, wave, padding, align):
    x, grid = wave(2, 3, 4, 5), wave(2, 3, 4, 2, phase=1.) * 1.9

    def sample(x, grid):
        return F.grid_sample(x, grid, 'bilinear', padding, align)

    expected = gradients(sample, [x, grid])
    with on_cpu():
        found = gradients(sample, [x, grid])
        only = gradients(lambda x: sample(x, grid), [x])
        where = gradients(lambda grid: sample(x, grid), [grid])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    assert torch.equal(only[1], found[1]) and torch.equal(where[1], found[2])


@pytest.mark.parametrize('mode, padding', [('nearest', 'zeros'), ('bicubic', 'zeros'),
                                           ('bilinear', 'reflection')])
def test_other_modes_of_grid_sample_are_refused(on_cpu, wave, mode, padding):
    x, grid = wave(1, 2, 4, 5).requires_grad_(), wave(1, 2, 3, 2, phase=1.)
    with on_cpu(), pytest.raises(RuntimeError, match='grid_sampler_2d_backward of a mode but'):
        F.grid_sample(x, grid, mode, padding, False).sum().backward()


def test_cudnns_grid_sample(wave):
    x, grid, grad = wave(2, 3, 4, 5), wave(2, 3, 6, 2, phase=1.) * 1.5, wave(2, 3, 3, 6, phase=2.)
    leaves = [x.requires_grad_(), grid.requires_grad_()]
    out = F.grid_sample(*leaves, align_corners=True)
    expected = torch.autograd.grad(out, leaves, grad)
    found = grid_sample.cudnn_grid_sample_backward(x.detach(), grid.detach(), grad)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_images_in_groups_give_the_same_bits(wave, monkeypatch):
    """The groups that bound the memory do not show."""
    x, grid, grad = wave(5, 2, 6, 7), wave(5, 4, 4, 2, phase=1.), wave(5, 2, 4, 4, phase=2.)
    whole = grid_sample.grid_sample_backward(grad, x, grid, 0, 0, False)
    monkeypatch.setattr(grid_sample.gather, 'chunk_taps', lambda device: 100)
    for a, b in zip(grid_sample.grid_sample_backward(grad, x, grid, 0, 0, False), whole):
        assert torch.equal(a, b)


def test_a_sample_that_is_not_a_number_reads_nothing(wave):
    x, grid = wave(1, 2, 4, 4), wave(1, 2, 3, 2, phase=1.)
    grid[0, 0, 0, 0] = float('nan')
    grid[0, 1, 1, 1] = float('inf')
    grad_x, _ = grid_sample.grid_sample_backward(wave(1, 2, 2, 3, phase=2.), x, grid, 0, 0, False)
    assert grad_x.isfinite().all()
    whole, _ = grid_sample.grid_sample_backward(
        wave(1, 2, 2, 3, phase=2.).masked_fill_(~grid.isfinite().all(-1)[:, None], 0), x,
        grid.nan_to_num(0, 0), 0, 0, False)
    torch.testing.assert_close(grad_x, whole)


@pytest.mark.parametrize('name', POOLS)
def test_an_infinite_gradient_stays_where_it_belongs(on_cpu, wave, name):
    """A loss scale that overflows makes infinities; 0 times one of them must not spread as NaN."""
    pool, shape = POOLS[name]
    x = wave(*shape).float()
    upstream = torch.zeros_like(pool(x))
    upstream.view(-1)[upstream.numel() // 2] = float('inf')
    expected = gradients(pool, [x], upstream)[1]
    with on_cpu():
        found = gradients(pool, [x], upstream)[1]
    assert torch.equal(found.isinf(), expected.isinf()) and not found.isnan().any()


def test_the_same_bits_for_any_number_of_threads(on_cpu, wave, same_bytes):
    x = wave(2, 32, 60, 60, dtype=torch.float32)
    grid = wave(2, 50, 50, 2, phase=1., dtype=torch.float32) * 0.1

    def everything():
        with on_cpu():
            return [part for function in (
                lambda x: F.interpolate(x, scale_factor=1.7, mode='bilinear'),
                lambda x: F.adaptive_avg_pool2d(x, 7), lambda x: F.adaptive_max_pool2d(x, 50),
                lambda x: F.grid_sample(x, grid, align_corners=False),
                lambda x: F.pad(x, (3, 4, 5, 6), 'reflect'), lambda x: x.cumsum(2))
                for part in gradients(function, [x])[1:]]

    same_bytes(everything)


@pytest.mark.nightly
@pytest.mark.parametrize('name', ['SOLOv2', 'Mask2Former', 'HTC', 'PointRend'])
def test_a_detector_trains_with_every_replacement(on_cpu, monkeypatch, name):
    """What CUDA would run, on the CPU: the same losses, nearly the same gradients, equal bits."""
    from mmdet.utils import register_all_modules

    from mmrepro.doctor import detectors
    register_all_modules(init_default_scope=True)
    runs, seen = [], []
    keep = detectors._keep_gradients

    def kept(wrapper, trained, grads):
        seen.append(grads)
        keep(wrapper, trained, grads)

    monkeypatch.setattr(detectors, '_keep_gradients', kept)
    detector = detectors.DETECTORS[name]
    everything = dispatch.TABLE
    # ties by index in both: which proposals are sampled is another matter
    monkeypatch.setattr(dispatch, 'TABLE', [row for row in aten.TABLE if 'cpu' in row.devices])
    with on_cpu():
        runs.append(detectors.train(detector, 'cpu', 96, 1, True))
    monkeypatch.setattr(dispatch, 'TABLE', everything)
    with on_cpu():
        for _ in range(2):
            runs.append(detectors.train(detector, 'cpu', 96, 1, True))
    assert detectors.first_difference(*runs[1:]) == ''
    assert runs[0].losses == runs[1].losses
    assert detectors.first_difference(*runs[:2]) != '', 'no replacement was reached'
    for parameter, grad in seen[0].items():
        off = (grad - seen[1][parameter]).norm() / grad.norm().clamp(min=1e-6)
        assert off < 1e-3, (parameter, float(off))
