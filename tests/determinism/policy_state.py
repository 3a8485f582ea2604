"""The state that tests of the determinism policy must leave as it was."""
import os
import subprocess
import sys

import pytest

from mmrepro import determinism
from mmrepro.determinism import policy

__all__ = ['BITS', 'flags', 'nothing_leaks', 'run_python']

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


def run_python(code):
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONWARNINGS='error')
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
