"""Selections with ties, sums at an index and running sums, against torch's CPU kernels."""
import pytest
import torch

from mmrepro import determinism
from mmrepro.ops.aten import scatter, selection, sums

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
    torch.testing.assert_close(scatter.scatter_add(x, dim, index, source),
                               x.scatter_add(dim, index, source), rtol=1e-14, atol=1e-14)
    assert torch.equal(scatter.scatter_add(x, dim, index[:0], source), x)
    again = x.clone()
    assert scatter.scatter_add_(again, dim, index, source) is again
    assert torch.equal(again, scatter.scatter_add(x, dim, index, source))


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
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)
    with pytest.raises(RuntimeError, match=r'\(N, C, H, W\)'):
        sums.nll_loss2d_forward(logits, target[0], weight, reduction, -100)
