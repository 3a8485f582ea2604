"""Text for messages and tables."""
from __future__ import annotations

from typing import Any

__all__ = ['shorten']


def shorten(value: Any, width: int = 60) -> str:
    """``str(value)``, cut to ``width`` characters with three dots at the end.

    >>> shorten('a rather long value', width=12)
    'a rather ...'
    """
    text = str(value)
    return text if len(text) <= width else f'{text[:width - 3]}...'
