"""How far two results are apart."""
import pytest
import torch

from mmrepro.localise.values import compare_tensors


@pytest.mark.parametrize('oldest', [False, True])
def test_values_tell_rounding_from_more(oldest, monkeypatch):
    if oldest:
        monkeypatch.delattr(torch, 'unravel_index', raising=False)  # torch 2.0 does not have it
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
