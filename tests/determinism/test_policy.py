"""The determinism policy: checked first, applied second, and put back exactly."""
from __future__ import annotations

import doctest
import importlib
import logging
import os
import subprocess
import sys
import types

import pytest
import torch

from mmrepro import determinism
from mmrepro.config import RandomnessConfig
from mmrepro.determinism import DeterminismError, policy, tables

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


# ------------------------------------------------------------------------ tables


def test_every_row_has_a_name_of_its_own():
    for table in (tables.ENV, tables.FLAGS):
        assert len({row.name for row in table}) == len(table)


def test_the_config_takes_every_precision():
    for precision in tables.PRECISIONS:
        assert RandomnessConfig(float32_precision=precision).float32_precision == precision


def test_setters_of_flags_and_variables_of_cuda_exist():
    for flag in tables.FLAGS:
        if flag.setter:
            module, _, name = flag.setter.rpartition('.')
            assert callable(getattr(importlib.import_module(module), name))
    assert set(tables.CUDA_ENV) <= {row.name for row in tables.ENV}


def test_every_default_is_a_value_that_is_accepted():
    env = {}
    determinism.enable(env=env)
    assert set(env) == {row.name for row in tables.ENV if row.default is not None}
    determinism.enable(env=env)  # a conflict would raise


def test_docstring_example_runs():
    assert doctest.testmod(determinism).failed == 0


# ------------------------------------------------------------------------ enable and disable


def test_enable_refuses_operators_without_a_deterministic_form():
    def put():
        torch.zeros(4).put_(torch.tensor([0]), torch.tensor([1.]))

    put()
    determinism.enable(env={})
    assert determinism.is_enabled() is True
    with pytest.raises(RuntimeError, match='put_ does not have a deterministic'):
        put()
    determinism.enable('warn', env={})
    assert determinism.is_enabled() == 'warn'
    with pytest.warns(UserWarning, match='put_ does not have a deterministic'):
        put()
    determinism.disable()
    assert determinism.is_enabled() is False
    put()


def test_disable_restores_every_flag_and_variable():
    torch.backends.cudnn.benchmark = True
    try:
        before, env = flags(), {'NCCL_ALGO': '^NVLS', 'HOME': '/'}
        report = determinism.enable(
            env=env, float32_precision='medium', num_threads=torch.get_num_threads() + 1,
            cudnn_enabled=False, fill_uninitialized_memory=True)
        assert flags() != before
        assert env['NCCL_ALGO'] == '^NVLS' and env['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
        changed = {change.name: (change.before, change.after) for change in report.changes}
        assert changed['torch.backends.cudnn.benchmark'] == (True, False)
        assert changed['torch.backends.cudnn.enabled'] == (True, False)
        assert changed['CUBLAS_WORKSPACE_CONFIG'] == (None, ':4096:8')
        assert 'NCCL_ALGO' not in changed
        assert all(change.before != change.after for change in report.changes)
        determinism.disable()
        assert flags() == before
        assert env == {'NCCL_ALGO': '^NVLS', 'HOME': '/'}
    finally:
        torch.backends.cudnn.benchmark = False


def test_a_variable_that_others_changed_meanwhile_stays():
    env = {'PYTHONHASHSEED': '3'}
    determinism.enable(env=env)
    env['PYTHONHASHSEED'] = '7'
    determinism.enable(env=env)  # takes the first back
    assert env['PYTHONHASHSEED'] == '7'
    determinism.disable()
    assert env == {'PYTHONHASHSEED': '7'}


def test_enable_again_starts_from_the_state_before_the_first():
    env, before = {}, flags()
    first = determinism.enable(env=env, float32_precision='high')
    assert determinism.enable(env=env, float32_precision='high') == first
    second = determinism.enable(False, env=env)
    assert second.changes == () and flags() == before and env == {}
    assert determinism.is_enabled() is False


def test_fill_of_unset_memory_is_off_unless_asked_for():
    determinism.enable(env={})
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    determinism.enable(env={}, fill_uninitialized_memory=True)
    assert torch.utils.deterministic.fill_uninitialized_memory is True


def test_a_failure_half_way_leaves_nothing_behind(monkeypatch):
    def refuse(value):
        raise RuntimeError('no')

    broken = tables.FLAGS[-1]._replace(set=refuse)
    before, env = flags(), {}
    with monkeypatch.context() as patch:
        # the broken row must not be asked to restore what it could not set
        patch.setattr(policy, 'FLAGS', (*tables.FLAGS[:-1], broken))
        with pytest.raises(RuntimeError, match='^no$'):
            determinism.enable(env=env)
    assert flags() == before and env == {} and determinism.is_enabled() is False


def test_a_torch_without_a_switch_is_no_error(monkeypatch):
    absent = {'torch.backends.cuda.cudnn_sdp_enabled', 'torch.backends.mkldnn.deterministic',
              'torch.utils.deterministic.fill_uninitialized_memory'}
    with monkeypatch.context() as patch:
        patch.delattr(torch.backends.cuda, 'cudnn_sdp_enabled')
        patch.delattr(type(torch.backends.mkldnn), 'deterministic')
        patch.delattr(type(torch.utils.deterministic), 'fill_uninitialized_memory')
        report = determinism.enable(env={})
        assert absent.isdisjoint(change.name for change in report.changes)
        assert {determinism.snapshot()[name] for name in absent} == {'unavailable'}
        assert determinism.drifted() == ()
        assert not hasattr(torch.backends.mkldnn, 'deterministic')
        determinism.disable()


def test_inductor_is_told_whether_it_is_imported_before_or_after(monkeypatch):
    name = 'torch._inductor.config'
    monkeypatch.delitem(sys.modules, name, raising=False)
    env = {}
    determinism.enable(env=env)
    assert env['TORCHINDUCTOR_DETERMINISTIC'] == '1'  # what an import from here on reads
    late = types.SimpleNamespace(deterministic=True)
    monkeypatch.setitem(sys.modules, name, late)
    determinism.disable()
    assert late.deterministic is False
    determinism.enable(env=env)
    assert late.deterministic is True
    determinism.disable()
    assert late.deterministic is False
    monkeypatch.undo()  # before the fixture compares: another test may have imported the real one


def test_a_flag_that_is_changed_behind_our_back_is_found():
    assert determinism.drifted() == ()
    determinism.enable(env={})
    assert determinism.drifted() == ()
    torch.backends.cudnn.benchmark = True
    torch.set_deterministic_debug_mode(0)
    assert [(c.name, c.before, c.after) for c in determinism.drifted()] == [
        ('torch.backends.cudnn.benchmark', False, True), (BITS, 2, 0)]


# ------------------------------------------------------------------------ the context manager


def test_context_restores_after_an_exception():
    before, env = flags(), {'PYTHONHASHSEED': '3'}
    with pytest.raises(KeyError):
        with determinism.deterministic(env=env, float32_precision='high', num_threads=1):
            assert flags()[BITS] == 2
            torch.backends.cudnn.benchmark = True  # by the block's own code
            raise KeyError
    assert flags() == before and env == {'PYTHONHASHSEED': '3'}
    assert determinism.is_enabled() is False


def test_contexts_nest():
    env = {}
    determinism.enable('warn', env=env)
    seen = [flags()]
    with determinism.deterministic(env=env):
        seen.append(flags())
        with determinism.deterministic(False, env=env, num_threads=3):
            assert flags()[BITS] == 0 and torch.get_num_threads() == 3
            assert 'NCCL_ALGO' not in env and determinism.is_enabled() is False
        assert flags() == seen[1] and determinism.is_enabled() is True
        assert env['NCCL_ALGO'] == 'Ring'
        determinism.disable()
        assert flags()[BITS] == 0
    assert flags() == seen[0] and flags()[BITS] == 1 and determinism.is_enabled() == 'warn'
    assert env['NCCL_ALGO'] == 'Ring'


def test_a_context_that_is_refused_changes_nothing():
    before = flags()
    with pytest.raises(DeterminismError):
        with determinism.deterministic(env={'NCCL_ALGO': 'Tree'}):
            pass
    assert flags() == before


# ------------------------------------------------------------------------ conflicts

BAD = {
    'CUBLAS_WORKSPACE_CONFIG': [':0:0', ''],
    'PYTHONHASHSEED': ['random', '4294967296', '-1'],
    'OMP_NUM_THREADS': ['0', 'all'],
    'MKL_NUM_THREADS': ['0'],
    'NCCL_ALGO': ['Tree', 'Ring,Tree', 'NVLS', '^Tree', '^NVLS,Ring', ''],
    'NCCL_PROTO': ['LL,Simple', '^LL', ''],
    'NCCL_COLLNET_ENABLE': ['2'],
    'NCCL_NVLS_ENABLE': ['1', '2'],
    'TORCHINDUCTOR_DETERMINISTIC': ['0'],
    'FLASH_ATTENTION_DETERMINISTIC': ['0'],
    'NVTE_ALLOW_NONDETERMINISTIC_ALGO': ['1'],
    'NVIDIA_TF32_OVERRIDE': ['1'],
    'TORCH_ALLOW_TF32_CUBLAS_OVERRIDE': ['1'],
    'DNNL_DEFAULT_FPMATH_MODE': ['BF16'],
    'ONEDNN_DEFAULT_FPMATH_MODE': ['ANY'],
}
GOOD = {
    'CUBLAS_WORKSPACE_CONFIG': [':4096:8', ':16:8'],
    'PYTHONHASHSEED': ['0', '4294967295'],
    'OMP_NUM_THREADS': ['1', '8,2'],
    'NCCL_ALGO': ['Ring', 'ring', 'CollnetDirect,Ring', '^NVLS', '^NVLS,NVLSTree'],
    'NCCL_PROTO': ['Simple', 'simple', 'LL128'],
    'NCCL_COLLNET_ENABLE': ['0', '1'],
    'NVIDIA_TF32_OVERRIDE': ['0'],
    'DNNL_DEFAULT_FPMATH_MODE': ['STRICT'],
}


def test_every_variable_of_the_table_has_a_case():
    assert set(BAD) == {row.name for row in tables.ENV}


@pytest.mark.parametrize(('name', 'value'), [(n, v) for n, vs in BAD.items() for v in vs])
def test_a_conflicting_variable_is_refused_not_overridden(name, value):
    before, env = flags(), {name: value}
    row = next(row for row in tables.ENV if row.name == name)
    # what concerns the precision contradicts a precision that was asked for, and else is recorded
    precision = None if row.accepted(determinism.PolicySettings()) else 'highest'
    if precision:
        determinism.enable(env=dict(env))
        determinism.disable()
    with pytest.raises(DeterminismError) as error:
        determinism.enable(env=env, float32_precision=precision)
    assert f'{name}={value!r}' in str(error.value)
    for accepted in row.accepted(determinism.PolicySettings(True, precision)):
        assert accepted in str(error.value)
    assert env == {name: value} and flags() == before


@pytest.mark.parametrize(('name', 'value'), [(n, v) for n, vs in GOOD.items() for v in vs])
def test_an_accepted_variable_is_kept(name, value):
    env = {name: value}
    determinism.enable(env=env)
    assert env[name] == value


def test_all_conflicts_are_said_at_once():
    with pytest.raises(DeterminismError) as error:
        determinism.enable(env={'NCCL_ALGO': 'Tree', 'PYTHONHASHSEED': 'x'})
    assert len(str(error.value).splitlines()) == 2


def test_a_refused_call_leaves_the_earlier_one_in_force():
    env = {}
    determinism.enable(env=env)
    inside = flags()
    with pytest.raises(DeterminismError):
        determinism.enable(env={**env, 'NCCL_ALGO': 'Tree'})
    assert flags() == inside and env['NCCL_ALGO'] == 'Ring' and determinism.is_enabled() is True


def test_determinism_wins_over_cudnn_benchmark_and_says_so():
    report = determinism.enable(cudnn_benchmark=True, env={})
    assert not torch.backends.cudnn.benchmark
    assert len(report.warnings) == 1 and 'cudnn_benchmark=True is not followed' in str(report)
    assert determinism.enable(cudnn_benchmark=False, env={}).warnings == ()


def test_no_opinion_without_determinism():
    env = {name: values[0] for name, values in BAD.items()}
    kept = dict(env)
    assert determinism.enable(False, env=env).changes == ()
    assert env == kept


def test_warn_keeps_a_conflict_and_says_so_once(caplog):
    env = {'NCCL_ALGO': 'Tree', 'PYTHONHASHSEED': '0'}
    with caplog.at_level(logging.WARNING, logger='mmrepro'):
        report = determinism.enable('warn', cudnn_benchmark=True, env=env)
        determinism.enable('warn', cudnn_benchmark=True, env=env)
    assert env['NCCL_ALGO'] == 'Tree' and torch.backends.cudnn.benchmark is True
    texts = [record.getMessage() for record in caplog.records]
    assert texts == list(report.warnings) and len(texts) == 3
    assert 'not determinism' in texts[0]
    assert "NCCL_ALGO='Tree'" in texts[1] and 'cudnn_benchmark=False' in texts[2]


@pytest.mark.parametrize('mode, env, times', [
    (True, {}, 1), ('warn', {}, 1), (True, {'PYTHONHASHSEED': '0'}, 0), (True, {'RANK': '1'}, 0),
    (False, {}, 0)])
def test_a_hash_seed_that_is_missing_is_said_once(mode, env, times, caplog, monkeypatch):
    monkeypatch.setattr('mmrepro.determinism.policy._said', set())
    with caplog.at_level(logging.WARNING, logger='mmrepro'):
        for _ in 'ab':
            determinism.enable(mode, env=dict(env))
    texts = [record.getMessage() for record in caplog.records]
    assert sum('PYTHONHASHSEED is not set' in text for text in texts) == times


def test_a_cublas_variable_that_comes_too_late_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_initialized', lambda: True)
    with pytest.raises(DeterminismError, match='before Python starts'):
        determinism.enable(env={})
    env = {'CUBLAS_WORKSPACE_CONFIG': ':16:8'}
    determinism.enable(env=env)
    determinism.enable(env=env)
    determinism.enable(False, env={})


@pytest.mark.parametrize('bad', [
    dict(mode='error'), dict(mode=1), dict(mode=None), dict(float32_precision='tf32'),
    dict(num_threads=0), dict(num_threads=True), dict(num_threads='2'), dict(cudnn_enabled=1),
    dict(cudnn_benchmark='yes'), dict(fill_uninitialized_memory=None)])
def test_a_wrong_argument_is_named(bad):
    (name, value), = bad.items()
    with pytest.raises((TypeError, ValueError), match=repr(value)) as error:
        determinism.enable(env={}, **bad)
    assert name.replace('mode', 'deterministic') in str(error.value)


# ------------------------------------------------------------------------ precision, threads


@pytest.mark.parametrize(('precision', 'matmul', 'tf32'), [
    ('highest', 'highest', False), ('high', 'high', True), ('medium', 'medium', True)])
@pytest.mark.parametrize('mode', [False, 'warn', True])
def test_precision_counts_in_every_mode(mode, precision, matmul, tf32):
    determinism.enable(mode, float32_precision=precision, env={})
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cuda.matmul.allow_tf32 is tf32


@pytest.mark.parametrize('mode', [False, 'warn', True])
@pytest.mark.parametrize('matmul, tf32', [('high', True), ('highest', False), ('highest', True)])
def test_without_a_precision_it_is_left_as_the_user_has_it(mode, matmul, tf32):
    before = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = tf32
        found = determinism.snapshot({})
        env = {'NVIDIA_TF32_OVERRIDE': '0'}
        report = determinism.enable(mode, env=env)
        assert torch.get_float32_matmul_precision() == matmul
        assert torch.backends.cudnn.allow_tf32 is tf32 and env['NVIDIA_TF32_OVERRIDE'] == '0'
        pinned = [flag.name for flag in tables.FLAGS if flag.pinned]
        assert len(pinned) == 8 and not {change.name for change in report.changes} & {*pinned}
        assert [determinism.snapshot({})[name] for name in pinned] == [found[n] for n in pinned]
    finally:
        _torch_precision(before)


@pytest.mark.parametrize('mode', [False, True])
def test_a_precision_that_changes_during_a_run_is_found(mode):
    before = torch.backends.cudnn.allow_tf32
    try:
        determinism.enable(mode, env={})
        torch.set_float32_matmul_precision('highest')  # no change
        assert determinism.drifted() == ()
        torch.backends.cudnn.allow_tf32 = not before
        torch.set_float32_matmul_precision('high')
        found = {change.name: (change.before, change.after) for change in determinism.drifted()}
        if mode:
            assert found['torch.backends.cudnn.allow_tf32'] == (before, not before)
            assert found['torch.float32_matmul_precision'] == ('highest', 'high')
        else:
            assert found == {}
    finally:
        _torch_precision(before)


def _torch_precision(tf32):
    determinism.disable()
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = tf32
    if hasattr(torch.backends.cudnn, 'conv'):
        torch.backends.cuda.matmul.fp32_precision = 'none'
        torch.backends.mkldnn.matmul.fp32_precision = 'none'


NEW_API = """
import torch
from mmrepro import determinism
from mmrepro.config import RandomnessConfig
def effective():
    return {n: v for n, v in determinism.snapshot({}).items() if n.endswith('.fp32_precision')}
b = torch.backends
refused = 0
for owner, value in ((b, 'ieee'), (b.cudnn.conv, 'ieee'), (b.cuda.matmul, 'tf32'), (b, 'tf32')):
    owner.fp32_precision = value
    before = effective()
    refused += 'unreadable' in determinism.snapshot({}).values()  # torch now refuses its old API
    for precision, allowed in (('highest', {'ieee', 'none'}), ('high', {'tf32'})):
        determinism.enable(float32_precision=precision, env={})
        assert {v for n, v in effective().items() if 'mkldnn' not in n} <= allowed, effective()
        assert determinism.drifted() == (), determinism.drifted()
        assert torch.get_float32_matmul_precision() == precision
        assert b.cudnn.allow_tf32 is (precision == 'high')
        determinism.disable()
        assert effective() == before, (effective(), before)
    torch.set_float32_matmul_precision('highest')
    b.cudnn.allow_tf32 = True
    for leaf in (b.cuda.matmul, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn, b):
        leaf.fp32_precision = 'none'
assert refused  # of 2.11 not every time
"""


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, 'conv'), reason='torch < 2.9 has one API')
def test_precision_set_through_the_new_api_is_understood_and_restored():
    run_python(NEW_API)


@pytest.mark.parametrize('mode', [False, True])
def test_threads_and_cudnn_count_in_every_mode(mode):
    determinism.enable(mode, num_threads=3, cudnn_enabled=False, env={})
    assert torch.get_num_threads() == 3 and torch.backends.cudnn.enabled is False


def test_without_determinism_the_benchmark_is_what_was_asked_for():
    determinism.enable(False, cudnn_benchmark=True, env={})
    assert torch.backends.cudnn.benchmark is True
    determinism.enable(False, env={})
    assert torch.backends.cudnn.benchmark is False


# ------------------------------------------------------------------------ start-up and records


def test_missing_at_start_names_what_a_new_process_needs():
    threads = str(torch.get_num_threads())
    assert determinism.missing_at_start({}) == {
        'OMP_NUM_THREADS': threads, 'MKL_NUM_THREADS': threads, 'PYTHONHASHSEED': '0',
        'CUBLAS_WORKSPACE_CONFIG': ':4096:8'}
    assert determinism.missing_at_start({}, num_threads=5)['OMP_NUM_THREADS'] == '5'
    assert determinism.missing_at_start({'OMP_NUM_THREADS': '7'})['MKL_NUM_THREADS'] == '7'
    assert determinism.missing_at_start({}, mode=False) == {}
    assert determinism.missing_at_start({}, mode=False, num_threads=2) == {
        'OMP_NUM_THREADS': '2', 'MKL_NUM_THREADS': '2'}


@pytest.mark.parametrize('mode', [True, 'warn'])
def test_a_process_started_with_what_was_missing_misses_nothing(mode):
    env = determinism.missing_at_start({}, mode=mode)
    assert determinism.missing_at_start(env, mode=mode) == {}
    determinism.enable(mode, env=env)


def test_snapshot_is_plain_and_follows_the_state():
    env = {'NCCL_PROTO': 'Simple'}
    shot = determinism.snapshot(env)
    assert {type(value) for value in shot.values()} <= {str, int, bool, type(None)}
    assert shot['env.NCCL_PROTO'] == 'Simple' and shot[BITS] == 0
    determinism.enable(env=env)
    after = determinism.snapshot(env)
    assert after[BITS] == 2 and after['env.NCCL_ALGO'] == 'Ring' and set(after) == set(shot)


def run_python(code):
    env = dict(os.environ, OMP_NUM_THREADS='1', PYTHONWARNINGS='error')
    done = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_cheap_and_without_cuda():
    run_python('import sys, torch\n'
               'from mmrepro import determinism\n'
               'determinism.enable(); determinism.snapshot(); determinism.disable()\n'
               'assert not torch.cuda.is_initialized()\n'
               'late = {"mmengine", "torch._inductor", "torch._inductor.config", "cv2"}\n'
               'assert not late & set(sys.modules), late & set(sys.modules)\n')
