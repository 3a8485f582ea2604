"""What every operator promises, for every row of the catalogue of cases; the sums they share.

Each case calls mmcv's own Python on inputs with the most write conflicts: boxes overlap in three
locations, offsets move samples together, and scores have ties.
"""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.operator_check.cases_mmcv import CASES
from dev.operator_check.checking import once
from dev.operator_check.operator_cases import Inputs
from mmrepro import ops
from mmrepro.ops import gather
from mmrepro.ops.mmcv import deform_conv

pytestmark = pytest.mark.usefixtures('torch_operators')

# Differentiable, and computed in the precision of the inputs.
ANY_PRECISION = [name for name, case in CASES.items() for call in [case.make(Inputs(True))]
                 if call.leaves and call.double]
# Libraries may divide the inner dimension of a matrix product among threads.
MATRIX_PRODUCTS = ('DCNv1', 'DCNv2')
# Inputs of a quarter of a detector's size take seconds.
SLOW = ('MSDeformAttn', 'focal loss, sigmoid')
# In these, a chunk is an addend of the gradient of a pixel, so its size shows in the last bits.
ROUNDED_BY_CHUNK = ('RoIAlign', 'RoIAlign, sampling_ratio 2', 'DeformRoIPool', 'RoIAlignRotated',
                    'BezierAlign', 'CARAFE', *MATRIX_PRODUCTS)
# mmcv's Python computes the mean of the losses in the precision of the inputs; and in bfloat16 two
# samples of a maximum may have the same position, whose gradient goes to the nearest.
ROUNDED_TWICE = ('focal loss, sigmoid', 'RoIAlign, max')
# mmcv has kernels for the CPU, and these forms need not have their bits.
COMPILED_FOR_CPU = ('RoIAlign', 'RoIAlign, sampling_ratio 2', 'RoIAlign, max', 'RoIAlignRotated',
                    'BezierAlign', 'RotatedFeatureAlign', *MATRIX_PRODUCTS)
# These have the bits of mmcv's kernels for the CPU: numbers are copied, counted or compared only.
BITS_OF_COMPILED = ('rotated filters', 'overlaps', 'text regions, PSENet', 'text regions, PAN',
                    'PSAMask, collect', 'PSAMask, distribute', 'voxels', 'voxel of each point',
                    'points in boxes')
# mmcv takes an angle's cosine in float32 whatever the dtype.
ANGLE_IN_FLOAT32 = ('RotatedFeatureAlign',)


def call_of(name, by=8):
    inputs = Inputs(True)
    inputs.by = by
    return CASES[name].make(inputs).to('cpu')


def test_every_operator_has_a_case():
    covered = {operator for case in CASES.values() for operator in case.covers}
    assert covered == {name for name, row in ops.TABLE.items()
                       if row.target and row.source != 'info.py'}


@pytest.mark.parametrize('name', CASES)
def test_the_same_bytes_every_time_and_for_any_number_of_threads(name, check_same_bytes):
    call = call_of(name, by=8 if name in SLOW else 4)
    check_same_bytes(lambda: once(call).values(), multiplies_matrices=name in MATRIX_PRODUCTS)


@pytest.mark.parametrize('name', ANY_PRECISION)
def test_gradients_are_the_derivatives_in_float64(name):
    call = call_of(name, by=16).to('cpu', torch.float64)
    assert torch.autograd.gradcheck(
        lambda *leaves: call.run(**dict(zip(call.leaves, leaves)), **call.fixed),
        tuple(call.leaves.values()), fast_mode=True, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
@pytest.mark.parametrize('name', COMPILED_FOR_CPU)
def test_results_and_gradients_agree_with_compiled_mmcv(name, dtype, compiled):
    call, upstream = call_of(name, by=4).to('cpu', dtype), []
    ours = once(call, upstream)
    with compiled():
        theirs = once(call, upstream)
    exact = dtype == torch.float64 and name not in ANGLE_IN_FLOAT32
    for part, tensor in ours.items():
        scale = float(theirs[part].abs().max())
        torch.testing.assert_close(tensor, theirs[part], rtol=0,
                                   atol=scale * (1e-12 if exact else 1e-5))


@pytest.mark.compiled
@pytest.mark.parametrize('name', BITS_OF_COMPILED)
def test_results_and_gradients_have_the_bits_of_compiled_mmcv(name, compiled):
    call, upstream = call_of(name, by=4).to('cpu'), []
    ours = once(call, upstream)
    with compiled():
        theirs = once(call, upstream)
    assert ours.keys() == theirs.keys()
    for part, tensor in ours.items():
        assert torch.equal(tensor, theirs[part]), part


@pytest.mark.parametrize('name', ANY_PRECISION)
def test_the_size_of_a_chunk_changes_rounding_at_most(name, monkeypatch):
    call, upstream = call_of(name, by=16).to('cpu', torch.float64), []
    expected = once(call, upstream)
    monkeypatch.setattr(gather, 'CHUNK_TAPS', {'cpu': 1})
    monkeypatch.setattr(gather, 'CHUNK_SHARE', 0)
    monkeypatch.setattr(deform_conv, 'COLUMNS', {'cpu': 1})
    for part, tensor in once(call, upstream).items():
        if name in MATRIX_PRODUCTS or part != 'output' and name in ROUNDED_BY_CHUNK:
            torch.testing.assert_close(tensor, expected[part], rtol=1e-11, atol=1e-11)
        else:
            assert torch.equal(tensor, expected[part]), part


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ANY_PRECISION)
def test_low_precision_is_computed_in_float32_and_rounded_once(name, dtype):
    low, upstream = call_of(name).to('cpu', dtype), []
    rounded = once(low, upstream)
    wide = once(low.to('cpu', torch.float32), [gradient.float() for gradient in upstream])
    for part, tensor in rounded.items():
        assert tensor.dtype == dtype
        if part == 'output' or name not in ROUNDED_TWICE:
            assert torch.equal(tensor, wide[part].to(dtype)), part
        else:
            error = (tensor.double() - wide[part].double()).norm() / wide[part].double().norm()
            assert error < 2e-2, (part, error)


def strided(tensor):
    """The same values with gaps between them."""
    copy = torch.stack((tensor.detach(), tensor.detach()), -1)[..., 0]
    return copy.requires_grad_(tensor.requires_grad)


def channels_last(tensor):
    """Return the same values, and maps with the channels of a pixel together."""
    order = torch.channels_last if tensor.dim() == 4 else torch.preserve_format
    return tensor.detach().clone(memory_format=order).requires_grad_(tensor.requires_grad)


# torch reduces a view in another order, and mmcv's Python takes a view of the weights as a matrix
@pytest.mark.parametrize('name, view', [
    (name, view) for name in CASES for view in (strided, channels_last)
    if name != 'SyncBN' and (name, view) != ('masked convolution', channels_last)])
def test_views_give_the_bytes_of_copies(name, view):
    call = call_of(name)
    views = call._replace(leaves={key: view(t) for key, t in call.leaves.items()},
                          fixed={key: view(t) for key, t in call.fixed.items()})
    expected = once(call)
    for part, tensor in once(views).items():
        assert torch.equal(tensor, expected[part]), part


@pytest.mark.parametrize('name', [name for name in CASES if 'RoI' in name or 'MSD' in name])
def test_a_pixel_that_is_not_read_reaches_neither_result_nor_gradient(name):
    call = call_of(name)
    expected, (key, leaf) = once(call), next(iter(call.leaves.items()))
    unread = expected[f'gradient of {key}'] == 0
    assert unread.any()
    broken = leaf.detach().masked_fill(unread, float('nan')).requires_grad_()
    for part, tensor in once(call._replace(leaves={**call.leaves, key: broken})).items():
        assert torch.equal(tensor, expected[part]), part


# Tensors with an entry per box.
COUNTED = {'rois', 'boxes', 'scores', 'a', 'b'}
# mmcv's Python cannot take nothing, or more tensors belong together.
NOT_EMPTY = ('DeformRoIPool', 'RotatedFeatureAlign', 'points in boxes')


@pytest.mark.parametrize('name', [name for name in CASES if name not in NOT_EMPTY and COUNTED & {
    *CASES[name].make(Inputs(True)).fixed, *CASES[name].make(Inputs(True)).leaves}])
def test_nothing_gives_nothing_and_no_gradient(name):
    call = call_of(name)

    def cut(tensors):
        return {key: t[:0].detach().requires_grad_(t.requires_grad) if key in COUNTED else t
                for key, t in tensors.items()}

    found = once(call._replace(leaves=cut(call.leaves), fixed=cut(call.fixed)))
    for part, tensor in found.items():
        assert not tensor.count_nonzero(), part


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
