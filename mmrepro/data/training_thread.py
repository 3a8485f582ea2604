"""Generators belong to the whole process: in the process that trains, its thread alone may load."""
from __future__ import annotations

import signal
import threading
from types import FrameType
from weakref import WeakSet

from ..errors import RandomnessError

# Wakes the main thread. Nothing else sends it, and a process without a handler ignores it.
_SIGNAL = signal.SIGURG


class _TrainingThreads:
    """The threads of this process that train: one, or virtual ranks that take turns."""

    def __init__(self) -> None:
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._take_turns = False
        self.refusal = ''  # the message of an error that the main thread has not raised yet

    def claim(self, turns: bool = False) -> None:
        """Register the calling thread: it trains, validates or tests.

        Args:
            turns: exactly one of the registered threads runs at a time.
        """
        if not (turns and self._take_turns):
            self._threads = WeakSet()
        self._take_turns = turns
        self._threads.add(threading.current_thread())
        # a handler of the user stays
        if threading.current_thread() is threading.main_thread() and \
                signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            signal.signal(_SIGNAL, _interrupt)

    def check(self, action: str) -> None:
        """Refuse an ``action`` that may draw random numbers in a thread that does not train.

        Where the main thread trains, it gets the error as well: it may wait for the other thread.

        Raises:
            RandomnessError: another thread trains.
        """
        thread, main = threading.current_thread(), threading.main_thread()
        if thread in self._threads or not any(map(threading.Thread.is_alive, self._threads)):
            return
        text = (f'the thread {thread.name!r} {action} in the process that trains: '
                'both would draw from the same generators. Load in workers, without a thread: '
                'num_workers=1 or more, and prefetch_factor')
        if main in self._threads and signal.getsignal(_SIGNAL) is _interrupt:
            self.refusal = text
            # raise_signal() would not end its wait for a lock
            signal.pthread_kill(main.ident or 0, _SIGNAL)
        else:
            text += ('. The training may now wait for ever for this thread, and cannot be '
                     'interrupted')
        raise RandomnessError(text)


_process = _TrainingThreads()
claim, check = _process.claim, _process.check


def _interrupt(number: int, frame: FrameType | None) -> None:
    text, _process.refusal = _process.refusal, ''
    if text:
        raise RandomnessError(text)
