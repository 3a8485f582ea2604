"""One start of a training, watched until its processes have ended."""
from __future__ import annotations

import contextlib
import glob
import os
import time
from random import Random
from typing import NamedTuple

from ...runs.launcher import Launch, LaunchedTraining, killed_at_exit
from .kinds import KINDS
from .moments import Moment, MomentReader

COUNTED = ('train', 'val')  # moments that count for the time of an interruption
GRACE = 60.  # seconds in which processes have to end by themselves, once one has
APPEAR = 2.  # seconds to wait for a half-written checkpoint, once one is to be written
POLL = 0.002  # seconds between two looks at the moments and processes
LIMIT = 1800.  # seconds without a moment, after which a run counts as hung


class Interruption(NamedTuple):
    """When and how an attempt is interrupted."""
    kind: str  # a key of :data:`KINDS`
    moments: int  # iterations and validation batches before it
    # How much of the time until the next moment passes after that, 0 to 1. While a checkpoint is
    # written: below 0.5 right when its file appears, else that much later.
    fraction: float


class Attempt:
    """Trains until the end, or until it is interrupted.

    Args:
        launch: starts the processes.
        folder: work directory of the training.
    """

    def __init__(self, launch: Launch, folder: str) -> None:
        self._folder, self._reader = folder, MomentReader(folder)
        self._reader.new()  # those of an earlier start
        self.moments: list[Moment] = []  # of all ranks
        self._last = time.monotonic()
        self._struck_at: float | None = None
        self.seconds_to_end = 0.  # from the interruption until all processes had ended
        self.killed: list[int] = []  # numbers of processes that did not end by themselves
        self._training = LaunchedTraining(launch)

    @property
    def struck(self) -> bool:
        """Whether the training was interrupted."""
        return self._struck_at is not None

    @property
    def codes(self) -> list[int | None]:
        """Exit code of each process; negative is the number of the signal that ended it."""
        return self._training.codes()

    def of_rank(self, rank: int) -> list[Moment]:
        return [moment for moment in self.moments if moment.rank == rank]

    def run(self, plan: Interruption | None, gaps: dict[str, float], random: Random) -> Attempt:
        """Watch until the end.

        Args:
            gaps: see :func:`.moments.durations`.
            random: chooses processes.
        """
        with killed_at_exit({'': self._training}):
            self._watch(plan, gaps, random)
        self._read()
        return self

    def _watch(self, plan: Interruption | None, gaps: dict[str, float], random: Random) -> None:
        strike_at: float | None = None
        first_end: float | None = None
        while None in (codes := self.codes):
            self._read()
            now = time.monotonic()
            if plan is not None and not self.struck:
                if strike_at is None and (due := self._due(plan)) is not None:
                    strike_at = self._strike_at(plan, due, gaps)
                    now = time.monotonic()
                if strike_at is not None and now >= strike_at:
                    self._struck_at = now
                    kind = KINDS[plan.kind]
                    for pid in kind.victims(self._processes(), random):
                        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                            os.kill(pid, kind.number)
            if first_end is None and codes.count(None) < len(codes):
                first_end = now
            # ranks that wait for a dead one; a launcher would end them
            if now - (first_end or now) > GRACE or now - self._last > LIMIT:
                self.killed = [number for number, code in enumerate(codes) if code is None]
                self._training.kill()
            time.sleep(POLL)
        if self._struck_at is not None:
            self.seconds_to_end = time.monotonic() - self._struck_at

    def _read(self) -> None:
        new = self._reader.new()
        self.moments += new
        if new:
            self._last = time.monotonic()

    def _processes(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return the process id and the last known workers of every process."""
        workers = {moment.process: tuple(moment.workers) for moment in self.moments}
        return [(pid, workers.get(pid, ())) for pid in self._training.pids]

    def _due(self, plan: Interruption) -> Moment | None:
        """Return the moment from which on the interruption is due; None before it."""
        counted = 0
        for moment in self.of_rank(0):
            counted += moment.kind in COUNTED
            if counted >= plan.moments and KINDS[plan.kind].moment in ('', moment.kind):
                return moment
        return None

    def _strike_at(self, plan: Interruption, due: Moment, gaps: dict[str, float]) -> float:
        if not KINDS[plan.kind].moment:
            return due.time + plan.fraction * gaps['step']
        before = set(glob.glob(os.path.join(self._folder, '.*.partial')))
        end = time.monotonic() + APPEAR
        while time.monotonic() < end:  # without a pause: the file is there for milliseconds
            if set(glob.glob(os.path.join(self._folder, '.*.partial'))) - before:
                break
        return time.monotonic() + max(plan.fraction - 0.5, 0.) * gaps['save']
