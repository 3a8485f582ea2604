"""Progress of trainings, in one line."""
from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Callable

from ..fingerprint.schema import FOLDER, fingerprint_name
from ..text import duration
from .launcher import PlannedRun


class ProgressLine:
    """A line that overwrites itself on a terminal, and is repeated in a file. A context manager."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._width = stream, 0

    def say(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f'\r{text:<{self._width}}')
            self._width = len(text)
        else:
            self._stream.write(f'{text}\n')
        self._stream.flush()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: Any) -> None:
        self.end()

    def end(self) -> None:
        if self._width:
            self._stream.write('\n')
            self._width = 0


class RunsProgress:
    """Reports the finished iterations of all runs when they have changed."""

    def __init__(self, runs: Sequence[PlannedRun], iterations: int,
                 say: Callable[[str], None]) -> None:
        self._runs, self._iterations, self._say = runs, iterations, say
        self._ended: set[str] = set()
        self._started, self._last = time.monotonic(), ''

    def done(self, run: PlannedRun) -> None:
        self._ended.add(run.name)

    def show(self) -> None:
        counts = {run.name: iterations_done(run.folder) for run in self._runs}
        parts = [f'{name} done' if name in self._ended else f'{name} {count}/{self._iterations}'
                 for name, count in counts.items() if name in self._ended or count]
        text = f'{len(self._ended)} of {len(self._runs)} runs; {", ".join(parts) or "starting"}'
        if text != self._last:
            self._last = text
            elapsed = time.monotonic() - self._started
            done = sum(self._iterations if name in self._ended else min(count, self._iterations)
                       for name, count in counts.items())
            left = time_left(elapsed, done, len(self._runs) * self._iterations)
            self._say(f'{elapsed:4.0f} s  {text}{left}')


def time_left(elapsed: float, done: int, of: int) -> str:
    """Return the end of a line of progress: the estimated time that is left.

    >>> time_left(30., 3, 9), time_left(30., 0, 9), time_left(30., 9, 9)
    ('; about 60 s left', '', '')
    """
    return f'; about {duration(elapsed / done * (of - done))} left' if 0 < done < of else ''


def iterations_done(work_dir: str) -> int:
    """Count the iterations in the fingerprints of a running training."""
    path = os.path.join(work_dir, FOLDER, fingerprint_name(0))
    if not os.path.exists(path):
        return 0
    with open(path, 'rb') as file:
        return sum(line.startswith(b'{"kind":"step"') for line in file)
