"""Progress of trainings, in one line."""
from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable

from ..fingerprint.reader import NewLines
from ..fingerprint.schema import FOLDER, fingerprint_name
from ..util.text import duration
from .launcher import PlannedRun, run_all

CLEAR = '\r\x1b[K'  # goes to the beginning of a terminal's line and erases it


SECONDS = .5  # between two lines where there is no terminal


@contextmanager
def progress_line(stream: Any, clock: Callable[[], float] = time.monotonic
                  ) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line; on a terminal, each line replaces the line before.

    Elsewhere, as in the log of a job, a line that comes too soon waits for the next, which takes
    its place, or for the end. The argument '' clears the line of a terminal, to print something
    else there.
    """
    shown = waiting = ''
    last = -SECONDS

    def on_progress(text: str) -> None:
        nonlocal shown, waiting, last
        shown = text
        if stream.isatty():
            stream.write(f'{CLEAR}{text}')
        elif text and clock() - last < SECONDS:
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
        text = f'{len(ended)} of {len(runs)} runs; {", ".join(parts) or "starting"}'
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
