"""What every operator promises, for every row of the catalogue of cases.

Each case calls mmcv's own Python on inputs with the most write conflicts: boxes overlap in three
locations, offsets move samples together, and scores have ties.
"""
from __future__ import annotations

import pytest
import torch

from dev.operator_check.cases_mmcv import CASES
from dev.operator_check.checking import once
from dev.operator_check.operator_cases import Inputs
from mmrepro import ops

pytestmark = pytest.mark.usefixtures('torch_operators')

DIFFERENTIABLE = [name for name, case in CASES.items() if case.make(Inputs(True)).leaves]
# Computed in the precision of the inputs. (mmcv's Python makes chamfer distances float32.)
ANY_PRECISION = [name for name in DIFFERENTIABLE
                 if CASES[name].make(Inputs(True)).double and name != 'chamfer distance']
# Libraries may divide the inner dimension of a matrix product among threads.
MATRIX_PRODUCTS = ('DCNv1', 'DCNv2')
# Inputs of a quarter of a detector's size take seconds.
SLOW = ('MSDeformAttn', 'NMS, quadrilaterals', 'NMS, rotated', 'PrRoIPool', 'convex IoU',
        'PSAMask, collect', 'PSAMask, distribute', 'text contours', 'text pixels',
        'focal loss, sigmoid')


def call_of(name, by=8):
    inputs = Inputs(True)
    inputs.by = by
    return CASES[name].make(inputs).to('cpu')


def test_every_operator_has_a_case():
    covered = {operator for case in CASES.values() for operator in case.covers}
    assert covered == {name for name, row in ops.TABLE.items()
                       if row.target and row.source != 'info.py'}


@pytest.mark.parametrize('name', CASES)
def test_the_same_bytes_every_time_and_for_any_number_of_threads(name, same_bytes):
    call = call_of(name, by=8 if name in SLOW else 4)
    same_bytes(lambda: once(call).values(), multiplies_matrices=name in MATRIX_PRODUCTS)


@pytest.mark.parametrize('name', ANY_PRECISION)
def test_gradients_are_the_derivatives_in_float64(name):
    call = call_of(name, by=16).to('cpu', torch.float64)
    assert torch.autograd.gradcheck(
        lambda *leaves: call.run(**dict(zip(call.leaves, leaves)), **call.fixed),
        tuple(call.leaves.values()), fast_mode=True, atol=1e-4)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
@pytest.mark.parametrize('name', ANY_PRECISION)
def test_low_precision_is_computed_in_float32_and_rounded_once(name, dtype):
    low, upstream = call_of(name).to('cpu', dtype), []
    rounded = once(low, upstream)
    wide = once(low.to('cpu', torch.float32), [gradient.float() for gradient in upstream])
    for part, tensor in rounded.items():
        assert tensor.dtype in (dtype, torch.int32, torch.int64), part
        error = (tensor.double() - wide[part].double()).norm() / wide[part].double().norm()
        assert error < 2e-2, (part, error)


def strided(tensor):
    """The same values with gaps between them."""
    copy = torch.stack((tensor.detach(), tensor.detach()), -1)[..., 0]
    return copy.requires_grad_(tensor.requires_grad)


# mmcv's Python loses the gradient of a view in PrRoIPool; torch reduces a view in another order.
@pytest.mark.parametrize('name', [name for name in CASES if name not in ('PrRoIPool', 'SyncBN')])
def test_views_give_the_bytes_of_copies(name):
    call = call_of(name)
    views = call._replace(leaves={key: strided(t) for key, t in call.leaves.items()},
                          fixed={key: strided(t) for key, t in call.fixed.items()})
    expected = once(call)
    for part, tensor in once(views).items():
        assert torch.equal(tensor, expected[part]), part


# Tensors with an entry per box, point or lane.
COUNTED = {'rois', 'boxes', 'scores', 'a', 'b', 'sets', 'quads', 'points', 'polygons'}
# mmcv's Python cannot take nothing, or more tensors belong together.
NOT_EMPTY = ('DeformRoIPool', 'RotatedFeatureAlign', 'overlaps, differentiable')


@pytest.mark.parametrize('name', [name for name in CASES if name not in NOT_EMPTY and COUNTED & {
    *CASES[name].make(Inputs(True)).fixed, *CASES[name].make(Inputs(True)).leaves}])
def test_nothing_gives_nothing_and_no_gradient(name):
    call = call_of(name)

    def cut(tensors):
        return {key: (t[:, :0] if name == 'BorderAlign' else t[:0]).detach().requires_grad_(
            t.requires_grad) if key in COUNTED else t for key, t in tensors.items()}

    found = once(call._replace(leaves=cut(call.leaves), fixed=cut(call.fixed)))
    for part, tensor in found.items():
        assert not tensor.count_nonzero(), part
