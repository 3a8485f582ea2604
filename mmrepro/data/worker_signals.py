"""How data loader workers end: with the trainer that started them, and not before it.

Schedulers send SIGTERM to all processes of a job. A worker that dies of it takes the trainer along,
in the middle of the iteration that the trainer means to finish. The other way round, a trainer that
is killed leaves workers behind: the thread of a worker that writes a large batch waits for ever,
because its siblings hold the reading end of their common pipe.
"""
from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from functools import cache
from typing import Any, Callable

# signals that workers ignore; Windows has none of them
IGNORED = ('SIGTERM', 'SIGUSR1', 'SIGUSR2')

# PyTorch and multiprocessing end workers by SIGTERM, and a Python handler cannot see who sent
# it. They use this signal instead, which nothing sends to a group of processes.
END = getattr(signal, 'SIGVTALRM', None)

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
WATCH_INTERVAL = 1.  # seconds, where the kernel does not watch


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


def note_thread(process: Any) -> None:
    """Note in a process that is about to start whether it may ask for :func:`_killed_by_kernel`."""
    process._by_main_thread = threading.current_thread() is threading.main_thread()


def end_with_trainer() -> None:
    """Let this worker end when the process that started it is gone, however it ended."""
    if os.name == 'nt':  # a pipe is broken there as soon as its reader is gone
        return
    process, trainer = multiprocessing.current_process(), multiprocessing.parent_process().pid
    # a fork server stands in between, and lives as long as its workers
    gone = _no_parent if process._start_method != 'forkserver' else _no_process
    # the kernel means the thread that started the worker, and other threads may end earlier
    watched = gone is _no_parent and getattr(
        process, '_by_main_thread', False) and _killed_by_kernel()
    if gone(trainer):  # before the kernel knew
        os._exit(0)
    if not watched:
        threading.Thread(target=_watch, args=(gone, trainer), daemon=True).start()


def _killed_by_kernel() -> bool:
    """Ask the kernel to kill this process when its parent dies; False where it cannot."""
    if not sys.platform.startswith('linux'):
        return False
    return ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0


def _no_parent(pid: int) -> bool:
    return os.getppid() != pid


def _no_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _watch(gone: Callable[[int], bool], trainer: int) -> None:
    while not gone(trainer):
        time.sleep(WATCH_INTERVAL)
    os._exit(0)
