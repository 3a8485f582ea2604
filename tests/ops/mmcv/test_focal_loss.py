"""Sigmoid focal loss, against its formula: mmcv compiles it for CUDA only."""
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmcv.ops import sigmoid_focal_loss

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


@pytest.mark.parametrize('reduction', ['mean', 'sum'])
@pytest.mark.parametrize('weighted', [False, True])
@pytest.mark.parametrize('gamma', [0., 1., 1.5, 2., 3.])
def test_focal_loss_is_the_formula_and_so_is_its_gradient(gamma, weighted, reduction):
    x, target, weight = draw(40, 7, background=not weighted)
    weight = weight if weighted else None
    results = []
    for function in (lambda v: sigmoid_focal_loss(v, target, gamma, 0.3, weight, reduction),
                     lambda v: sigmoid_formula(v, target, gamma, 0.3, weight)):
        value = x.clone().requires_grad_()
        out = function(value)
        if out.dim():
            out = out.sum() / (len(x) if reduction == 'mean' else 1)
        out.backward()
        results.append((out.detach(), value.grad))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 999), st.sampled_from([0.5, 2., 4.]))
def test_sigmoid_focal_loss_of_any_shape(rows, classes, seed, gamma):
    x, target, _ = draw(rows, classes, seed)
    out = sigmoid_focal_loss(x, target, gamma, 0.25, None, 'none')
    torch.testing.assert_close(out, sigmoid_formula(x, target, gamma, 0.25), rtol=1e-10, atol=1e-12)


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
