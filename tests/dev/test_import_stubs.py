"""The stubs that let the check run where MMDetection's compiled dependencies are missing."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dev import import_stubs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize('shape', [(1, 1), (3, 3), (4, 9), (9, 4), (20, 30), (0, 3)])
def test_the_assignment_of_the_stubs_finds_the_least_cost(shape):
    from scipy.optimize import linear_sum_assignment
    for seed in range(5):
        cost = np.random.default_rng(seed).normal(size=shape).round(1)
        for maximize in (False, True):
            ours = import_stubs.linear_sum_assignment(cost, maximize)
            best = linear_sum_assignment(cost, maximize)
            assert np.isclose(cost[ours].sum(), cost[best].sum())
            assert (np.diff(ours[0]) > 0).all() and len(set(ours[1])) == min(shape)
    with pytest.raises(ValueError, match='finite matrix'):
        import_stubs.linear_sum_assignment(np.full((2, 2), np.nan))


def test_mmdetection_imports_without_compiled_packages():
    """In a process that has only torch, numpy and OpenCV, as far as compiled code goes."""
    code = '''
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('pycocotools', 'scipy', 'shapely', 'matplotlib', 'PIL'):
            raise ModuleNotFoundError(name, name=name)
from dev import import_stubs
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in import_stubs.PACKAGES else real(name)
for name in list(sys.modules):
    assert name.partition('.')[0] not in import_stubs.PACKAGES
assert import_stubs.install() == import_stubs.PACKAGES
finder = sys.meta_path.pop()
sys.meta_path.insert(0, finder)
from mmrepro import ops
ops.install()
from mmdet.utils import register_all_modules
register_all_modules(init_default_scope=True)
import pycocotools.mask
assert pycocotools.mask.__spec__.origin == 'stub'
'''
    subprocess.run([sys.executable, '-W', 'ignore', '-c', code], check=True, timeout=300,
                   cwd=ROOT, stdout=subprocess.DEVNULL)
