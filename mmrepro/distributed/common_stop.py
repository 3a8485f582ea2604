"""All ranks stop after the same event, although a signal reaches them at different times.

An event is the end of an iteration or of a validation batch. It costs one lock and no message: a
thread of each rank looks at the store of the process group twice a second. Once a rank wants to
stop, every thread names the event that its main thread is heading for, beyond which the main thread
waits until all have answered. The latest of these events is the last one. The threads also answer
while the main threads wait for each other's gradients, so this cannot hang.
"""
from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Callable, ContextManager, Optional

import torch.distributed as dist

from .agreement import DEFAULT_TIMEOUT, AgreementError, group_store
from .presence import Presence, RankEnded, of_run
from .store import round_store
from .waiting import wait_in_store

__all__ = ['CommonStop']

INTERVAL = 0.5  # seconds between two looks at the store
ANSWER_INTERVAL = 0.02  # the same, once a rank wants to stop


class CommonStop:
    """Where all ranks stop. Every rank makes one, at the same point of its program.

    Args:
        wanted: Whether this rank wants to stop; called from another thread.
        interval: Seconds between two looks at the store; None: :data:`INTERVAL`.
        timeout: Seconds within which all ranks have to answer.
    """

    def __init__(self, wanted: Callable[[], bool], interval: Optional[float] = None,
                 timeout: float = DEFAULT_TIMEOUT) -> None:
        self._wanted, self._timeout = wanted, timeout
        self._interval = INTERVAL if interval is None else interval
        self._events = 0
        self._held: Optional[int] = None  # the event beyond which this rank must not go yet
        self._last: Optional[int] = None  # the event that all ranks agreed on
        self._error: Optional[str] = None
        self._lock, self._decided, self._closed = (
            threading.Lock(), threading.Event(), threading.Event())
        self._thread: Optional[threading.Thread] = None
        self._presence: Optional[Presence] = None
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        store = group_store('agree where to stop. Use gloo or nccl, or turn pre-emption off: '
                            "custom_hooks=[dict(type='PreemptHook', signals=())]")
        self._presence = of_run()
        # the clone does not wait while the original does; an older torch has none, but keys are
        # short, and nothing here waits long before the end
        with self._using_store():
            self._store = round_store(store.clone() if hasattr(store, 'clone') else store, 'stop',
                                      self._world)
        self._thread = threading.Thread(target=self._watch, name='mmrepro stop', daemon=True)
        self._thread.start()

    def end_event(self) -> bool:
        """Whether this event is the last one. All ranks have the same events.

        Raises:
            AgreementError: a rank did not answer, or the store is lost.
        """
        if self._thread is None:
            return self._wanted()
        with self._lock:
            self._events += 1
            if self._held is None or self._events < self._held:
                return False
        self._decided.wait()
        if self._error is not None:
            raise AgreementError(self._error)
        return self._events >= self._last

    def leave(self, timeout: float = 3600.) -> None:
        """Wait until rank 0 has called this; rank 0 waits for all.

        A rank that ends while rank 0 still writes would make a launcher end rank 0, and rank 0
        may hold the store that the others need.
        """
        if self._thread is None:
            return
        keys = {f'left{rank}': rank for rank in range(self._world)}
        own, within = f'left{self._rank}', timedelta(seconds=timeout)
        with self._using_store():
            if self._rank:
                wait_in_store(self._store, {'left0': 0}, within, self._presence)
                self._store.set(own, '')
                self._store.check([own])  # `set` does not wait until it is there
                return
            self._store.set(own, '')
            try:
                wait_in_store(self._store, keys, within, self._presence)
            except RankEnded:
                pass  # it was killed; rank 0 has written what there is to write

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _using_store(self) -> ContextManager[None]:
        return nullcontext() if self._presence is None else self._presence.using_store()

    def _watch(self) -> None:
        try:
            while not self._is_wanted():
                if self._closed.wait(self._interval):
                    return
            with self._using_store():
                self._store.set('wanted', '')
                with self._lock:
                    self._held = self._events + 1
                self._store.set(f'event{self._rank}', str(self._held))
            self._last = self._collect()
        except RankEnded as error:
            self._error = f'{error}, before the ranks agreed where to stop'
        except (RuntimeError, OSError) as error:  # rank 0 has ended, and the store with it
            self._error = f'rank {self._rank} has lost the store of the process group: {error}'
        self._decided.set()

    def _is_wanted(self) -> bool:
        with self._using_store():
            return self._wanted() or self._store.check(['wanted'])

    def _collect(self) -> Optional[int]:
        keys = {f'event{rank}': rank for rank in range(self._world)}
        end = time.monotonic() + self._timeout
        while True:
            # before the store is asked: a rank answers before it ends
            ended = self._presence.ended_of(keys.values()) if self._presence is not None else {}
            with self._using_store():
                missing = [rank for key, rank in keys.items() if not self._store.check([key])]
                if not missing:
                    return max(int(self._store.get(key)) for key in keys)
            lost = [rank for rank in missing if rank in ended]
            if lost:
                raise RankEnded(self._presence.text_of(lost))
            if self._closed.wait(ANSWER_INTERVAL):
                return None
            if time.monotonic() > end:
                self._error = (f'these ranks did not say within {self._timeout:g} s where they can '
                               f'stop: {", ".join(map(str, missing))}')
                return None
