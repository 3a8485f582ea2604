"""The kernels in Triton's interpreter."""
import sys

import pytest
import torch

from mmrepro.ops import triton


@pytest.fixture(scope='module')
def interpreted():
    """Return the modules of kernels, run by Triton's interpreter."""
    if triton.version() is None:
        pytest.skip('no triton here')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('TRITON_INTERPRET', '1')  # read where a kernel is defined, Triton's own too
        for name in list(sys.modules):
            if name.partition('.')[0] == 'triton' and not name.startswith('triton._C') or (
                    name.startswith('mmrepro.ops.triton.')):
                patch.delitem(sys.modules, name)
        import mmrepro.ops.triton.attention_kernels
        import mmrepro.ops.triton.nms_kernels
        import mmrepro.ops.triton.roi_align_kernels
        import mmrepro.ops.triton.scatter_kernels
        import mmrepro.ops.triton.write_kernels
        try:
            mmrepro.ops.triton.roi_align_kernels._filters(
                torch.zeros(1, 1, 2, 2), torch.tensor([[0., 0, 0, 1, 1]]), (1, 1), 1., 1, True)
        except Exception as error:
            # loops up to a number that was loaded, before 3.7; on a GPU they are as they were
            if 'only 0-dimensional arrays can be converted' not in str(error):
                raise
            pytest.skip(f'the interpreter of triton {triton.version()} needs an older NumPy')
        yield mmrepro.ops.triton
        # what was imported meanwhile belongs to the modules that go now
        for name in list(sys.modules):
            if name.partition('.')[0] == 'triton' and not name.startswith('triton._C'):
                del sys.modules[name]
