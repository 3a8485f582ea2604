import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrepro.ops import gather


def dense(index, weight, starts, columns):
    """Return the matrix that the taps describe, float64; a tap at ``columns`` is nothing."""
    matrix = torch.zeros(len(starts) - 1, columns + 1, dtype=torch.float64)
    for bag in range(len(starts) - 1):
        for tap in range(starts[bag], starts[bag + 1]):
            matrix[bag, index[tap]] += weight[tap]
    return matrix[:, :columns]


@st.composite
def taps(draw):
    columns = draw(st.integers(1, 7))
    counts = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    total = sum(counts)
    index = draw(st.lists(st.integers(0, columns), min_size=total, max_size=total))
    weight = draw(st.lists(st.floats(-2, 2), min_size=total, max_size=total))
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return columns, counts, index, weight, starts


@settings(max_examples=60, deadline=None)
@given(taps(), st.sampled_from([torch.float32, torch.float64]))
def test_the_three_sums_are_a_matrix_its_transpose_and_its_gradient(tap, dtype):
    columns, counts, index, weight, starts = tap
    matrix = dense(index, weight, starts, columns)
    rows = torch.randn(columns + 1, 3, dtype=torch.float64)
    rows[-1] = 0
    grad = torch.randn(len(counts), 3, dtype=torch.float64)
    index = torch.tensor(index, dtype=torch.int32)
    weight = torch.tensor(weight, dtype=dtype)
    bag = torch.repeat_interleave(torch.tensor(counts)).to(torch.int32)
    out = gather.gather_sum(rows.to(dtype), index, weight, torch.tensor(starts, dtype=torch.int32))
    back = gather.scatter_sum(grad.to(dtype), index, weight, columns, bag)
    dots = gather.dots(grad.to(dtype), rows.to(dtype), index, bag)
    torch.testing.assert_close(out.double(), matrix @ rows[:-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(back.double(), matrix.t() @ grad, rtol=1e-5, atol=1e-5)
    expected = (grad[bag.long()] * rows[index.long()]).sum(1)
    torch.testing.assert_close(dots.double(), expected, rtol=1e-5, atol=1e-5)
    assert out.dtype == back.dtype == dots.dtype == dtype


def test_taps_of_a_row_are_added_in_their_order():
    # 1 + 2**-30 is lost in float32 unless the small ones meet first.
    small = 2. ** -24
    source = torch.tensor([[1.]] + [[small]] * 4)
    index = torch.zeros(5, 1, dtype=torch.int32)
    forward = gather.scatter_sum(source, index, torch.ones(5, 1), 1)
    backward = gather.scatter_sum(source.flip(0), index, torch.ones(5, 1), 1)
    assert forward.item() == 1. and backward.item() > 1.


@pytest.mark.parametrize('few', [True, False])
def test_reading_few_pixels_or_all_gives_the_same_bytes(wave, monkeypatch, few):
    feature = wave(3, 4, 5, 6, dtype=torch.float32)
    index = (wave(40, 3, phase=1).abs() * 91).to(torch.int32)
    # Nothing of image 1; pixel 90 is padding.
    index[(index >= 30) & (index < 60)] = 90
    weight, grad = wave(40, 3, phase=2).float(), wave(40, 4, phase=3).float()
    monkeypatch.setattr(gather, '_few', lambda *_: few)
    source, sink = gather.Source(feature), gather.Sink(torch.ones_like(feature))
    whole = gather.gather_sum(gather.rows_of(feature), index, weight)
    rows, compact = source.rows(index)
    assert torch.equal(gather.gather_sum(rows, compact, weight), whole)
    sink.scatter_sum(grad, index, weight)
    sink.close()
    expected = torch.ones_like(feature)
    gather.add_rows(expected, gather.scatter_sum(grad, index, weight, 90))
    assert torch.equal(sink._grad, expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=12), st.integers(1, 15))
def test_chunks_cover_everything_within_the_budget(items, budget):
    costs, widths = [i[0] for i in items], [i[1] for i in items]
    runs = gather.chunk_by_cost(costs, budget, widths)
    assert [i for a, b in runs for i in range(a, b)] == list(range(len(items)))
    for a, b in runs:
        assert b - a == 1 or (sum(costs[a:b]) <= budget and (b - a) * max(widths[a:b]) <= budget)
