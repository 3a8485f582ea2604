"""Replacements of torch's own operators against torch's CPU kernels, forward and backward.

The functions that the dispatcher would call for CUDA are called on CPU tensors: through autograd,
installed for the CPU, and compared in float64 with what torch gives without them.
"""
import contextlib

import pytest
import torch
import torch.nn.functional as F
from operators import with_gradients

from mmrepro import determinism
from mmrepro.ops import aten
from mmrepro.ops.aten import dispatch, grid_sample, selection, sums

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64,
          torch.uint8]


def tied(shape, dtype, seed=0, levels=7):
    """Few different values, negative ones and zeros of both signs among them."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randint(0, levels, shape, generator=random) - (0 if dtype == torch.uint8 else 3)
    values = values.to(dtype)
    if dtype.is_floating_point:
        sign = torch.randint(0, 2, shape, generator=random).bool()
        values = torch.where((values == 0) & sign, -torch.zeros_like(values), values)
    return values


def by_index(values, dim, descending):
    """Return what is promised, by Python's sort, which is stable."""
    rows = values.movedim(dim, -1)
    out = torch.empty(rows.shape, dtype=torch.int64)
    for row, target in zip(rows.reshape(-1, rows.shape[-1]), out.view(-1, rows.shape[-1])):
        items = row.tolist()

        def key(i, items=items):
            value = items[i]
            rank = (1, 0.) if value != value else (0, value)
            return (-rank[0], -rank[1]) if descending else rank

        target.copy_(torch.tensor(sorted(range(len(items)), key=key)))
    return out.movedim(-1, dim)


@pytest.mark.parametrize('dtype', DTYPES)
@pytest.mark.parametrize('dim', [0, 1, -1])
@pytest.mark.parametrize('largest', [True, False])
def test_topk_takes_the_lower_index(dtype, dim, largest):
    x = tied((13, 9, 11), dtype)
    expected = by_index(x, dim, largest)
    for k in (1, 4, x.shape[dim]):
        values, indices = selection.topk(x, k, dim, largest)
        assert torch.equal(indices, expected.narrow(dim, 0, k))
        assert torch.equal(values, x.gather(dim, indices))
        # signs of zeros are those of the elements that were taken
        assert torch.equal(values.double().signbit(), x.gather(dim, indices).double().signbit())


@pytest.mark.parametrize('largest', [True, False])
@pytest.mark.parametrize('levels', [4, 60, 1 << 20])
@pytest.mark.parametrize('special', [(), (float('inf'), -float('inf'), -0.), (float('nan'),)])
def test_topk_with_ties_at_the_limit_or_before_it(levels, largest, special):
    random = torch.Generator().manual_seed(levels)
    for trial in range(20):
        x = (torch.rand(2, 50, 3, generator=random) * levels).floor() / levels
        for value in special:
            x[torch.rand(x.shape, generator=random) < 0.04] = value
        for dtype in (torch.float32, torch.float64):
            expected = by_index(x.to(dtype), 1, largest)
            k = 1 + (7 * trial) % 50
            values, indices = selection.topk(x.to(dtype), k, 1, largest)
            assert torch.equal(indices, expected.narrow(1, 0, k))
            torch.testing.assert_close(values, x.to(dtype).gather(1, indices), equal_nan=True,
                                       rtol=0, atol=0)


@pytest.mark.parametrize('largest', [True, False])
def test_topk_of_nan_and_infinity(largest):
    x = torch.tensor([1., float('nan'), float('inf'), -float('inf'), -float('nan'), float('inf'),
                      -0., 0., float('nan'), 1e-45, -1e-45, 3e38])
    for dtype in (torch.float32, torch.float64):
        _, indices = selection.topk(x.to(dtype), len(x), 0, largest)
        assert torch.equal(indices, by_index(x, 0, largest))
        values = selection.topk(x.to(dtype), 5, 0, largest)[0]
        torch.testing.assert_close(values, torch.topk(x.to(dtype), 5, 0, largest)[0],
                                   equal_nan=True, rtol=0, atol=0)


def test_topk_of_nothing_and_errors():
    x = torch.arange(6.).view(2, 3)
    assert selection.topk(x, 0)[0].shape == (2, 0)
    assert selection.topk(torch.zeros(0, 5), 2)[1].shape == (0, 2)
    assert [t.item() for t in selection.topk(torch.tensor(3.), 1)] == [3., 0]
    with pytest.raises(RuntimeError, match='out of range'):
        selection.topk(x, 4)
    with pytest.raises(IndexError):
        selection.topk(x, 1, 5)


def test_thousands_of_equal_scores_through_torch(wave):
    """Installed, as deterministic mode does on a CPU: what a detector's head calls."""
    scores = wave(20000, dtype=torch.float32).mul(20).round().div(20)
    expected = by_index(scores, 0, True)
    with determinism.deterministic(env={}):
        assert torch.equal(scores.topk(2000)[1], expected[:2000])
        assert torch.equal(torch.topk(scores, 2000, sorted=False)[1], expected[:2000])
        assert torch.equal(scores.sort(descending=True)[1], expected)
        assert torch.equal(torch.sort(scores, 0, True).indices, expected)
        assert torch.equal(scores.argsort(descending=True), expected)
        leaf = scores.clone().requires_grad_()
        leaf.topk(2000)[0].sum().backward()
        assert torch.equal(leaf.grad.nonzero().flatten(), expected[:2000].sort()[0])


@pytest.mark.parametrize('dim', [0, 1])
@pytest.mark.parametrize('keepdim', [True, False])
def test_kthvalue(dim, keepdim):
    x = tied((8, 7), torch.float32)
    x[3, 2] = x[5, 1] = float('nan')
    x[:, 4] = float('nan')
    with_nan = dict(equal_nan=True, rtol=0, atol=0)
    for k in (1, 4, x.shape[dim]):
        values, indices = selection.kthvalue(x, k, dim, keepdim)
        torch.testing.assert_close(values, torch.kthvalue(x, k, dim, keepdim)[0], **with_nan)
        at = indices if keepdim else indices.unsqueeze(dim)
        assert torch.equal(at, by_index(x, dim, False).narrow(dim, k - 1, 1))
    with pytest.raises(RuntimeError, match='allowed: 1 to'):
        selection.kthvalue(x, 99, dim)
    assert [t.item() for t in selection.kthvalue(torch.tensor(2.), 1)] == [2., 0]


@pytest.mark.parametrize('shape,dim', [((5,), 0), ((4, 5), 0), ((4, 5), 1), ((3, 4, 5), -2)])
def test_scatter_add(wave, shape, dim):
    x = wave(*shape)
    source = wave(*[size + 1 for size in shape], phase=1.)
    index = (source.abs() * 97).long()[tuple(slice(size - 1) for size in shape)] % shape[dim]
    torch.testing.assert_close(sums.scatter_add(x, dim, index, source),
                               x.scatter_add(dim, index, source), rtol=1e-14, atol=1e-14)
    assert torch.equal(sums.scatter_add(x, dim, index[:0], source), x)
    again = x.clone()
    assert sums.scatter_add_(again, dim, index, source) is again
    assert torch.equal(again, sums.scatter_add(x, dim, index, source))


@pytest.mark.parametrize('shape,dim', [((1000,), 0), ((4, 9, 3), 1), ((4, 9), -1), ((3, 0), 1),
                                       ((5, 1), 1), ((), 0)])
def test_running_sums(wave, shape, dim):
    x = (wave(*shape).view(shape) if shape else torch.tensor(.5, dtype=torch.float64)) + 1.2
    before = x.clone()
    torch.testing.assert_close(sums.cumsum(x, dim), x.cumsum(dim), rtol=1e-12, atol=1e-12)
    assert torch.equal(x, before)
    whole = (x * 3).round()
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float16, torch.complex64):
        values = whole.to(dtype)
        for wanted in (None, dtype if dtype.is_complex else torch.float64):
            found, expected = (of(values, dim, dtype=wanted) for of in (sums.cumsum, torch.cumsum))
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    again = whole.clone()
    assert sums.cumsum_(again, dim) is again and torch.equal(again, sums.cumsum(whole, dim))


def test_a_running_sum_of_infinities_and_nan():
    inf, nan = float('inf'), float('nan')
    for values in ([-inf, 1., 2., inf], [1., nan, 2.], [-inf, -inf]):
        x = torch.tensor(values)
        torch.testing.assert_close(sums.cumsum(x, 0), x.cumsum(0), equal_nan=True)


@pytest.mark.parametrize('weighted', [True, False])
@pytest.mark.parametrize('reduction', [0, 1, 2])
def test_nll_loss2d(wave, weighted, reduction):
    logits = wave(2, 5, 3, 4).log_softmax(1)
    target = torch.arange(24).view(2, 3, 4) % 5
    target[0, 0] = -100
    weight = wave(5).abs() if weighted else None
    if reduction:
        logits[0, :, 0, 0] = -float('inf')  # ignored, so it must not count
    expected = torch.ops.aten.nll_loss2d_forward(logits, target, weight, reduction, -100)
    found = sums.nll_loss2d_forward(logits, target, weight, reduction, -100)
    torch.testing.assert_close(found, expected)
    with pytest.raises(RuntimeError, match=r'\(N, C, H, W\)'):
        sums.nll_loss2d_forward(logits, target[0], weight, reduction, -100)


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
    return with_gradients(function(*leaves), leaves, upstream)


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


RESIZES_AND_POOLS = {**RESIZES, **POOLS}


@pytest.mark.parametrize('name', RESIZES_AND_POOLS)
def test_resizes_pools_and_pads(on_cpu, wave, name):
    function, shape = RESIZES_AND_POOLS[name]
    expected = gradients(function, [wave(*shape)])
    with on_cpu():
        found = gradients(function, [wave(*shape)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
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
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_images_in_groups_give_the_same_bits(wave, monkeypatch):
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


def test_the_same_bits_for_any_number_of_threads(on_cpu, wave, check_same_bytes):
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

    check_same_bytes(everything)


@pytest.mark.nightly
@pytest.mark.parametrize('name', ['SOLOv2', 'Mask2Former', 'HTC', 'PointRend'])
def test_a_detector_trains_with_every_replacement(on_cpu, monkeypatch, name):
    """What CUDA would run, on the CPU: the same losses, nearly the same gradients, equal bits."""
    from mmdet.utils import register_all_modules

    from dev.gpu_check import detectors
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
