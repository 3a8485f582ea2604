"""Tools of the operator tests: fixed inputs, bytes, goldens, and mmcv's kernels to compare with."""
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from mmrepro import ops

GOLDEN = Path(__file__).parent / 'golden'
# Set to 'compiled' or 'torch' to write the golden files again from that provider: mmcv's kernels
# where they run on the CPU, else ours, after they agreed with the definition. They are compared
# with a tolerance, so they belong to no type of CPU.
WRITE = os.environ.get('MMREPRO_WRITE_GOLDEN')


@pytest.fixture
def torch_operators():
    """Our operators answer, whatever mmcv is installed."""
    with ops.using(WRITE or 'torch'):
        yield


@pytest.fixture
def ours_and_theirs(compiled):
    """Call a function with mmrepro's operators, then with mmcv's; return both results."""

    def call(function, *args):
        ours = function(*args)
        with compiled():
            return ours, function(*args)

    return call


@pytest.fixture
def wave():
    """Numbers in (-1, 1) that look random and are the same everywhere: no generator involved."""

    def make(*shape, phase=0., dtype=torch.float64):
        steps = torch.arange(int(np.prod(shape)), dtype=torch.float64)
        return (steps * 12.9898 + 78.233 * (phase + 1)).sin().mul_(43758.5453).frac_().view(
            shape).to(dtype)

    return make


@pytest.fixture
def check_same_bytes():
    """Check that a function of no arguments gives the same bytes for 1 and 2 threads, and again.

    With ``multiplies_matrices`` only runs with the same number of threads are compared: libraries
    may divide the inner dimension of a matrix product among threads: docs/reference/limits.md.
    """

    def check(function, multiplies_matrices=False):
        threads = torch.get_num_threads()
        results = {1: [], 2: []}
        try:
            for count in (1, 2, 2, 1):
                torch.set_num_threads(count)
                results[count].append(
                    [(t.dtype, tuple(t.shape), t.detach().contiguous().numpy().tobytes())
                     for t in function()])
        finally:
            torch.set_num_threads(threads)
        one, two = results.values()
        assert one[0], 'nothing to compare'
        assert one[0] == one[1] and two[0] == two[1]
        assert multiplies_matrices or one[0] == two[0]

    return check


@pytest.fixture
def check_golden():
    """Compare named tensors with a stored file; see WRITE for making one."""

    def check(name, tensors, rtol=1e-6, atol=1e-7):
        path = GOLDEN / f'{name}.npz'
        if WRITE:
            np.savez_compressed(path, **{k: t.detach().numpy() for k, t in tensors.items()})
        stored = np.load(path)
        assert sorted(stored) == sorted(tensors)
        for key, tensor in tensors.items():
            np.testing.assert_allclose(tensor.detach().numpy(), stored[key], rtol, atol,
                                       err_msg=key)

    return check
