"""One machine's bits depend on threads: pin them before torch is imported."""
import os
import sys
from pathlib import Path

for variable in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[variable] = '1'
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

from types import SimpleNamespace  # noqa: E402

import mmengine.config.config  # noqa: E402
import mmengine.runner.loops  # noqa: E402
import pytest  # noqa: E402

import mmrepro  # noqa: E402, F401  mmcv-lite has operators from here on

# MMEngine lays the text of a config out at every start and checkpoint, for seconds. The layout is
# not tested here.
mmengine.config.config.FormatCode = lambda text, **style: (text, True)

# MMEngine's iteration-based loop sleeps two seconds between two passes over the data.
mmengine.runner.loops.time = SimpleNamespace(sleep=lambda seconds: None)


# Modules that train, start many processes, or take over 20 seconds: `tools/test.sh --quick` leaves
# them out, except for the test that is marked `smoke`.
SLOW = {
    'audit/test_audit_rules.py',
    'checkpoint/test_evaluated_model.py',
    'checkpoint/test_lost_state.py',
    'checkpoint/test_other_loaders.py',
    'checkpoint/test_resume.py',
    'checkpoint/test_resume_on_ranks.py',
    'checkpoint/test_resume_state.py',
    'cli/test_tools.py',
    'data/test_cursor.py',
    'data/test_datasets.py',
    'data/test_fetch.py',
    'data/test_hosts.py',
    'data/test_loader.py',
    'data/test_passes.py',
    'data/test_worker_processes.py',
    'demo/test_classifier.py',
    'demo/test_demo.py',
    'determinism/test_policy.py',
    'determinism/test_precision.py',
    'dev/test_benchmarks.py',
    'dev/test_import_stubs.py',
    'dev/test_operator_check.py',
    'distributed/test_agreement.py',
    'distributed/test_ordered_reduction.py',
    'distributed/test_process_group.py',
    'distributed/test_shared_weights.py',
    'distributed/test_training_on_ranks.py',
    'distributed/test_virtual_collectives.py',
    'distributed/test_virtual_ranks.py',
    'distributed/test_virtual_ranks_errors.py',
    'distributed/test_virtual_ranks_families.py',
    'distributed/test_virtual_ranks_state.py',
    'distributed/test_virtual_ranks_training.py',
    'facts/test_compatibility.py',
    'fingerprint/test_operator_recorder.py',
    'hooks/test_fingerprint_hook.py',
    'hooks/test_preempt_on_ranks.py',
    'hooks/test_seed_hook.py',
    'hooks/test_self_check.py',
    'hooks/test_self_check_bits.py',
    'hooks/test_self_check_findings.py',
    'host_cuda/test_host_cuda.py',
    'localise/test_planted_faults.py',
    'localise/test_localise_virtual_ranks.py',
    'ops/aten/test_sync_bn.py',
    'ops/mmcv/test_deform_conv.py',
    'ops/test_provider.py',
    'ops/triton/test_kernels.py',
    'patches/test_hash_order.py',
    'step_check/test_repeated_steps.py',
    'test_invariance.py',
    'test_packaging.py',
    'test_predictions.py',
    'test_runner.py',
    'test_user_code.py',
    'test_streams_with_roots.py',
    'verify/test_kills.py',
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder) and (
                item.path.relative_to(folder).as_posix() in SLOW):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope='module', autouse=True)
def nothing_stays_in_force():
    """A file that trains in this process leaves flags and kernels to the next one otherwise."""
    yield
    if 'mmrepro.determinism' in sys.modules:
        from mmrepro import determinism
        from mmrepro.ops import aten
        determinism.disable()
        aten.uninstall()


@pytest.fixture(scope='session')
def data_root(tmp_path_factory):
    """The demonstration dataset."""
    from mmrepro.demo.dataset import write_dataset
    root = str(tmp_path_factory.mktemp('demo'))
    write_dataset(root)
    return root


@pytest.fixture
def pool():
    """Real ranks, warm: see tests/support/rank_pool.py."""
    from rank_pool import shared_pool
    return shared_pool()
