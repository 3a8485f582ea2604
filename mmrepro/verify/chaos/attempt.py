"""One start of a training run, watched until its processes have ended."""
from __future__ import annotations

import glob
import multiprocessing
import os
import time
from multiprocessing.connection import wait
from random import Random
from typing import Any, NamedTuple

from ...runs.launcher import free_port, kill_group, rank_variables
from .kinds import KINDS, strike
from .reporting_child import RankEvent, train

COUNTED = ('train', 'val')  # events that count for the moment of an interruption
GRACE = 60.  # seconds in which processes have to end by themselves, once one has
APPEAR = 2.  # seconds to wait for a half-written checkpoint, once one is to be written
LOOK = 0.1  # seconds after which we see that a process has ended; its workers may keep its pipes
LIMIT = 1800.  # seconds without an event, after which a run counts as hung


class Interruption(NamedTuple):
    """When and how an attempt is interrupted."""
    kind: str  # a key of :data:`KINDS`
    events: int  # iterations and validation batches before it
    # How much of the time until the next event passes after that, 0 to 1. While a checkpoint is
    # written: below 0.5 right when its file appears, else that much later.
    fraction: float


class Attempt:
    """Trains until the end, or until it is interrupted.

    Args:
        processes: How many.
        ranks: How many they train: as many, or more if ranks are virtual.
    """

    def __init__(self, config: str, processes: int, ranks: int, log: str,
                 start_method: str) -> None:
        context = multiprocessing.get_context(start_method)
        port = free_port() if processes > 1 else None
        self.events: list[list[RankEvent]] = [[] for _ in range(ranks)]  # per rank, all reported
        self._workers: list[tuple[int, ...]] = [()] * processes  # last known, per process
        self.struck = False  # whether it was interrupted
        self._folder = os.path.dirname(config)
        self.seconds_to_end: float | None = None  # from the interruption until all had ended
        self.ended_by_us: list[int] = []  # processes that had to be killed
        self._times: dict[str, list[float]] = dict(event=[], save=[])
        self._last: tuple[str, float] = ('', time.monotonic())
        self._connections, self._processes = [], []
        for number in range(processes):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=train, args=(
                config, rank_variables(number, processes, port), there,
                log.replace('{rank}', str(number))))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, plan: Interruption | None, gaps: dict[str, float], random: Random) -> Attempt:
        """Watch until the end; ``gaps`` are :meth:`durations`, ``random`` chooses processes."""
        try:
            self._watch(plan, gaps, random)
        finally:  # of an error, or Ctrl-C: the processes have sessions of their own
            self._kill()
            for process in self._processes:
                kill_group(process.pid)  # workers that have lost their trainer see it seconds later
        for connection in self._connections:
            while not connection.closed and connection.poll():
                self._receive(connection)
            connection.close()
        return self

    def _watch(self, plan: Interruption | None, gaps: dict[str, float], random: Random) -> None:
        strike_at: float | None = None
        first_end: float | None = None
        while any(process.is_alive() for process in self._processes):
            now = time.monotonic()
            if strike_at is not None and now >= strike_at and not self.struck:
                self.struck, self._struck_at = True, now
                strike(plan.kind, [(process.pid, workers) for process, workers
                                   in zip(self._processes, self._workers)], random)
            if first_end is None and not all(p.is_alive() for p in self._processes):
                first_end = now
            # ranks that wait for a dead one; a launcher would end them
            if now - (first_end or now) > GRACE or now - self._last[1] > LIMIT:
                self._kill()
            due = strike_at - now if strike_at is not None and not self.struck else LOOK
            connections = [c for c in self._connections if not c.closed]
            alive = [process.sentinel for process in self._processes if process.is_alive()]
            for ready in wait([*connections, *alive], min(max(due, 0.), LOOK)):
                if ready in connections:
                    self._receive(ready)
            if strike_at is None and plan is not None and self._reached(plan):
                strike_at = self._moment(plan, gaps)
        if self.struck:
            self.seconds_to_end = time.monotonic() - self._struck_at
        for process in self._processes:
            process.join()

    @property
    def codes(self) -> list[int]:
        """Per process, exit code; negative is the number of the signal that ended it."""
        return [process.exitcode for process in self._processes]

    def durations(self) -> dict[str, float]:
        """Median seconds between events, and from the begin of a checkpoint to what follows."""
        return {name: sorted(times)[len(times) // 2] if times else 0.
                for name, times in self._times.items()}

    def _reached(self, plan: Interruption) -> bool:
        events = self.events[0]
        if sum(event.kind in COUNTED for event in events) < plan.events:
            return False
        moment = KINDS[plan.kind].moment
        return not moment or events[-1].kind == moment

    def _moment(self, plan: Interruption, gaps: dict[str, float]) -> float:
        if not KINDS[plan.kind].moment:
            return self._last[1] + plan.fraction * gaps['event']
        before = set(glob.glob(os.path.join(self._folder, '.*.partial')))
        end = time.monotonic() + APPEAR
        while time.monotonic() < end:  # without a pause: the file is there for milliseconds
            if set(glob.glob(os.path.join(self._folder, '.*.partial'))) - before:
                break
        return time.monotonic() + max(plan.fraction - 0.5, 0.) * gaps['save']

    def _receive(self, connection: Any) -> None:
        try:
            event = connection.recv()
        except (EOFError, OSError):  # the process was killed, perhaps in the middle of an event
            connection.close()
            return
        self._workers[self._connections.index(connection)] = event.workers
        self.events[event.rank].append(event)
        if event.rank == 0:
            now = time.monotonic()
            before, then = self._last
            if before == 'save':
                self._times['save'].append(now - then)
            elif before in (*COUNTED, 'trained') and event.kind in COUNTED:
                self._times['event'].append(now - then)
            self._last = event.kind, now

    def _kill(self) -> None:
        for number, process in enumerate(self._processes):
            if process.is_alive():
                self.ended_by_us.append(number)
                process.kill()
                process.join()
