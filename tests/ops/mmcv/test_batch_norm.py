"""The parts of synchronised batch normalisation; mmcv compiles them for CUDA only."""
import pytest
import torch
from mmcv.ops.sync_bn import SyncBatchNormFunction
from operators import batch_norm, draw, trained

from mmrepro.ops.mmcv import batch_norm as kernels

pytestmark = pytest.mark.usefixtures('torch_operators')


def apply(layer, x, mode='default'):
    return SyncBatchNormFunction.apply(x, layer.running_mean, layer.running_var, layer.weight,
                                       layer.bias, layer.momentum, layer.eps, None, 1, mode)


@pytest.mark.parametrize('mode', ['default', 'N'])
@pytest.mark.parametrize('shape', [(4, 3, 5, 7), (2, 16, 1, 1), (1, 5, 9, 9)])
def test_on_one_rank_it_is_batch_norm(shape, mode):
    """The module of mmcv would take torch's on one rank."""
    x, upstream = draw(*shape), draw(*shape, seed=9)
    found = trained(batch_norm(shape[1]), x, upstream, lambda layer, x: apply(layer, x, mode))
    for ours, expected in zip(found, trained(batch_norm(shape[1]), x, upstream)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_half_is_summed_in_float32():
    x = torch.full((1, 1, 100000), 1.5).half()
    mean = torch.zeros(1)
    kernels.sync_bn_forward_mean(x, mean)
    assert mean.item() == 1.5
    layer = batch_norm(3)
    value = draw(2, 3, 4, 4, dtype=torch.float16).requires_grad_()
    out = apply(layer, value)
    out.sum().backward()
    assert out.dtype == value.grad.dtype == torch.float16
    assert layer.weight.grad.dtype == torch.float32


def test_an_empty_batch_changes_nothing():
    layer = batch_norm(3)
    before = layer.running_mean.clone(), layer.running_var.clone()
    value = torch.zeros(0, 3, 4, 4, requires_grad=True)
    apply(layer, value, 'N').sum().backward()
    assert torch.equal(layer.running_mean, before[0])
    assert torch.equal(layer.running_var, before[1])
    assert value.grad.shape == (0, 3, 4, 4)


@pytest.mark.parametrize('shape', [(2, 64, 50, 68), (1, 1, 400, 400), (16, 1, 100, 100),
                                   (1, 256, 13, 13)])
def test_it_does_not_depend_on_threads(same_bytes, shape):
    x, upstream = draw(*shape), draw(*shape, seed=5)
    same_bytes(lambda: trained(batch_norm(shape[1]), x, upstream, apply))
