"""Progress in one line."""
from __future__ import annotations

import os
import time
from typing import Any, Callable, Sequence

from ..fingerprint.schema import FOLDER
from .process import fingerprints_of

__all__ = ['Line', 'Runs']


class Line:
    """Written over on a terminal; one below the other in a file."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._width = stream, 0

    def say(self, text: str) -> None:
        if self._stream.isatty():
            self._stream.write(f'\r{text:<{self._width}}')
            self._width = len(text)
        else:
            self._stream.write(f'{text}\n')
        self._stream.flush()

    def end(self) -> None:
        if self._width:
            self._stream.write('\n')
            self._width = 0


class Runs:
    """Says how many iterations of which run are done, when that has changed."""

    def __init__(self, jobs: Sequence[Any], iterations: int, say: Callable[[str], None]) -> None:
        self._jobs, self._iterations, self._say = jobs, iterations, say
        self._ended: set = set()
        self._started, self._last = time.monotonic(), ''

    def done(self, job: Any) -> None:
        self._ended.add(job.name)
        self.show()

    def show(self) -> None:
        parts = []
        for job in self._jobs:
            if job.name in self._ended:
                parts.append(f'{job.name} done')
                continue
            path = os.path.join(job.folder, FOLDER)
            log = fingerprints_of(job.folder) if os.path.isdir(path) else None
            if log is not None:
                parts.append(f'{job.name} {len(log.steps)}/{self._iterations}')
        text = f'{len(self._ended)} of {len(self._jobs)} runs; {", ".join(parts) or "starting"}'
        if text != self._last:
            self._last = text
            self._say(f'{time.monotonic() - self._started:4.0f} s  {text}')
