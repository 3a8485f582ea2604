"""The single restart of a process whose environment is incomplete."""
import sys
import types

import pytest
from harness import python

from mmrepro.errors import DeterminismError
from mmrepro.runs import startup


class Restarted(Exception):
    pass


@pytest.fixture
def restarts(monkeypatch):
    """Environments that the process would be started again with."""
    seen = []

    def execute(env):
        seen.append(env)
        raise Restarted

    monkeypatch.setattr(startup, '_execute', execute)
    return seen


COMPLETE = dict(PYTHONHASHSEED='0', CUBLAS_WORKSPACE_CONFIG=':4096:8', OMP_NUM_THREADS='1',
                MKL_NUM_THREADS='1')


def test_a_missing_variable_restarts_once_with_everything_else_kept(restarts, capsys):
    env = dict(COMPLETE, OTHER='kept')
    del env['PYTHONHASHSEED']
    with pytest.raises(Restarted):
        startup.restart_if_incomplete(env)
    assert restarts[0][startup.RESTARTED] == '1' and restarts[0]['OTHER'] == 'kept'
    assert 'PYTHONHASHSEED' in restarts[0]
    assert 'starting again with PYTHONHASHSEED=' in capsys.readouterr().err
    startup.restart_if_incomplete(restarts[0])
    startup.restart_if_incomplete(COMPLETE)
    startup.restart_if_incomplete({}, mode=False)
    assert len(restarts) == 1


def test_a_variable_that_is_lost_is_an_error_not_a_loop(restarts):
    env = dict(COMPLETE, **{startup.RESTARTED: '1'})
    del env['PYTHONHASHSEED']
    with pytest.raises(DeterminismError, match='PYTHONHASHSEED.* did not survive a restart'):
        startup.restart_if_incomplete(env)
    assert restarts == []


def test_every_rank_decides_alike_and_one_says_so(restarts, capsys):
    for rank in '01':
        with pytest.raises(Restarted):
            startup.restart_if_incomplete(dict(RANK=rank, LOCAL_RANK=rank))
    first, second = restarts
    assert {k: v for k, v in first.items() if 'RANK' not in k} == \
        {k: v for k, v in second.items() if 'RANK' not in k}
    assert capsys.readouterr().err.count('starting again') == 1


SCRIPT = """
import os, sys
from mmrepro.runs import startup
print('pid', os.getpid(), 'hash', os.environ.get('PYTHONHASHSEED'), sys.argv[1:],
      sys.flags.utf8_mode, flush=True)
startup.restart_if_incomplete(os.environ)
"""


def test_a_real_restart_keeps_the_process_and_its_arguments(tmp_path):
    script = tmp_path / 'script.py'
    script.write_text(SCRIPT)
    first, second = python('-X', 'utf8', script, 'a b', '--c', PYTHONHASHSEED=None,
                           **{startup.RESTARTED: None}).splitlines()
    pid = first.split()[1]
    assert first.startswith(f'pid {pid} hash None') and second.startswith(f'pid {pid} hash 0')
    assert first.split('[')[1] == second.split('[')[1] == "'a b', '--c'] 1"


@pytest.mark.parametrize('name, expected', [
    ('mmrepro.__main__', ['-m', 'mmrepro']), ('mmrepro.runs.child', ['-m', 'mmrepro.runs.child']),
    (None, ['script.py'])])
def test_a_module_starts_again_as_a_module_without_the_original_arguments(
        name, expected, monkeypatch):
    """Python 3.9 does not keep them."""
    monkeypatch.delattr(sys, 'orig_argv', raising=False)
    monkeypatch.setattr(sys, 'argv', ['script.py', '--seed', '1'])
    spec = types.SimpleNamespace(name=name) if name else None
    monkeypatch.setattr(sys.modules['__main__'], '__spec__', spec)
    assert startup._own_command() == [sys.executable, *expected, '--seed', '1']
