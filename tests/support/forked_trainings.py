"""Launched trainings in forks of this warm process, which saves the imports of a fresh one."""
from __future__ import annotations

import gc
import multiprocessing
import os
import sys

from launches import training_of

from mmrepro.runs.child import outcome
from mmrepro.runs.launcher import LaunchedTraining, free_port, rank_variables


def _train(launch, variables, log):
    gc.freeze()  # as in dev/children.py
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
