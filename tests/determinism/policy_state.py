"""The state that tests of the determinism policy must leave as it was."""
import pytest

from mmrepro import determinism
from mmrepro.determinism import policy

__all__ = ['BITS', 'flags', 'nothing_leaks']

BITS = 'torch.deterministic_debug_mode'


@pytest.fixture(autouse=True)
def nothing_leaks(monkeypatch):
    monkeypatch.setattr(policy, '_said', set())
    before = determinism.snapshot()
    yield
    determinism.disable()
    assert determinism.snapshot() == before


def flags():
    return {name: value for name, value in determinism.snapshot({}).items()
            if not name.startswith('env.')}
