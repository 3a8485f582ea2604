"""The determinism policy: checked first, applied second, and put back exactly."""
import doctest
import importlib
import sys
import types

import pytest
import torch
from harness import ROOT, python
from policy_state import BITS, flags, nothing_leaks  # noqa: F401  a fixture

from mmrepro import determinism
from mmrepro.config import RandomnessConfig
from mmrepro.determinism import policy, tables


def test_rows_have_names_of_their_own_and_setters_and_precisions_that_exist():
    for table in (tables.ENV, tables.FLAGS):
        assert len({row.name for row in table}) == len(table)
    assert set(tables.CUDA_ENV) <= {row.name for row in tables.ENV}
    for flag in tables.FLAGS:
        if flag.setter:
            module, _, name = flag.setter.rpartition('.')
            assert callable(getattr(importlib.import_module(module), name))
    for precision in tables.PRECISIONS:
        config = RandomnessConfig.parse(dict(numerics=dict(float32_precision=precision)))
        assert config.numerics.float32_precision == precision


def test_every_default_is_a_value_that_is_accepted():
    env = {}
    determinism.enable(env=env)
    assert set(env) == {row.name for row in tables.ENV if row.default is not None}
    determinism.enable(env=env)  # a conflict would raise
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def test_what_verifies_a_row_is_in_the_repository():
    rows = [*tables.ENV, *tables.FLAGS]
    assert any(row.verified for row in rows)
    assert [row.name for row in rows if not (ROOT / row.verified).exists()] == []


def test_docstring_example_runs():
    assert doctest.testmod(determinism).failed == 0


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


def test_disable_restores_every_flag_and_variable(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, 'benchmark', True)
    before, env = flags(), {'NCCL_ALGO': '^NVLS', 'HOME': '/'}
    report = determinism.enable(
        env=env, float32_precision='medium', num_threads=torch.get_num_threads() + 1)
    assert flags() != before
    assert env['NCCL_ALGO'] == '^NVLS' and env['CUBLAS_WORKSPACE_CONFIG'] == ':4096:8'
    changed = {change.name: (change.before, change.after) for change in report.changes}
    assert changed['torch.backends.cudnn.benchmark'] == (True, False)
    assert changed['CUBLAS_WORKSPACE_CONFIG'] == (None, ':4096:8')
    assert 'NCCL_ALGO' not in changed
    assert all(change.before != change.after for change in report.changes)
    determinism.disable()
    assert flags() == before and env == {'NCCL_ALGO': '^NVLS', 'HOME': '/'}
    monkeypatch.undo()  # before nothing_leaks compares


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


@pytest.mark.parametrize('threads', ['1', '2'])
def test_the_number_of_threads_is_known_before_torch_is_imported(threads):
    code = ('import sys; from mmrepro.determinism import missing_at_start as ask; asked = ask({}); '
            'print("torch" in sys.modules); import torch; print(asked == ask({}))')
    said = python('-c', code, OMP_NUM_THREADS=threads, MKL_NUM_THREADS=threads)
    assert said.split() == ['False', 'True']


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


def test_cheap_and_without_cuda():
    code = (
        'import sys, torch; from mmrepro import determinism\n'
        'determinism.enable(); determinism.snapshot(); determinism.disable()\n'
        'assert not torch.cuda.is_initialized()\n'
        'late = {"mmengine", "torch._inductor", "torch._inductor.config", "cv2"}\n'
        'assert not late & set(sys.modules), late & set(sys.modules)\n')
    assert python('-W', 'error', '-c', code) == ''


@pytest.mark.parametrize(('precision', 'matmul', 'tf32'), [
    ('highest', 'highest', False), ('high', 'high', True), ('medium', 'medium', True)])
@pytest.mark.parametrize('mode', [False, 'warn', True])
def test_precision_and_threads_count_in_every_mode(mode, precision, matmul, tf32):
    determinism.enable(mode, float32_precision=precision, num_threads=3, env={})
    assert torch.get_num_threads() == 3
    assert torch.get_float32_matmul_precision() == matmul
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cuda.matmul.allow_tf32 is tf32


@pytest.fixture
def precision_stays():
    """Return whether cuDNN may use TF32; what a test sets of precisions is put back."""
    tf32 = torch.backends.cudnn.allow_tf32
    yield tf32
    determinism.disable()
    torch.set_float32_matmul_precision('highest')
    torch.backends.cudnn.allow_tf32 = tf32
    if hasattr(torch.backends.cudnn, 'conv'):
        torch.backends.cuda.matmul.fp32_precision = 'none'
        torch.backends.mkldnn.matmul.fp32_precision = 'none'


@pytest.mark.parametrize('mode', [False, 'warn', True])
@pytest.mark.parametrize('matmul, tf32', [('high', True), ('highest', False), ('highest', True)])
def test_without_a_precision_it_is_left_as_the_user_has_it(mode, matmul, tf32, precision_stays):
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


@pytest.mark.parametrize('mode', [False, True])
def test_a_precision_that_changes_during_a_run_is_found(mode, precision_stays):
    determinism.enable(mode, env={})
    torch.set_float32_matmul_precision('highest')  # no change
    assert determinism.drifted() == ()
    torch.backends.cudnn.allow_tf32 = not precision_stays
    torch.set_float32_matmul_precision('high')
    found = {change.name: (change.before, change.after) for change in determinism.drifted()}
    if mode:
        assert found['torch.backends.cudnn.allow_tf32'] == (precision_stays, not precision_stays)
        assert found['torch.float32_matmul_precision'] == ('highest', 'high')
    else:
        assert found == {}
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
    assert python('-W', 'error', '-c', NEW_API) == ''
