"""Generators belong to the whole process: in the process that trains, its thread alone may load."""
from __future__ import annotations

import signal
import threading
from types import FrameType
from weakref import WeakSet

from ..errors import RandomnessError

# Wakes the main thread. Nothing else sends it, and a process without a handler ignores it.
_SIGNAL = signal.SIGURG


_threads: WeakSet[threading.Thread] = WeakSet()  # that train: one, or virtual ranks by turns
_take_turns = False
_refusal = ''  # the message of an error that the main thread has not raised yet


def claim(turns: bool = False) -> None:
    """Register the calling thread: it trains, validates or tests.

    With ``turns``, exactly one of the registered threads runs at a time.
    """
    global _threads, _take_turns
    others = _threads if turns and _take_turns else ()
    _threads, _take_turns = WeakSet([*others, threading.current_thread()]), turns
    # a handler of the user stays
    if threading.current_thread() is threading.main_thread() and \
            signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _interrupt)


def check(action: str) -> None:
    """Refuse an ``action`` that may draw random numbers in a thread that does not train.

    Where the main thread trains, it gets the error as well: it may wait for the other thread.

    Raises:
        RandomnessError: another thread trains.
    """
    global _refusal
    thread, main = threading.current_thread(), threading.main_thread()
    if thread in _threads or not any(map(threading.Thread.is_alive, _threads)):
        return
    text = (f'the thread {thread.name!r} {action} in the process that trains: both would draw from '
            'the same generators. Load in workers, without a thread: num_workers=1 or more, and '
            'prefetch_factor')
    if main in _threads and signal.getsignal(_SIGNAL) is _interrupt:
        _refusal = text
        # raise_signal() would not end its wait for a lock
        signal.pthread_kill(main.ident or 0, _SIGNAL)
    else:
        text += '. The training may now wait forever for this thread, and cannot be interrupted'
    raise RandomnessError(text)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _refusal
    text, _refusal = _refusal, ''
    if text:
        raise RandomnessError(text)
