"""One start of a training, watched until its processes have ended."""
from __future__ import annotations

import contextlib
import glob
import itertools
import os
import time
from random import Random
from typing import NamedTuple

from mmrepro.runs.launcher import Launch, LaunchedTraining, killed_at_exit

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


class Attempt(NamedTuple):
    """How a start of a training ended."""
    moments: list[Moment]  # of all ranks
    codes: list[int | None]  # of each process; negative is the number of the signal that ended it
    seconds_to_end: float | None  # after the interruption; None if the training was not interrupted
    killed: list[int]  # numbers of processes that did not end by themselves

    def of_rank(self, rank: int) -> list[Moment]:
        return [moment for moment in self.moments if moment.rank == rank]


def watch(launch: Launch, folder: str, plan: Interruption | None, gaps: dict[str, float],
          random: Random) -> Attempt:
    """Train in a work directory until the end, or until the planned interruption.

    ``gaps`` are those of :func:`.moments.durations`.
    """
    reader = MomentReader(folder)
    reader.new()  # those of an earlier start
    moments: list[Moment] = []
    killed: list[int] = []
    strike_at: float | None = None
    struck_at: float | None = None
    first_end: float | None = None
    running: dict[str, LaunchedTraining] = {}
    with killed_at_exit(running):
        training = running[''] = LaunchedTraining(launch)
        last = time.monotonic()
        while None in (codes := training.codes()):
            new, now = reader.new(), time.monotonic()
            moments += new
            last = now if new else last
            if plan is not None and struck_at is None:
                if strike_at is None and (due := _due(plan, moments)):
                    strike_at = _strike_at(plan, due, gaps, folder)
                    now = time.monotonic()
                if strike_at is not None and now >= strike_at:
                    # the last known workers
                    workers = {moment.process: tuple(moment.workers) for moment in moments}
                    for pid in KINDS[plan.kind].victims(
                            [(pid, workers.get(pid, ())) for pid in training.pids], random):
                        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                            os.kill(pid, KINDS[plan.kind].number)
                            struck_at = now  # a signal that reached nobody interrupts nothing
            if first_end is None and codes.count(None) < len(codes):
                first_end = now
            # ranks that wait for a dead one; a launcher would end them
            if now - (first_end or now) > GRACE or now - last > LIMIT:
                killed = [number for number, code in enumerate(codes) if code is None]
                training.kill()
            time.sleep(POLL)
    seconds = None if struck_at is None else time.monotonic() - struck_at
    return Attempt(moments + reader.new(), codes, seconds, killed)


def _due(plan: Interruption, moments: list[Moment]) -> Moment | None:
    """Return the moment from which on the interruption is due; None before it."""
    first = [moment for moment in moments if moment.rank == 0]
    counts = itertools.accumulate(moment.kind in COUNTED for moment in first)
    return next((moment for moment, count in zip(first, counts)
                 if count >= plan.moments and KINDS[plan.kind].moment in ('', moment.kind)), None)


def _strike_at(plan: Interruption, due: Moment, gaps: dict[str, float], folder: str) -> float:
    if not KINDS[plan.kind].moment:
        return due.time + plan.fraction * gaps['step']
    partial = os.path.join(glob.escape(folder), '.*.partial')
    before, end = set(glob.glob(partial)), time.monotonic() + APPEAR
    while time.monotonic() < end and not set(glob.glob(partial)) - before:
        pass  # without a pause: the file is there for milliseconds
    return time.monotonic() + max(plan.fraction - 0.5, 0.) * gaps['save']
