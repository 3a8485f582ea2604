"""Start a witness process, poll it, read its results and end it.

This runs in the training process; the witness itself runs :mod:`mmrepro.runs.witness`.
"""
from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatch
from typing import Any, NamedTuple

from ..checkpoint.files import LAST_GOOD, is_sealed
from ..errors import FingerprintError
from ..util.files import read_json
from ..util.text import shorten
from .recipe import Recipe

# the run may end during the imports, which take seconds: who started it is noted first
COMMAND = ('import json, os, sys; run = os.getppid(); task = json.load(open(sys.argv[1])); '
           'sys.path[:] = task["path"]; from mmrepro.runs.witness import main; main(task, run)')
# variables of launchers, whose ranks a witness is none of; the last are beginnings of names
_OF_RANKS = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'MASTER_ADDR',
             'MASTER_PORT', 'SLURM_PROCID', 'SLURM_LOCALID', 'SLURM_NODEID', 'SLURM_NTASKS',
             'SLURM_NPROCS', 'SLURM_STEP_ID')
_OF_LAUNCHERS = ('OMPI_', 'PMI_', 'TORCHELASTIC_')
# in a work directory: what MMEngine and mmrepro write there, beside folders of a start's logs
_OF_RUNS = ('mmrepro', 'mmrepro-witness-*', 'last_checkpoint', '*.partial', '*.log', '*.lock',
            '*.py')
_OF_A_START = re.compile(r'\d{8}_\d{6}')
MAX_OWN_FILES = 1000
MAX_TEXT = 200  # characters of what a process has printed at last
MIN_ROOM = 1 << 16  # bytes on the disk of the scratch folder, without which a process ends
_QUIET = dict(WANDB_MODE='disabled', MMREPRO_WITNESS='1')


class FilesOfRun(NamedTuple):
    """Files in a work directory that a resumed run finds there, as relative paths."""
    own: list[str]  # that its code has written; none, if they are more than MAX_OWN_FILES
    checkpoints: list[str]


def files_of(work_dir: str) -> FilesOfRun:
    """Return the files of a run, without logs and what mmrepro writes for itself."""
    files = FilesOfRun([], [])
    for folder, inner, names in os.walk(work_dir):
        inner[:] = [name for name in sorted(inner) if not _of_runs(name)]
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name != LAST_GOOD and not _of_runs(name):
                kind = files.checkpoints if name.endswith('.pth') and is_sealed(path) else files.own
                kind.append(os.path.relpath(path, work_dir))
    return files if len(files.own) <= MAX_OWN_FILES else files._replace(own=[])


def _of_runs(name: str) -> bool:
    return bool(_OF_A_START.fullmatch(name)) or any(
        fnmatch(name, pattern) for pattern in _OF_RUNS)


class Saved(NamedTuple):
    """A checkpoint that a witness may resume from."""
    iteration: int  # the next iteration, counted from 0
    path: str  # of the file; of the open file, where it is local
    fd: int | None  # keeps a file readable that is removed meanwhile

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)


def open_saved(path: str, iteration: int) -> Saved:
    """Return a checkpoint whose content stays readable, whatever becomes of its name."""
    if '://' in path:
        return Saved(iteration, path, None)
    fd = os.open(os.path.expanduser(path), os.O_RDONLY)
    return Saved(iteration, f'/proc/self/fd/{fd}', fd)


class Start(NamedTuple):
    """One training of a witness."""
    name: str
    begin: int  # the first iteration that is compared, counted from 0
    until: int  # the iteration before which it ends
    checkpoint: str | None  # path to resume from; None: the run begins from its seed
    other_workers: bool = False
    metrics: dict[int, list[dict[str, str]]] = {}  # of the run's validations, by iteration


class Result(NamedTuple):
    """The result of one training of a witness."""
    name: str
    error: str  # '' without one
    lines: str  # folder with the lines of its ranks
    seconds: float  # of processor time, without imports
    imports: float = 0.0  # seconds, of the first training of a process
    code: dict[str, str] = {}  # facts on the code that it has imported


class WitnessProcess:
    """A running witness.

    Args:
        recipe: of the run.
        starts: what it trains, one after the other.
        config: ``randomness`` in effect.
        fds: open files that ``starts`` name as ``/proc/self/fd/N``.
        work_dir: of the run, into which the witness may not write.
        quiet: run at low priority.

    Raises:
        OSError: the scratch folder or the process cannot be made.
    """

    def __init__(self, recipe: Recipe, starts: list[Start], config: Mapping[str, Any],
                 fds: list[int], work_dir: str, quiet: bool = True) -> None:
        self.starts = starts
        self.folder = tempfile.mkdtemp(prefix='mmrepro-witness-')
        try:
            with open(os.path.join(self.folder, 'recipe'), 'wb') as file:
                pickle.dump((recipe.runner, recipe.settings, recipe.hooks), file)
            task = os.path.join(self.folder, 'task.json')
            with open(task, 'w', encoding='utf-8') as file:
                json.dump(dict(
                    run=os.getpid(), path=recipe.path, folder=recipe.folder,
                    arguments=recipe.arguments, script=recipe.script, names=recipe.names,
                    registered=[*map(list, recipe.registered)],
                    scratch=self.folder, work_dir=os.path.abspath(work_dir), quiet=quiet,
                    config=config, starts=[start._asdict() for start in starts]), file)
            variables = {name: value for name, value in recipe.environment.items()
                         if name not in _OF_RANKS and not name.startswith(_OF_LAUNCHERS)}
            with open(self.output, 'wb') as output:
                self._process = subprocess.Popen(
                    [sys.executable, '-c', COMMAND, task], stdin=subprocess.DEVNULL,
                    stdout=output, stderr=subprocess.STDOUT, pass_fds=fds, cwd=recipe.folder,
                    env={**variables, **_QUIET}, start_new_session=True)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    @property
    def output(self) -> str:
        """Path of the output of the process."""
        return os.path.join(self.folder, 'output.txt')

    def ended(self) -> bool:
        return self._process.poll() is not None

    def hurry(self) -> None:
        """Raise the priority to that of the run, which waits for the witness; needs root."""
        with suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PGRP, self._process.pid, 0)

    def done(self) -> list[str]:
        """Return the names of the starts that have come to their end."""
        return [start.name for start in self.starts
                if os.path.exists(os.path.join(self.folder, start.name, 'result.json'))]

    def results(self) -> list[Result]:
        """Return the results of the witness; call it when the process has ended.

        Raises:
            FingerprintError: a result cannot be read.
        """
        found = []
        for start in self.starts:
            path = os.path.join(self.folder, start.name, 'result.json')
            if os.path.exists(path):
                found.append(Result(**read_json(path, FingerprintError)))
            else:
                error = (f'its process ended with exit code {self._process.returncode}: '
                         f'{shorten(self._tail(), MAX_TEXT)}')
                if shutil.disk_usage(self.folder).free < MIN_ROOM:
                    error = f'no room is left in {os.path.dirname(self.folder)} (see TMPDIR)'
                found.append(Result(start.name, error, '', 0))
        return found

    def _tail(self) -> str:
        with suppress(OSError), open(self.output, encoding='utf-8', errors='replace') as file:
            lines = [line.strip() for line in file.readlines() if line.strip()]
            return lines[-1] if lines else 'no output'
        return 'no output'

    def kill(self) -> None:
        """End the process and all that it has started; its folder is removed."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def free_memory() -> int:
    """Return the bytes of memory that this process can still take.

    That is what the machine has, and what the control groups leave that the process is in: of a
    container, a job of Slurm, a unit of systemd.
    """
    with open('/proc/meminfo', encoding='ascii') as file:
        sizes = dict(line.split(':') for line in file)
    return min([int(sizes['MemAvailable'].split()[0]) * 1024, *free_in_groups()])


class _GroupFiles(NamedTuple):
    """Names of a control group's files: its limit, what it uses, and the line for its cache."""
    limit: str
    used: str
    cache: str


# https://docs.kernel.org/admin-guide/cgroup-v2.html, .../cgroup-v1/memory.html
_VERSION_1 = _GroupFiles('memory.limit_in_bytes', 'memory.usage_in_bytes', 'total_inactive_file')
_VERSION_2 = _GroupFiles('memory.max', 'memory.current', 'inactive_file')


def free_in_groups(root: str = '/') -> Iterator[int]:
    """Yield the bytes that each control group leaves which this process is in.

    Groups are nested, and each may have a limit. ``root`` is the folder of the file system.
    """
    with suppress(OSError), open(os.path.join(root, 'proc/self/cgroup'), encoding='utf-8') as file:
        for line in file:
            _, controllers, path = line.rstrip('\n').split(':', 2)
            names, home = _VERSION_2, os.path.join(root, 'sys/fs/cgroup')
            if controllers:
                if 'memory' not in controllers.split(','):
                    continue
                names, home = _VERSION_1, os.path.join(home, 'memory')
            parts = path.strip('/').split('/')
            for depth in range(len(parts) + 1):
                folder = os.path.join(home, *parts[:depth])
                # a group without a limit, or one outside of what this container sees
                with suppress(OSError, ValueError):
                    limit, used = (int(_read(os.path.join(folder, name)))
                                   for name in (names.limit, names.used))
                    stat = _read(os.path.join(folder, 'memory.stat')).splitlines()
                    yield limit - used + int(dict(map(str.split, stat)).get(names.cache, 0))


def _read(path: str) -> str:
    with open(path, encoding='ascii') as file:
        return file.read()
