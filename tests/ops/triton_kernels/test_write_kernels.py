"""Writes by index and scattered sums: the same bits in any order."""
import fractions

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrepro.ops import aten, gather
from mmrepro.ops.aten import dispatch, indexed_writes

DTYPES = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool)


@pytest.fixture
def launched(interpreted, monkeypatch):
    """Install the replacement for the CPU; returns the targets that its kernel has written to."""
    written = []
    write = interpreted.write_kernels.write
    monkeypatch.setattr(interpreted.write_kernels, 'write',
                        lambda target, *rest: written.append(target) or write(target, *rest))
    monkeypatch.setattr(indexed_writes, '_kernels', lambda: interpreted.write_kernels)
    monkeypatch.setattr(dispatch, 'TABLE', [row._replace(devices=('cpu',)) for row in aten.TABLE
                                            if row.operator == '_index_put_impl_'])
    aten.install(['cpu'])
    torch.use_deterministic_algorithms(True)
    yield written
    torch.use_deterministic_algorithms(False)
    aten.uninstall()


def expected(target, index, values):
    torch.use_deterministic_algorithms(False)  # torch's kernel for a CPU
    result = target.clone()
    result[index] = values
    torch.use_deterministic_algorithms(True)
    return result


@settings(max_examples=40, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_what_a_cpu_writes(launched, wave, data):
    """Indices and pairs of them, with repetitions and from the end, masks, and broadcast values."""
    def number(low, high):
        return data.draw(st.integers(low, high))
    size, other, width, count = number(1, 9), number(1, 4), number(1, 70), number(0, 40)
    kind = data.draw(st.sampled_from(['index', 'table', 'pair', 'mask', 'masks']))
    first = torch.tensor(data.draw(st.lists(
        st.integers(-size, size - 1), min_size=count, max_size=count)), dtype=torch.int64)
    second = (first * 7 + torch.arange(count)) % other
    indices = {'index': (first,), 'table': (torch.stack((first, first.flip(0))),),
               'pair': (first, second), 'mask': (wave(size) > 0,),
               'masks': (wave(size, other) > 0,)}
    index = indices[kind]
    target = (wave(size, other, width) * 100).to(data.draw(st.sampled_from(DTYPES)))
    rest = target[index].shape[data.draw(st.integers(0, 1)):]
    values = (wave(*rest, phase=1.) * 100).to(target.dtype)
    result, before = target.clone(), len(launched)
    result[index] = values
    assert torch.equal(result, expected(target, index, values))
    assert len(launched) > before or values.numel() < 2


def test_numbers_and_tensors_of_one_element(launched, wave):
    target, index = wave(6, 5), torch.tensor([4, -6, 4])
    for where in ((index,), (index, torch.tensor([0, 3, -1])), (target[:, 0] > 0,)):
        for value in (7., torch.tensor(7., dtype=torch.float64)):
            result = target.clone()
            result[where] = value
            assert torch.equal(result, expected(target, where, value))


def test_gradients_and_sums(launched, wave):
    """A write is differentiated as ever, and sums remain torch's."""
    values = wave(3, 4).requires_grad_()
    target = torch.zeros(5, 4, dtype=torch.float64)
    target[torch.tensor([4, 0, 4])] = values
    assert len(launched) == 1
    target.mul(target).sum().backward()
    found, values.grad = values.grad, None
    torch.use_deterministic_algorithms(False)
    other = torch.zeros(5, 4, dtype=torch.float64)
    other[torch.tensor([4, 0, 4])] = values
    other.mul(other).sum().backward()
    assert torch.equal(found, values.grad)
    torch.use_deterministic_algorithms(True)
    summed = torch.zeros(3).index_put_((torch.tensor([1, 1]),), torch.ones(2), accumulate=True)
    assert summed.tolist() == [0, 2, 0] and len(launched) == 1


@pytest.mark.parametrize('where', [
    (slice(None), torch.tensor([1, 2, 0])), (torch.tensor([[0, 1, 0]]).bool()[0], slice(0, 2))])
def test_other_writes_are_left_to_torch(launched, wave, where):
    target = wave(3, 3).t()  # not contiguous
    result = target.clone()
    result[where] = wave(1, phase=2.)
    assert torch.equal(result, expected(target, where, wave(1, phase=2.)))


def test_what_torch_refuses_is_refused(launched, wave):
    target = wave(4, 3)
    with pytest.raises(IndexError, match='out of range|out of bounds'):
        target[torch.tensor([0, 4])] = wave(2, 3)
    with pytest.raises(IndexError, match='out of range|out of bounds'):
        target[torch.tensor([0, 3]), torch.tensor([-4, 0])] = wave(2)
    with pytest.raises(RuntimeError, match='expanded size'):
        target[torch.tensor([True, False, True, True])] = wave(2, 3)
    with pytest.raises(RuntimeError, match='dtype'):
        target[torch.tensor([0, 1])] = wave(2, 3).float()
    assert torch.equal(target, wave(4, 3)) and not launched


def test_every_element_is_written_once(launched, wave, monkeypatch):
    """Triton's interpreter writes in order, a GPU does not."""
    from triton.runtime.interpreter import interpreter_builder
    builder, written = type(interpreter_builder), []
    store = builder.create_masked_store

    def noted(self, where, value, mask, *rest):
        written.extend(where.data[mask.data].tolist())
        return store(self, where, value, mask, *rest)

    monkeypatch.setattr(builder, 'create_masked_store', noted)
    index = torch.arange(100) * 37 % 7 - 7
    result, target = torch.zeros(7, 20), torch.zeros(7, 20)
    result[index] = wave(100, 20, dtype=torch.float32)
    assert torch.equal(result, expected(target, index, wave(100, 20, dtype=torch.float32)))
    assert len(written) == len(set(written)) == 140


LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def scatter_sum(interpreted):
    return interpreted.scatter_kernels.scatter_sum


def exact(source, index, weight, size):
    sums = [[fractions.Fraction(0)] * source.shape[1] for _ in range(size)]
    for bag, (rows, weights) in enumerate(zip(index.tolist(), weight)):
        for row, one in zip(rows, weights):
            if row < size:
                products = (source[bag] * one).tolist()
                sums[row] = [a + fractions.Fraction(b) for a, b in zip(sums[row], products)]
    return sums


@settings(max_examples=12, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 70), st.integers(1, 9),
       st.integers(-60, 60), st.integers(0, 9))
def test_sums_are_exact_to_the_bound(scatter_sum, bags, taps, channels, size, exponent, seed):
    generator = torch.Generator().manual_seed(seed)
    source = torch.randn(bags, channels, generator=generator) * 2. ** exponent
    weight = torch.randn(bags, taps, generator=generator)
    index = torch.randint(0, size + 2, (bags, taps), generator=generator)  # some are padding
    found = scatter_sum(source, index, weight, size)
    assert found.dtype == torch.float32 and found.shape == (size, channels)
    bound = fractions.Fraction(float(source.abs().max())) * fractions.Fraction(
        float(weight.abs().max())) * (bags * taps) ** 2 / 2 ** 58
    for row, expected in zip(found.tolist(), exact(source, index, weight, size)):
        for one, other in zip(row, expected):
            # and the one rounding to float32
            assert abs(fractions.Fraction(one) - other) <= bound + abs(other) / 2 ** 24


def test_the_order_of_taps_does_not_matter(scatter_sum):
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(300, 3, generator=generator)
    weight = torch.randn(300, 1, generator=generator)
    index = torch.randint(0, 4, (300, 1), generator=generator)
    order = torch.randperm(300, generator=generator)
    shuffled = source[order], index[order], weight[order], 4
    assert torch.equal(scatter_sum(source, index, weight, 4), scatter_sum(*shuffled))
    assert not torch.equal(gather.scatter_sum(source, index, weight, 4),
                           gather.scatter_sum(*shuffled)), 'sums of floats depend on it'


@pytest.mark.parametrize('value, number', [
    (1e30, 200), (LARGEST, 3), (1.9 ** 63, 64), (1e-38, 200), (1e-44, 5), (1., 1), (1., 65)])
def test_sums_of_equal_values_never_overflow(scatter_sum, value, number):
    """All taps have the largest value and go to one row: the most that a sum can be."""
    value = float(torch.tensor(value))
    for sign in (1, -1):
        index = torch.zeros(number, 1, dtype=torch.int32)
        found = scatter_sum(torch.full((number, 2), value), index,
                            torch.full((number, 1), float(sign)), 1)
        expected = torch.full((1, 2), sign * value * number, dtype=torch.float64).float()
        assert torch.equal(found, expected)


def test_infinities_and_nan_stay_where_they_belong(scatter_sum):
    infinity, nan = float('inf'), float('nan')
    source = torch.tensor([[infinity], [-infinity], [nan], [1.], [0.]])
    index = torch.tensor([[0, 1], [0, 2], [3, 5], [4, 1], [0, 6]])
    found = scatter_sum(source, index, torch.ones(5, 2), 6)
    assert torch.allclose(found, gather.scatter_sum(source, index, torch.ones(5, 2), 6),
                          equal_nan=True)
    assert found.isnan().flatten().tolist() == [True, False, False, True, False, True]
    assert found[[1, 2, 4]].flatten().tolist() == [infinity, -infinity, 1.]
    # the product of finite numbers, and a sum
    source, weight = torch.tensor([[LARGEST], [-LARGEST]]), torch.tensor([[2., 1, 1], [2, 1, 1]])
    index = torch.tensor([[0, 1, 1], [2, 3, 3]])
    assert scatter_sum(source, index, weight, 4).flatten().tolist() == [
        infinity, infinity, -infinity, -infinity]


def test_any_memory_and_nothing_to_sum(scatter_sum, wave):
    source, weight = wave(7, 5, dtype=torch.float32), wave(7, 1, dtype=torch.float32)
    index = torch.tensor([0, 1, 1, 2, 0, 3, 9])[:, None]
    expected = gather.scatter_sum(source, index, weight, 4)
    assert torch.allclose(scatter_sum(source, index, weight, 4), expected, rtol=1e-6)
    # a view that is neither contiguous nor aligned
    shifted = torch.cat((torch.zeros(1, 1), weight))[1:]
    assert shifted.data_ptr() % 16 and torch.equal(
        scatter_sum(source.t().contiguous().t(), index, shifted, 4),
        scatter_sum(source, index, weight, 4))
    assert torch.equal(scatter_sum(source, index[:0], weight[:0], 2), torch.zeros(2, 5))
    assert scatter_sum(source, index[:3], weight[:3], 0).shape == (0, 5)
    assert (scatter_sum(torch.zeros(7, 5), index, weight, 4) == 0).all()


def test_other_dtypes_are_refused(scatter_sum, wave):
    with pytest.raises(TypeError, match='must be torch.float32, not torch.float64 and'):
        scatter_sum(wave(3, 5), torch.zeros(3, 1, dtype=torch.int64), wave(3, 1), 2)
