"""What contradicts determinism is refused, or said, before anything is changed."""
import logging

import pytest
import torch
from policy_state import flags, nothing_leaks  # noqa: F401  a fixture

from mmrepro import determinism
from mmrepro.determinism import policy, tables
from mmrepro.errors import DeterminismError

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
    'MKL_CBWR': ['COMPATIBLE'],  # which only a level of the CPU wants otherwise
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


def test_a_call_that_fails_leaves_the_earlier_one_in_force(monkeypatch):
    env = {}
    determinism.enable(env=env)
    inside = flags()
    with pytest.raises(DeterminismError):
        determinism.enable(env={**env, 'NCCL_ALGO': 'Tree'})
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(policy, 'PolicyReport', lambda *args: 1 / 0)
        determinism.enable(False, env=env)
    assert flags() == inside and env['NCCL_ALGO'] == 'Ring' and determinism.is_enabled() is True


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
def test_a_hash_seed_that_is_missing_is_said_once(mode, env, times, caplog):
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
