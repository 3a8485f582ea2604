"""Trainings in processes of their own, for which small programs stand; the restart of one."""
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from unittest.mock import Mock

import pytest
from harness import python

from mmrepro.errors import DIFFERENT, DeterminismError, SelfCheckError
from mmrepro.runs import child, launcher, startup
from mmrepro.runs.launcher import Launch, PlannedRun, TrainingFailed, run_all


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Lets a shell script stand for the interpreter; $2 and $3 are module and argument."""
    monkeypatch.setattr(launcher, 'POLL', 0.01)

    def write(script):
        path = tmp_path / 'python'
        path.write_text(f'#!/bin/sh\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setattr(sys, 'executable', str(path))
        return str(tmp_path / 'logs' / 'output.txt')
    return write


def start(log, **how):
    run_all([PlannedRun('A', '', [Launch(['module', 'a.py'], log, **how)])])


def lines(path):
    return Path(path).read_text().splitlines()


def test_a_process_that_fails_shows_the_end_of_its_output(program):
    log = program('echo "it broke: $3"; exit 3')
    with pytest.raises(TrainingFailed, match='(?s)it broke: a.py.*code 3 .*output.txt') as error:
        start(log)
    assert (error.value.code, error.value.log) == (3, log)


def test_a_signal_that_was_not_asked_for_is_named(program):
    log = program('kill -KILL $$')
    with pytest.raises(TrainingFailed, match='killed by SIGKILL'):
        start(log)
    start(log, codes=(-signal.SIGKILL, ))


def test_launches_of_a_run_come_one_after_the_other(program):
    log, done = program('echo $3'), []
    runs = [PlannedRun(name, '', [Launch(['module', f'{name}{number}'], log)
                                  for number in range(2)]) for name in 'AB']
    run_all(runs, done=lambda run: done.append(run.name))
    assert lines(log) == ['A0', 'A1', 'B0', 'B1'] and done == ['A', 'B']


def test_ranks_find_each_other(program, monkeypatch, tmp_path):
    program('echo $RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $GONE')
    monkeypatch.setenv('GONE', 'here')
    log = str(tmp_path / 'rank{rank}.txt')
    start(log, env=dict(GONE=None), ranks=2)
    (first, ), (second, ) = (lines(log.format(rank=rank)) for rank in range(2))
    assert first.startswith('0 0 2 127.0.0.1 ') and second.startswith('1 1 2 127.0.0.1 ')
    assert first.split()[-1] == second.split()[-1] and 'here' not in first


def test_when_a_rank_fails_the_others_are_killed(program, tmp_path):
    program('echo $$; [ "$RANK" = 1 ] && exit 1; sleep 600')
    log = str(tmp_path / 'rank{rank}.txt')
    with pytest.raises(TrainingFailed, match='exit code 1 .*rank1.txt'):
        start(log, ranks=2)
    for pid in lines(log.format(rank=0)):
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_when_a_rank_cannot_be_started_the_others_are_killed(program, tmp_path, monkeypatch):
    program('sleep 600')
    start, started = subprocess.Popen, []

    def once(*args, **kwargs):
        if started:
            raise OSError('no more processes')
        started.append(start(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, 'Popen', once)
    with pytest.raises(OSError, match='no more processes'):
        launcher.LaunchedTraining(Launch(['module'], str(tmp_path / 'rank{rank}.txt'), ranks=2))
    assert started[0].returncode == -signal.SIGKILL


def test_pre_emption_leaves_all_trainings_time_for_a_checkpoint(program, tmp_path, monkeypatch):
    """The first one ends when the second has got the signal as well."""
    monkeypatch.setattr(launcher, 'GRACE', 10)
    os.mkfifo(tmp_path / 'pipe')
    log = program(f'trap "$3 {tmp_path}/pipe; echo saved; exit 75" TERM; '
                  'echo started; sleep 600 & wait')
    before = signal.getsignal(signal.SIGTERM)

    def announce_the_end():
        if lines(log) == ['started'] * 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as error:
        run_all([PlannedRun(how, '', [Launch(['module', how], log)]) for how in (
            'cat', 'tee </dev/null')], jobs=2, tick=announce_the_end)
    assert error.value.code == 128 + signal.SIGTERM
    assert lines(log) == ['started'] * 2 + ['saved'] * 2
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_python_cannot_put_back_becomes_the_default(monkeypatch):
    given = []
    monkeypatch.setattr(signal, 'signal', lambda *handler: given.append(handler))
    with launcher.killed_at_exit({}):
        pass
    assert given[2:] == [(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)]


def test_threads_of_several_levels_are_those_of_the_first(monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '4,2')
    assert launcher.jobs_at_once() >= 1


@pytest.mark.parametrize('error', SelfCheckError.__subclasses__())
def test_what_a_self_check_finds_is_no_crash(error, monkeypatch, capsys):
    monkeypatch.setattr(child, 'train_here', Mock(side_effect=error('said')))
    assert child.outcome(None) == DIFFERENT and child.FINDING in capsys.readouterr().out


class Restarted(Exception):
    pass


@pytest.fixture
def restarts(monkeypatch):
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
