"""Generators belong to the whole process: in the process that trains, its thread alone may load."""
from __future__ import annotations

import threading
from typing import Optional

from ..config import RandomnessError

__all__ = ['check', 'claim']

_thread: Optional[threading.Thread] = None


def claim() -> None:
    """Say that this thread trains, validates or tests."""
    global _thread
    _thread = threading.current_thread()


def check(does: str) -> None:
    """Refuse what another thread does that may draw random numbers.

    Args:
        does: what this thread does, for the message.

    Raises:
        RandomnessError: when the thread that trains is another one.
    """
    if _thread is not None and _thread is not threading.current_thread() and _thread.is_alive():
        raise RandomnessError(
            f'the thread {threading.current_thread().name!r} {does} in the process that trains: '
            'both would draw from the same generators. Load in workers, without a thread: '
            'num_workers=1 or more, and prefetch_factor')
