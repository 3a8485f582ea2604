"""A limit of time that rows are taken from, in order; what no longer fits is left out by name."""
from __future__ import annotations

import time
from typing import Callable

__all__ = ['Budget']


class Budget:
    """Seconds to spend.

    Args:
        seconds: in all.
        clock: for tests.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._longest = 0.

    @property
    def left(self) -> float:
        """Seconds until the end; negative after it."""
        return self._end - self._clock()

    def part(self, share: float) -> Budget:
        """A budget of its own, of this share of what is left."""
        return Budget(max(0., self.left) * share, self._clock)

    def allows(self) -> bool:
        """Whether a row as long as the longest before it would still fit."""
        return self.left > self._longest

    def spent(self, seconds: float) -> None:
        """Tell how long a row took."""
        self._longest = max(self._longest, seconds)
