"""Pins the number of threads before torch is imported; marks slow modules and runs them first."""
import os
import signal
import sys
from collections import Counter
from pathlib import Path

for variable in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[variable] = '1'
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')
for variable in ('COLUMNS', 'LINES'):  # readline, which pytest loads, gives them to its processes
    os.environ.pop(variable, None)

from types import SimpleNamespace  # noqa: E402

import mmengine.config.config  # noqa: E402
import mmengine.runner.loops  # noqa: E402
import pytest  # noqa: E402

import mmrepro  # noqa: E402  mmcv-lite has operators from here on
from mmrepro.selfcheck import witness  # noqa: E402

# MMEngine formats the text of a config at every start and checkpoint, which takes seconds and is
# not tested here.
mmengine.config.config.FormatCode = lambda text, **style: (text, True)

# MMEngine's iteration-based loop sleeps two seconds between two passes over the data.
mmengine.runner.loops.time = SimpleNamespace(sleep=lambda seconds: None)

# What a witness tries depends on the seconds that it takes; tests of that rule set them.
witness.FREE = 1e6


def _of(folder, names):
    return [f'{folder}/test_{name}.py' for name in names.split()]


# Modules that train, start many processes, or take over 20 seconds, the longest first: they run in
# this order, so that no long module is left for one process at the end. `tools/test.sh --quick`
# leaves them out, except for the test that is marked `smoke`.
SLOW = (
    'distributed/test_schedules.py',
    'distributed/test_virtual_ranks_families.py',
    'host_cuda/test_host_cuda.py',
    'localise/test_planted_faults.py',
    'docs/test_tutorials.py',
    'test_user_setups.py',
    'selfcheck/test_witness.py',
    'test_invariance.py',
    'checkpoint/test_resume.py',
    'ops/triton_kernels/test_kernels.py',
    'localise/test_module_trace.py',
    'data/test_hosts.py',
    'ops/portable/test_no_calls_of_mkl.py',
    'demo/test_demo.py',
    'cli/test_tools.py',
    'verbs/test_golden.py',
    'dev/test_kills.py',
    'distributed/test_shared_weights.py',
    'audit/test_audit_rules.py',
    'test_packaging.py',
    'test_process_changes.py',
    'test_predictions.py',
    'localise/test_onnx.py',
    'distributed/test_process_group.py',
    'patches/test_hash_order.py',
    'test_readers.py',
    'verbs/test_as_trained.py',
    'checkpoint/test_on_ranks.py',
    'facts/test_compatibility.py',
    'hooks/test_preempt_on_ranks.py',
    *_of('hooks', 'fingerprint_hook hook_streams'),
    *_of('dev', 'control operator_check import_stubs'),
    *_of('distributed', 'virtual_ranks_training agreement ordered_reduction '
                        'virtual_collectives virtual_ranks virtual_ranks_state'),
    *_of('data', 'passes loader fetch worker_processes'),
    *_of('checkpoint', 'other_loaders'),
    *_of('determinism', 'policy'),
    *_of('fingerprint', 'operator_recorder'),
    *_of('localise', 'batch'),
    *_of('ops/aten', 'sync_bn'),
    *_of('ops/mmcv', 'deform_conv'),
    *_of('ops', 'provider'),
    *_of('selfcheck', 'steps repeated_steps'),
    'test_runner.py',
)


SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow modules and put them first; then those with the most tests."""
    folder = Path(__file__).parent
    names = [item.path.relative_to(folder).as_posix() if item.path.is_relative_to(folder) else ''
             for item in items]
    counts = Counter(names)
    for item, name in zip(items, names):
        if name in SLOW:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings('ignore'))  # of libraries that train
    order = {name: (SLOW.index(name) if name in SLOW else len(SLOW), -count, name)
             for name, count in counts.items()}
    items[:] = [item for _, item in sorted(zip(names, items), key=lambda pair: order[pair[0]])]


def pytest_runtest_logreport(report):
    """Show a failure at once as well: a run that is killed has no summary."""
    if report.failed and 'PYTEST_XDIST_WORKER' not in os.environ:
        print(f'\n{report.nodeid} failed ({report.when}):', report.longreprtext[-2000:], flush=True)


@pytest.fixture(autouse=True)
def nothing_stays_in_force():
    """Undo, after a test, the flags and kernels that a training has set, and a deactivation.

    A handler of a signal that stayed would be inherited by processes, which then outlive SIGTERM.
    """
    handlers = [signal.getsignal(number) for number in SIGNALS]
    yield
    assert handlers == [signal.getsignal(number) for number in SIGNALS]
    mmrepro.activate(randomness={})
    if 'mmrepro.checkpoint.training_start' in sys.modules:  # a seed that a test has set
        sys.modules['mmrepro.checkpoint.training_start']._by_script = None
    if 'mmrepro.determinism' in sys.modules:
        import torch

        from mmrepro import determinism
        from mmrepro.ops import aten
        determinism.disable()
        aten.uninstall()
        torch.use_deterministic_algorithms(False)  # of a stock runner


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    from mmrepro.demo.dataset import write_dataset
    root = str(tmp_path_factory.mktemp('demo'))
    write_dataset(root)
    return root


@pytest.fixture(scope='session')
def photographs(tmp_path_factory):
    """Return the demonstration dataset with all that a family of the zoo reads."""
    from dev.zoo.training import VAL_IMAGES, write_extras
    from mmrepro.demo.dataset import write_dataset
    root = str(tmp_path_factory.mktemp('photographs'))
    write_dataset(root, num_val=VAL_IMAGES)
    write_extras(root)
    return root


@pytest.fixture(scope='session')
def base(tmp_path_factory):
    """Return the work directory of a small training; tests only read it."""
    from small_runs import finish, small_run
    folder = tmp_path_factory.mktemp('base')
    finish(small_run(folder))
    return folder


@pytest.fixture
def stock():
    """Start and end with MMDetection as it is installed."""
    from mmengine.registry import init_default_scope

    from mmrepro import patches
    init_default_scope('mmdet')  # a runner of another test may have left another scope
    patches.revert()
    yield
    patches.revert()


@pytest.fixture
def patched(stock):
    from mmrepro import patches
    patches.apply()


@pytest.fixture
def amp_on_cpu(monkeypatch):
    """Let AmpOptimWrapper train on a CPU, which MMEngine refuses and torch does."""
    import torch
    from mmengine.optim.optimizer import amp_optimizer_wrapper as module
    monkeypatch.setattr(module, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(module, 'GradScaler', lambda **given: torch.amp.GradScaler('cpu', **given))
    monkeypatch.setattr('mmengine.runner.amp.get_device', lambda: 'cpu')


@pytest.fixture
def pool():
    """Real ranks, warm: see tests/support/rank_pool.py."""
    from rank_pool import shared_pool
    return shared_pool()


@pytest.fixture
def compiled():
    """Skip without a compiled mmcv; else a context in which its kernels answer."""
    from mmrepro import ops
    if not ops.is_compiled():
        pytest.skip('no compiled mmcv here')
    return lambda: ops.using('compiled')
