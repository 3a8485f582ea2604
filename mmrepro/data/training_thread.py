"""Generators belong to the whole process: in the process that trains, its thread alone may load."""
from __future__ import annotations

import signal
import threading
from typing import Any
from weakref import WeakSet

from ..errors import RandomnessError

_threads: WeakSet[threading.Thread] = WeakSet()  # that train; they take turns
_take_turns = False
_refusal = ''  # for the main thread, which has not seen it yet
# Wakes the main thread. Nothing else sends it, and a process without a handler ignores it.
_SIGNAL = getattr(signal, 'SIGURG', None)  # Windows has none


def claim(turns: bool = False, builds: bool = False) -> None:
    """Say that this thread trains, validates or tests.

    Args:
        turns: Together with others that said so; exactly one of them runs at a time.
        builds: A runner, and trains later; of threads that take turns, another may train already.
    """
    if builds and not turns:
        return
    global _threads, _take_turns
    if not (turns and _take_turns):
        _threads = WeakSet()
    _take_turns = turns
    _threads.add(threading.current_thread())
    main = threading.current_thread() is threading.main_thread()  # a handler of the user's stays
    if _SIGNAL and main and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _interrupt)


def check(does: str) -> None:
    """Refuse what another thread does that may draw random numbers.

    Where the main thread trains it gets the error as well: it may wait for the other one.

    Args:
        does: what this thread does, for the message.

    Raises:
        RandomnessError: when the thread that trains is another one.
    """
    global _refusal
    me, main = threading.current_thread(), threading.main_thread()
    if me in _threads or not any(thread.is_alive() for thread in _threads):
        return
    text = (f'the thread {me.name!r} {does} in the process that trains: '
            'both would draw from the same generators. Load in workers, without a thread: '
            'num_workers=1 or more, and prefetch_factor')
    if main in _threads and _SIGNAL and signal.getsignal(_SIGNAL) is _interrupt:
        _refusal = text
        signal.pthread_kill(main.ident, _SIGNAL)  # raise_signal() would not end its wait for a lock
    else:
        text += '. The training may now wait for ever for this thread, and cannot be interrupted'
    raise RandomnessError(text)


def _interrupt(number: int, frame: Any) -> None:
    global _refusal
    text, _refusal = _refusal, ''
    if text:
        raise RandomnessError(text)
