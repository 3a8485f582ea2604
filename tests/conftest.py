"""One machine's bits depend on threads: pin them before torch is imported."""
import os

for variable in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[variable] = '1'
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import mmengine.config.config  # noqa: E402
import pytest  # noqa: E402

import mmrepro  # noqa: E402, F401  mmcv-lite has operators from here on

# MMEngine lays the text of a config out at every start and checkpoint, for seconds. The layout is
# not tested here.
mmengine.config.config.FormatCode = lambda text, **style: (text, True)


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    """The demonstration dataset."""
    from mmrepro.demo.dataset import write_dataset
    root = str(tmp_path_factory.mktemp('demo'))
    write_dataset(root)
    return root
