"""Stubs of fresh processes: what was asked of them, and forks of this warm one."""
from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys

from mmrepro.fingerprint.schema import FOLDER, Writer, fingerprint_name
from mmrepro.runs import launcher
from mmrepro.runs.child import Training, outcome
from mmrepro.runs.launcher import LaunchedTraining, free_port, rank_variables


def training_of(launch):
    module, given = launch.command
    assert module == 'mmrepro.runs.child'
    return Training(**json.loads(given))


def folder_of(launch):
    return os.path.dirname(launch.log)


class EndedTraining:
    """Stands for a launched training that has ended; a subclass writes its files."""
    launches: list = []

    def __init__(self, launch):
        self.launches.append(launch)

    def poll(self):
        return True

    def kill(self):
        pass


def stand_in(monkeypatch, kind, **attributes):
    """Let a class like :class:`EndedTraining` stand for all launched trainings; return it."""
    made = type('Made', (kind, ), dict(launches=[], **attributes))
    monkeypatch.setattr(launcher, 'LaunchedTraining', made)
    monkeypatch.setattr(launcher, 'POLL', 0)
    return made


def write_steps(folder, steps, rank=0, ranks=1, first=0, end=False):
    """Write the fingerprints of a rank: the start, these fields of each step, perhaps the end."""
    writer = Writer(os.path.join(folder, FOLDER, fingerprint_name(rank)))
    writer.write(dict(kind='start', format=1, level='step', rank=rank, world_size=ranks,
                      iteration=first))
    for iteration, step in enumerate(steps, first):
        writer.write({**dict(kind='step', iteration=iteration, epoch=0), **step})
    if end:
        writer.write(dict(kind='end', iteration=first + len(steps)))
    writer.close()


def _train(launch, variables, log):
    gc.freeze()  # as in tests/support/children.py
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    # not those that pytest captures
    sys.stdout, sys.stderr = (open(number, 'w', closefd=False) for number in (1, 2))
    os.environ.update(variables)
    sys.exit(outcome(training_of(launch)))


class _Process:
    """A forked process with the methods of ``subprocess.Popen``."""

    def __init__(self, *args):
        self._process = multiprocessing.get_context('fork').Process(target=_train, args=args)
        self._process.start()
        self.pid, self.terminate = self._process.pid, self._process.terminate

    def poll(self):
        return self._process.exitcode

    def wait(self, timeout=None):
        self._process.join(timeout)


class ForkedTraining(LaunchedTraining):
    logs: list[str] = []

    def __init__(self, launch):
        self.launch = launch
        os.makedirs(os.path.dirname(os.path.abspath(launch.log)), exist_ok=True)
        port = free_port() if launch.ranks > 1 else None
        self._logs = [launch.log.replace('{rank}', str(rank)) for rank in range(launch.ranks)]
        self.logs += self._logs
        self._processes = [_Process(launch, rank_variables(rank, launch.ranks, port), log)
                           for rank, log in enumerate(self._logs)]


def forked(monkeypatch):
    """Let forks of this process stand for all launched trainings; return their class."""
    made = type('Made', (ForkedTraining, ), dict(logs=[]))
    monkeypatch.setattr(launcher, 'LaunchedTraining', made)
    return made


def text_of(result):
    return '\n'.join([result.sentence(), *result.notes, *map(' '.join, result.rows())])
