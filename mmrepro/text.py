"""Text for messages and tables."""
from __future__ import annotations

from typing import Any, Sequence

__all__ = ['listed', 'shorten']


def shorten(value: Any, width: int = 60) -> str:
    """``str(value)``, cut to ``width`` characters with three dots at the end.

    >>> shorten('a rather long value', width=12)
    'a rather ...'
    """
    text = str(value)
    return text if len(text) <= width else f'{text[:width - 3]}...'


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first ``most`` names, and how many more there are.

    >>> listed(['a', 'b', 'c'], most=2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ', '.join(names[:most]) + (f' and {more} more' if more > 0 else '')
