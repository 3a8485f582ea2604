"""Processes of data loader workers: what they import first, and how they end.

A worker that does not fork unpickles the dataset, and with it imports MMDetection, which asks for
mmcv's operators: with mmcv-lite they exist only once mmrepro is imported. The process object is the
first object in the pickle, and its class lives here.

Workers end with the trainer that started them, and not before it. Schedulers send SIGTERM to all
processes of a job; a worker that dies of it takes the trainer along, in the middle of the iteration
that the trainer means to finish. Conversely, a trainer that is killed leaves workers behind: the
thread of a worker that writes a large batch waits forever, because its siblings hold the reading
end of their common pipe.

A file that the dataset has opened before its workers were forked has one position for all of them:
where one seeks, another reads. Each worker opens such files again, and has positions of its own.

What a worker cannot send is an error in the trainer, which arrives in place of the batch.
"""
from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import stat
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import context, queues
from typing import Any, Callable

from torch._utils import ExceptionWrapper

from ..util.scoped import extend

IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # by workers

# PyTorch and multiprocessing end workers by SIGTERM, and a Python handler cannot see who sent
# it. They use this signal instead, which nothing sends to a group of processes.
END = signal.SIGVTALRM

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
STREAMS = 3  # standard input, output and error are those of the trainer
WATCH_INTERVAL = 1.  # seconds, where the kernel does not watch
SENDING = 'while a batch was pickled for the trainer (with num_workers=0, none is pickled)'

# ---- in the trainer


def _terminate(popen: Any) -> None:
    """Replace ``terminate`` of multiprocessing's ``Popen``."""
    popen._send_signal(END)


class _Worker:
    """A process that ends by :data:`END`, whatever its start method."""

    def _Popen(self, process: Any) -> Any:
        # for `end_with_trainer`: the kernel watches the thread that starts a process
        process._mmrepro_by_main_thread = threading.current_thread() is threading.main_thread()
        popen = super()._Popen(process)  # type: ignore[misc]
        extend(popen, {'terminate': _terminate})
        return popen


class _Queue(queues.Queue):  # type: ignore[type-arg]
    """A queue of (number, batch) whose reader gets an error in place of what cannot be sent."""

    def _on_queue_feeder_error(self, error: Exception, sent: Any) -> None:
        number, _ = sent
        self.put((number, ExceptionWrapper((type(error), error, error.__traceback__), SENDING)))


def _queue(own_context: Any, maxsize: int = 0) -> _Queue:
    return _Queue(maxsize, ctx=own_context)


METHODS: dict[str, type] = {}  # start method -> context
for _name in ('Fork', 'Spawn', 'ForkServer'):
    _class = type(f'{_name}Process', (_Worker, getattr(context, f'{_name}Process')),
                  {'__module__': __name__})
    globals()[f'{_name}Process'] = _class  # a worker unpickles it by this name
    METHODS[_name.lower()] = type(f'{_name}Context', (getattr(context, f'{_name}Context'), ),
                                  {'__module__': __name__, 'Process': _class, 'Queue': _queue})


def use_own_start_method(loader: Any) -> None:
    """Replace the context of a ``DataLoader`` by ours of the same start method, in place."""
    chosen = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if loader.num_workers > 0 and chosen in METHODS:
        loader.multiprocessing_context = METHODS[chosen]()


# ---- in a worker


def _ignore(number: int, frame: Any) -> None:
    """Do nothing. SIG_IGN would be inherited by programs that a worker starts."""


def _leave(number: int, frame: Any) -> None:
    os._exit(0)  # as PyTorch's own handler does when the trainer ends a worker


def shield() -> None:
    """Let this worker outlive the signals that announce the end. Call it in its main thread."""
    signal.signal(END, _leave)
    for number in IGNORED:
        signal.signal(number, _ignore)


def own_file_positions() -> None:
    """Open the files again that this worker has inherited for reading; descriptors stay.

    Call it before anything is read. A file that cannot be opened again stays shared.
    """
    if not sys.platform.startswith('linux'):
        return
    for name in os.listdir('/proc/self/fd'):
        descriptor = int(name)
        with suppress(OSError):  # one is that of the list, which is closed
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if descriptor < STREAMS or flags & os.O_ACCMODE != os.O_RDONLY or not stat.S_ISREG(
                    os.fstat(descriptor).st_mode):
                continue
            position = os.lseek(descriptor, 0, os.SEEK_CUR)
            again = os.open(f'/proc/self/fd/{descriptor}', flags)
            os.lseek(again, position, os.SEEK_SET)
            os.dup2(again, descriptor, inheritable=os.get_inheritable(descriptor))
            os.close(again)


def end_with_trainer() -> None:
    """Let this worker end when the process that started it is gone, however it ended."""
    process: Any = multiprocessing.current_process()
    trainer: Any = multiprocessing.parent_process().pid  # type: ignore[union-attr]
    # a fork server stands in between, and lives as long as its workers
    gone = _no_parent if process._start_method != 'forkserver' else _no_process
    # the kernel means the thread that started the worker, and other threads may end earlier
    watched = gone is _no_parent and getattr(
        process, '_mmrepro_by_main_thread', False) and _killed_by_kernel()
    if gone(trainer):  # before the kernel knew
        os._exit(0)
    if not watched:
        threading.Thread(target=_watch, args=(gone, trainer), daemon=True).start()


def _killed_by_kernel() -> bool:
    """Ask the kernel to kill this process when its parent dies; False where it cannot."""
    return sys.platform.startswith('linux') and not ctypes.CDLL(None).prctl(
        PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


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
