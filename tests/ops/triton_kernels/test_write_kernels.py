"""Writes by index: what torch's kernel on a CPU writes, one after another."""
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrepro.ops import aten
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
    index = {'index': (first,), 'table': (torch.stack((first, first.flip(0))),),
             'pair': (first, second), 'mask': (wave(size) > 0,),
             'masks': (wave(size, other) > 0,)}[kind]
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
    monkeypatch.setattr(builder, 'create_masked_store', lambda self, where, value, mask, *rest: (
        written.extend(where.data[mask.data].tolist()), store(self, where, value, mask, *rest))[1])
    index = torch.arange(100) * 37 % 7 - 7
    result, target = torch.zeros(7, 20), torch.zeros(7, 20)
    result[index] = wave(100, 20, dtype=torch.float32)
    assert torch.equal(result, expected(target, index, wave(100, 20, dtype=torch.float32)))
    assert len(written) == len(set(written)) == 140
