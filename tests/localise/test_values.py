"""How far two results are apart."""
import torch

from mmrepro.localise.values import compare_tensors


def test_values_tell_rounding_from_more():
    a = torch.rand(4, 5)
    b = a.clone()
    b[2, 3] += 1e-7
    found = compare_tensors(a, b)
    assert (found.elements, found.of, found.first) == (1, 20, (2, 3))
    assert 'rounding' in found.text()
    b[0, 0] = float('nan')
    assert compare_tensors(a, b).first == (0, 0)
    assert compare_tensors(a, a.clone()) is None
    assert compare_tensors(torch.tensor([0.]), torch.tensor([-0.])).elements == 1
    assert compare_tensors(torch.tensor(0.), torch.tensor(1.)).first == ()


def test_values_are_compared_with_the_oldest_torch(monkeypatch):
    monkeypatch.delattr(torch, 'unravel_index', raising=False)  # torch 2.0 does not have it
    assert compare_tensors(torch.zeros(2, 3), torch.eye(2, 3)).first == (0, 0)
