"""Sigmoid focal loss, against its formula: mmcv compiles it for CUDA only."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import sigmoid_focal_loss
from operators import with_gradients

from mmrepro import ops

pytestmark = pytest.mark.usefixtures('torch_operators')

TINY = torch.finfo(torch.float32).tiny


def sigmoid_formula(x, target, gamma, alpha, weight=None):
    """Focal loss (Lin et al. 2017, equation 5) with mmcv's floor under the logarithm."""
    p = 1 / (1 + (-x).exp())
    own = target[:, None] == torch.arange(x.shape[1])
    loss = torch.where(own, -alpha * (1 - p) ** gamma * p.clamp(min=TINY).log(),
                       -(1 - alpha) * p ** gamma * (1 - p).clamp(min=TINY).log())
    return loss if weight is None else loss * weight[target][:, None]


def draw(rows, classes, seed=0, background=True, dtype=torch.float64):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=random, dtype=torch.float64).to(dtype) * 3
    target = torch.randint(0, classes + background, (rows,), generator=random)
    return x, target, torch.rand(classes, generator=random, dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 999), st.booleans(),
       st.sampled_from([0., .5, 1., 1.5, 2., 3., 4.]), st.sampled_from(['none', 'mean', 'sum']))
def test_focal_loss_is_the_formula_and_so_is_its_gradient(rows, classes, seed, weighted, gamma,
                                                          reduction):
    x, target, weight = draw(rows, classes, seed, background=not weighted)
    weight = weight if weighted else None
    reduction = reduction if rows else 'none'
    value = x.requires_grad_()
    with ops.using('torch'):
        out = sigmoid_focal_loss(value, target, gamma, 0.3, weight, reduction)
    expected = sigmoid_formula(value, target, gamma, 0.3, weight)
    if reduction != 'none':
        expected = expected.sum() / (rows if reduction == 'mean' else 1)
    torch.testing.assert_close(with_gradients(out, value), with_gradients(expected, value),
                               rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64])
def test_certain_predictions_have_finite_losses(dtype):
    x = torch.tensor([[200., -200., 30.], [-200., 200., -30.]], dtype=dtype)
    for label in range(4):
        value = x.clone().requires_grad_()
        out = sigmoid_focal_loss(value, torch.tensor([label, label]), 2., 0.25, None, 'none')
        out.sum().backward()
        assert out.isfinite().all() and value.grad.isfinite().all()
    assert sigmoid_focal_loss(x, torch.tensor([0, 1]), 2., 0.25, None, 'none')[0, 0] == 0


def test_nan_stays_where_it_is_and_a_negative_label_is_background():
    x, target, _ = draw(5, 3)
    losses = [sigmoid_focal_loss(x, torch.full((5,), label), 2., 0.25, None, 'none')
              for label in (3, -1)]
    assert torch.equal(*losses)
    x[2, 1] = float('nan')
    out = sigmoid_focal_loss(x, target, 2., 0.25, None, 'none')
    assert out.isnan().nonzero().tolist() == [[2, 1]]
