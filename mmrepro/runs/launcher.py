"""Start trainings in fresh processes, watch them, kill them, and report their progress and end.

From what verify, localise, golden or demo compares to processes:

    Variation, RunSpec, GoldenRecipe   what is varied
    -> Training           what to train and how far: the argument of the process, as JSON
    -> Launch             its command, with variables, output, number of ranks, exit codes
    -> PlannedRun         launches one after the other, as killed and resumed; plan() makes it
    -> LaunchedTraining   the processes of a launch while they train; run_all() starts them

``seeds`` has launches of ``mmrepro train`` instead of trainings. ``dev/kills`` starts its launches
itself, to watch them closely. Progress is one line, which :func:`progress_line` prints.
"""
from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Callable, NamedTuple

from ..errors import TrainingError, meaning
from ..fingerprint.reader import NewLines
from ..fingerprint.schema import FOLDER, fingerprint_name
from ..util.scoped import restore_handlers
from ..util.text import counted, duration
from .child import FINDING, REFUSAL, Training

LOG_TAIL = 30  # lines of the output of a failed training that are shown
POLL = 0.2  # seconds between two looks at the processes
GRACE = 60  # seconds that a training has to end after SIGTERM
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class TrainingFailed(TrainingError):
    """A training process ended with an error; the message has the end of its output.

    Attributes:
        code: exit code; negative is the number of the signal that ended the process.
        log: path of the output.
        finding: message of a failed self-check, which replaces the output; None without one.
        refusal: why the training has not begun; None if it has.
    """

    def __init__(self, code: int, log: str) -> None:
        with open(log, encoding='utf-8', errors='replace') as file:
            lines = file.readlines()
        self.finding = _message_with_prefix(lines, FINDING)
        self.refusal = _message_with_prefix(lines, REFUSAL)
        super().__init__(
            f'{self.finding or "".join(lines[-LOG_TAIL:])}\nthe training ended with exit code '
            f'{code} ({meaning(code)}); all of its output is in {log}')
        self.code, self.log = code, log


def _message_with_prefix(lines: Sequence[str], prefix: str) -> str | None:
    """Return the message in the first line of the output with this prefix; None without one."""
    return next((json.loads(line[len(prefix):]) for line in lines if line.startswith(prefix)),
                None)


def failure(codes: Sequence[int | None], logs: Sequence[str],
            allowed: Sequence[int] = (0, )) -> TrainingFailed | None:
    """Return the error of a process that failed, of one with a finding if there is any; or None."""
    failed = [TrainingFailed(code, log) for code, log in zip(codes, logs)
              if code is not None and code not in allowed]
    return min(failed, key=lambda error: error.finding is None, default=None)


class Launch(NamedTuple):
    """One training to start."""
    command: Sequence[str]  # module and arguments for ``python -m``
    log: str  # path to which the output is appended; ``{rank}`` in it becomes the rank
    env: Mapping[str, str | None] = {}  # changed variables; None removes one
    ranks: int = 1  # number of processes
    cwd: str | None = None  # folder in which they start
    codes: tuple[int, ...] = (0, )  # exit codes that are no failure


def launch_of(training: Training, log: str, env: Mapping[str, str | None] = {},
              ranks: int = 1, cwd: str | None = None) -> Launch:
    """Return the launch of :mod:`mmrepro.runs.child` with this training."""
    given = dict(training._asdict(), launcher='pytorch' if ranks > 1 else 'none')
    codes = (0, ) if training.kill_after is None else (0, -signal.SIGKILL)
    return Launch(['mmrepro.runs.child', json.dumps(given)], log, env, ranks, cwd, codes)


class LaunchedTraining:
    """A running training. Each process and its workers have a session of their own."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        os.makedirs(os.path.dirname(os.path.abspath(launch.log)), exist_ok=True)
        # the child has to find a checkout that is not installed
        given = launch.env.get('PYTHONPATH', os.environ.get('PYTHONPATH'))
        path = os.pathsep.join(filter(None, [ROOT, given]))
        port = free_port() if launch.ranks > 1 else None
        self._logs = [launch.log.replace('{rank}', str(rank)) for rank in range(launch.ranks)]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, log in enumerate(self._logs):
                env = {**os.environ, **launch.env, 'PYTHONPATH': path,
                       **rank_variables(rank, launch.ranks, port)}
                with open(log, 'ab') as output:
                    self._processes.append(subprocess.Popen(
                        [sys.executable, '-m', *launch.command], stdout=output,
                        stderr=subprocess.STDOUT, cwd=launch.cwd, start_new_session=True,
                        env={name: value for name, value in env.items() if value is not None}))
        except BaseException:  # only this object knows the started processes
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def codes(self) -> list[int | None]:
        """Return the exit codes of the processes, None for those that run."""
        return [process.poll() for process in self._processes]

    def poll(self) -> bool:
        """Whether all processes have ended."""
        codes = self.codes()
        error = failure(codes, self._logs, self.launch.codes)
        if error is not None:
            self.kill()
            raise error
        return None not in codes

    def kill(self) -> None:
        """Kill all processes, and the workers of those that have ended."""
        for process in self._processes:
            with suppress(ProcessLookupError, PermissionError):  # all of its group have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def terminate(trainings: Sequence[LaunchedTraining]) -> None:
    """Send SIGTERM to all processes, wait for their last checkpoints, then kill."""
    processes = [process for training in trainings for process in training._processes]
    for process in processes:
        if process.poll() is None:
            process.terminate()
    end = time.monotonic() + GRACE
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(end - time.monotonic(), 0))
    for training in trainings:
        training.kill()


class PlannedRun(NamedTuple):
    """A run: consecutive launches, two if it is interrupted and resumed."""
    name: str
    folder: str
    launches: Sequence[Launch]


def plan(name: str, folder: str, trainings: Sequence[Training],
         env: Mapping[str, str | None] = {}, processes: int = 1,
         cwd: str | None = None) -> PlannedRun:
    """Plan trainings one after the other, with their output in ``output.txt`` of ``folder``.

    Of several processes, each has its ``output.rankN.txt``. Output and fingerprints of an earlier
    run are removed.
    """
    folder = os.path.abspath(folder)
    os.makedirs(folder, exist_ok=True)
    for stale in os.listdir(folder):
        if stale == FOLDER:
            shutil.rmtree(os.path.join(folder, stale))
        elif stale.startswith('output.'):
            os.remove(os.path.join(folder, stale))
    log = os.path.join(folder, 'output.txt' if processes == 1 else 'output.rank{rank}.txt')
    return PlannedRun(name, folder, [launch_of(training, log, env, processes, cwd)
                                     for training in trainings])


def run_all(runs: Sequence[PlannedRun], jobs: int = 1,
            tick: Callable[[], Any] = lambda: None,
            done: Callable[[PlannedRun], Any] = lambda run: None) -> None:
    """Train all runs, at most ``jobs`` at a time, in the order given, and call ``done`` with each.

    ``tick`` is called between two looks at the processes; True ends all trainings.
    """
    running: dict[str, LaunchedTraining] = {}

    def polls(run: PlannedRun) -> Iterator[None]:
        """Start the launches of a run one after the other, and yield while they train."""
        for launch in run.launches:
            training = running[run.name] = LaunchedTraining(launch)
            while not training.poll():
                yield
        del running[run.name]
        done(run)

    waiting = [polls(run) for run in runs]
    with killed_at_exit(running):
        while waiting:
            ended = [run for run in waiting[:jobs] if next(run, True)]
            waiting = [run for run in waiting if run not in ended]
            if tick() is True:
                return
            if waiting:
                time.sleep(POLL)


@contextmanager
def killed_at_exit(running: Mapping[str, LaunchedTraining]) -> Iterator[None]:
    """Kill all trainings at the end of the block; pass SIGTERM and SIGHUP on to them.

    The trainings have sessions of their own: no terminal ends them with this process.
    """
    def leave(number: int, frame: Any) -> None:
        terminate([*running.values()])
        sys.exit(128 + number)

    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, leave)
                    for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for training in running.values():
            training.kill()
        restore_handlers(handlers)


def rank_variables(rank: int, ranks: int, port: int | None) -> dict[str, str]:
    """Return the variables by which the ranks of one machine find each other; {} for one rank."""
    if ranks == 1:
        return {}
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))


def free_port() -> int:
    with socket.socket() as connection:
        connection.bind(('127.0.0.1', 0))
        return int(connection.getsockname()[1])


def one_thread_each() -> dict[str, str]:
    """Return variables for one thread per training, or as many as OMP_NUM_THREADS says."""
    count = os.environ.get('OMP_NUM_THREADS', '1')
    return {'OMP_NUM_THREADS': count, 'MKL_NUM_THREADS': os.environ.get('MKL_NUM_THREADS', count)}


def jobs_at_once(processes: int = 1) -> int:
    """Return how many runs of so many processes to train at once: 1 on a GPU, 2 at most on CPUs."""
    import torch
    if torch.cuda.is_available():
        return 1
    threads, *_ = one_thread_each()['OMP_NUM_THREADS'].split(',')  # OpenMP: one for each level
    count = int(threads) if threads.strip().isdecimal() else 1
    return max(1, min(2, (os.cpu_count() or 1) // (max(count, 1) * processes)))


CLEAR = '\r\x1b[K'  # goes to the beginning of a terminal's line and erases it


BETWEEN_LINES = .5  # seconds between two lines where there is no terminal


@contextmanager
def progress_line(stream: Any, clock: Callable[[], float] = time.monotonic
                  ) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line; on a terminal, each line replaces the line before.

    Elsewhere, as in the log of a job, a line that comes too soon waits for the next, which takes
    its place, or for the end. The argument '' clears the line of a terminal, to print something
    else there.
    """
    shown = waiting = ''
    last = -BETWEEN_LINES

    def on_progress(text: str) -> None:
        nonlocal shown, waiting, last
        shown = text
        if stream.isatty():
            stream.write(f'{CLEAR}{text}')
        elif text and clock() - last < BETWEEN_LINES:
            waiting = text
            return
        elif text:
            waiting, last = '', clock()
            stream.write(f'{text}\n')
        stream.flush()

    try:
        yield on_progress
    finally:
        if shown and stream.isatty():
            stream.write('\n')
        elif waiting:
            stream.write(f'{waiting}\n')
            stream.flush()


def run_with_progress(runs: Sequence[PlannedRun], iterations: int,
                      on_progress: Callable[[str], None], jobs: int = 1) -> None:
    """Train all runs of ``iterations`` each, and report how many are finished when it changes."""
    ended: set[str] = set()
    counters = {run.name: IterationCounter(run.folder) for run in runs}
    started, last = time.monotonic(), ''

    def report() -> None:
        nonlocal last
        counts = {run.name: iterations if run.name in ended else
                  min(counters[run.name].count(), iterations) for run in runs}
        parts = [f'{name} done' if name in ended else f'{name} {count}/{iterations}'
                 for name, count in counts.items() if count]
        text = f'{len(ended)} of {counted(len(runs), "run")}; {", ".join(parts) or "starting"}'
        if text != last:
            last = text
            elapsed, done = time.monotonic() - started, sum(counts.values())
            left = len(runs) * iterations - done
            estimate = f'; about {duration(elapsed / done * left)} left' if done and left else ''
            on_progress(f'{elapsed:4.0f} s  {text}{estimate}')

    run_all(runs, jobs, report, lambda run: ended.add(run.name))


class IterationCounter:
    """Counts the iterations in the fingerprints of a running training, as they are written."""

    def __init__(self, work_dir: str) -> None:
        self._lines = NewLines(os.path.join(work_dir, FOLDER, fingerprint_name(0)))
        self._count = 0

    def count(self) -> int:
        """Return the number of iterations until now."""
        self._count += sum(line.startswith(b'{"kind":"step"') for line in self._lines.read())
        return self._count
