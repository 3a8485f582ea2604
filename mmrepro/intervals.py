"""The schedule of checks that get rarer: 1, 2, 4, 8, ..., and every ``interval``-th."""
from __future__ import annotations


def is_due(count: int, interval: int = 0) -> bool:
    """Whether the ``count``-th occurrence, counted from 1, is checked.

    >>> [count for count in range(1, 13) if is_due(count, interval=6)]
    [1, 2, 4, 6, 8, 12]
    """
    return count & (count - 1) == 0 or (interval > 0 and count % interval == 0)
