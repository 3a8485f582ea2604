"""Signals in data loader workers: the main process handles those that announce the end of a run.

Schedulers send SIGTERM to all processes of a job. A worker that dies of it takes the trainer along,
in the middle of the iteration that the trainer means to finish.
"""
from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

__all__ = ['ends_workers', 'shield']

# signals that workers ignore; Windows has none of them
IGNORED = ('SIGTERM', 'SIGUSR1', 'SIGUSR2')

# PyTorch and multiprocessing end workers by SIGTERM, and a Python handler cannot see who sent
# it. They use this signal instead, which nothing sends to a group of processes.
END = getattr(signal, 'SIGVTALRM', None)


def _ignore(number: int, frame: Any) -> None:
    """Not SIG_IGN: programs that a worker starts would inherit that."""


def _leave(number: int, frame: Any) -> None:
    os._exit(0)  # as PyTorch's own handler does when the trainer ends a worker


def shield() -> None:
    """Let this worker outlive the signals that announce the end. Call it in its main thread."""
    if END is None:
        return
    signal.signal(END, _leave)
    for name in IGNORED:
        signal.signal(getattr(signal, name), _ignore)


@cache
def ends_workers(popen: type) -> type:
    """A subclass of multiprocessing's ``Popen`` that ends processes with :data:`END`."""
    if END is None:
        return popen

    def terminate(self: Any) -> None:
        self._send_signal(END)

    return type('Popen', (popen, ), {'terminate': terminate})
