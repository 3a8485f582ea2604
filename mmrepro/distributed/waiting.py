"""Waiting for other ranks, which may have ended, or may run in this process."""
from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Mapping, Optional, Sequence

import torch.distributed as dist

from .presence import Ending, Presence, RankEnded
from .virtual.scheduler import current

__all__ = ['Awaited', 'wait_in_store']

_logger = logging.getLogger('mmrepro')

SHORTEST, LONGEST = 0.001, 0.2  # seconds between two looks at the store
SLOWER = 1.3
# between two looks at the ranks while an operation is under way; how long one may take to end after
# a rank that takes part has; how long the reason of its failure may take to come
SLICE, GRACE = timedelta(seconds=1), timedelta(seconds=5)
REASON_WITHIN = 2.0  # seconds
# Seconds to wait for ranks that have not ended, as far as is known: one of them may evaluate alone.
PRESENT_TIMEOUT = 3600.0


def wait_in_store(store: dist.Store, keys: Mapping[str, int], timeout: timedelta,
                  presence: Optional[Presence]) -> None:
    """Wait until the store has ``keys``; a virtual rank lets others run meanwhile.

    Args:
        keys: Key -> the rank that sets it.
        timeout: To wait for ranks of which nothing is known.
        presence: Knows whether ranks have ended.

    Raises:
        RankEnded: one of the ranks has ended and has not set its key.
        TimeoutError: keys were not there in time.
        RuntimeError: the store is lost.
        Deadlock: no other virtual rank can set them.
    """
    if not keys:
        return
    wait = _Wait(store, keys, timeout.total_seconds(), presence)
    scheduler = current()
    if scheduler is not None:
        scheduler.wait(wait.over, f'the store, for {", ".join(keys)}', outside=True)
    else:
        while not wait.over():
            time.sleep(wait.pause)
    if wait.problem is not None:
        raise wait.problem


class _Wait:
    def __init__(self, store: dist.Store, keys: Mapping[str, int], timeout: float,
                 presence: Optional[Presence]) -> None:
        self._store, self._keys, self._presence = store, keys, presence
        self._started, self._timeout = time.monotonic(), timeout
        self._next, self.pause = 0., SHORTEST
        self.problem: Optional[Exception] = None
        self._said = False

    def over(self) -> bool:
        """Whether the keys are there, or something is wrong."""
        now = time.monotonic()
        scheduler = current()
        # while only other processes can set a key; a rank of this one may have, at any moment
        if now < self._next and scheduler is not None and scheduler.processes > 1:
            return False
        found = self._look(now)
        # longer and longer, so that looking costs little and delays little
        self.pause = min(self.pause * SLOWER, LONGEST)
        self._next = now + self.pause
        return found

    def _look(self, now: float) -> bool:
        ended: Mapping[int, Ending] = {}
        if self._presence is not None:
            self._presence.connect()
            # before the store is asked: a rank sets its key before it ends
            ended = self._presence.ended_of(self._keys.values())
        if self._store.check(list(self._keys)):
            return True
        waited = now - self._started
        if not ended and waited < self._timeout:
            return False
        missing = {key: rank for key, rank in self._keys.items() if not self._store.check([key])}
        lost = sorted(set(missing.values()) & set(ended))
        allowed = self._allowed(missing)
        if lost:
            self.problem = RankEnded(self._presence.text_of(lost))
        elif missing and waited >= allowed:
            self.problem = TimeoutError(f'{", ".join(missing)} did not appear in the store within '
                                        f'{allowed:g} s')
        elif missing and waited >= self._timeout and not self._said:
            self._said = True
            _logger.warning('waiting for %.0f s in the store of the process group for ranks that '
                            'have not ended: %s (%s); up to %.0f s', waited,
                            ', '.join(map(str, sorted(set(missing.values())))), ', '.join(missing),
                            allowed)
        return not missing or self.problem is not None

    def _allowed(self, missing: Mapping[str, int]) -> float:
        if self._presence is not None and all(map(self._presence.known, missing.values())):
            return max(self._timeout, PRESENT_TIMEOUT)
        return self._timeout


class Awaited:
    """Work of several processes over gloo, which may never end when one of them has ended.

    Args:
        work: What ``torch.distributed`` returned.
        processes: The numbers of those that take part.
        presence: Knows whether their ranks have ended.
    """

    def __init__(self, work: dist.Work, processes: Sequence[int], presence: Presence) -> None:
        self._work, self._processes, self._presence = work, processes, presence

    def is_completed(self) -> bool:
        return self._work.is_completed() or bool(self._presence.lost(self._processes))

    def wait(self) -> None:
        """Raises RankEnded, which says who waits where."""
        while True:
            self._presence.connect()
            lost = self._presence.lost(self._processes)
            try:
                self._work.wait(GRACE if lost else SLICE)
                return
            except RuntimeError as error:
                if self._work.is_completed():
                    break
                if lost:
                    raise RankEnded(self._text(lost)) from error
        try:
            self._work.wait()
        except RuntimeError as error:
            lost = self._presence.lost(self._processes, REASON_WITHIN)
            if not lost:
                raise
            raise RankEnded(self._text(lost)) from error

    def _text(self, lost: Sequence[int]) -> str:
        scheduler = current()
        here = [] if scheduler is None else [
            f'  virtual rank {rank.number} waits in {rank.where}'
            for rank in scheduler.ranks if not rank.ended]
        return '\n'.join([f'{self._presence.text_of(lost)}. Of this process:', *here])
