"""What may not change a bit: work beside, other addresses, other contents of fresh memory, fewer
multiprocessors."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

from dev.gpu_check.checking import error_line
from dev.gpu_check.timing import timed

__all__ = ['Disturbance', 'fewer_multiprocessors']

_LOAD = 1 << 24  # numbers in a tensor of the load: an addition takes some 40 microseconds
_MOST = 2000  # additions of a load
_SLEEPS = (0, 20_000, 200_000)  # cycles between them, so that the load stops and starts


@functools.cache
def fewer_multiprocessors() -> tuple[Any | None, str]:
    """Return a context with half of the GPU's multiprocessors, or None and why there is none.

    It is made once, and was entered and left. The programs of a kernel run in another order there.
    """
    try:
        from torch.cuda.green_contexts import SUPPORTED, GreenContext
    except ImportError:
        return None, 'this torch has no green contexts'
    if not SUPPORTED:
        return None, 'this torch was built without green contexts'
    try:
        count = torch.cuda.get_device_properties(0).multi_processor_count
        context: Any = GreenContext.create(num_sms=max(8, count // 16 * 8), device_id=0)
        context.set_context()
        try:
            torch.zeros(1, device='cuda').add_(1)
        finally:
            context.pop_context()
        torch.cuda.synchronize()
    except Exception as error:  # drivers without support raise what they like
        return None, f'green contexts: {error_line(error)}'
    return context, ''


class Disturbance:
    """Disturbs every other repetition, each time in other ways; does nothing on a CPU.

    A disturbed repetition runs beside a load of another stream that lasts longer than it does and
    stops and starts, and with some memory taken, so that its tensors lie elsewhere. In every fourth
    repetition fresh memory is filled with NaN, and others have half of the multiprocessors, where
    torch can do that. There is one stream and one tensor for the load, and no product of matrices,
    whose workspace would stay.
    """

    def __init__(self, device: str) -> None:
        self._stream: Any = None
        self._fewer: Any = None
        self._milliseconds = 0.
        if device == 'cuda':
            self._stream = torch.cuda.Stream()
            self._load = torch.zeros(_LOAD, device='cuda')
            _, self._each = timed(lambda: self._queue(20), device)
            self._fewer, _ = fewer_multiprocessors()

    def _queue(self, count: int, sleep: int = 0) -> None:
        pause = getattr(torch.cuda, '_sleep', None)  # of torch's own tests
        with torch.cuda.stream(self._stream):
            for number in range(count):
                self._load.add_(1)
                if sleep and pause is not None and number % 10 == 9:
                    pause(sleep)

    def expect(self, milliseconds: float) -> None:
        """Set the length of the load: a repetition takes about so long."""
        self._milliseconds = milliseconds

    def takes_multiprocessors(self, repetition: int) -> bool:
        """Whether the repetition runs on half of the multiprocessors."""
        return self._fewer is not None and repetition % 4 == 1

    @contextlib.contextmanager
    def around(self, repetition: int) -> Iterator[None]:
        """Disturb what runs in the block if ``repetition``, from 1, is odd."""
        if self._stream is None or not repetition % 2:
            yield
            return
        taken = [torch.empty(512 * (1 + repetition % 13) + repetition, device='cuda')
                 for _ in range(repetition % 5)]
        settings: Any = getattr(torch.utils, 'deterministic', None)  # torch 2.0 and 2.1 have none
        filled = getattr(settings, 'fill_uninitialized_memory', None)
        each = max(self._each / 20, 1e-3)
        self._queue(min(_MOST, int(2 * self._milliseconds / each) + 20),
                    _SLEEPS[repetition // 2 % len(_SLEEPS)])
        with contextlib.ExitStack() as undone:
            undone.callback(torch.cuda.synchronize)
            undone.callback(taken.clear)
            if filled is not None:
                undone.callback(setattr, settings, 'fill_uninitialized_memory', filled)
                settings.fill_uninitialized_memory = repetition % 4 == 3
            if self.takes_multiprocessors(repetition):
                self._fewer.set_context()
                undone.callback(self._fewer.pop_context)
            yield
