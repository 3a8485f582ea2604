"""What may not change a bit: work beside, other addresses, other contents of fresh memory."""
from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Iterator, List, Tuple

import torch

__all__ = ['Disturbance', 'timed']

_LOAD = 1 << 24  # numbers in a tensor of the load: an addition takes some 40 microseconds
_MOST = 2000  # additions of a load


def timed(function: Callable[[], Any], device: str) -> Tuple[Any, float]:
    """(result, milliseconds until the device has done what ``function`` asked of it)."""
    if device != 'cuda':
        start = time.perf_counter()
        result = function()
        return result, (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    result = function()
    end.record()
    torch.cuda.synchronize()
    return result, begin.elapsed_time(end)


class Disturbance:
    """Disturbs every other repetition, each time in other ways; does nothing on a CPU.

    A disturbed repetition runs beside a load of another stream that lasts longer than it does, and
    with some memory taken, so that its tensors lie elsewhere. In every fourth repetition fresh
    memory is filled with NaN. There is one stream and one tensor for the load, and no product of
    matrices, whose workspace would stay.
    """

    def __init__(self, device: str) -> None:
        self._stream = self._load = None
        self._milliseconds = 0.
        if device == 'cuda':
            self._stream = torch.cuda.Stream()
            self._load = torch.zeros(_LOAD, device='cuda')
            _, self._each = timed(lambda: self._queue(20), device)

    def _queue(self, count: int) -> None:
        with torch.cuda.stream(self._stream):
            for _ in range(count):
                self._load.add_(1)

    def expect(self, milliseconds: float) -> None:
        """A repetition takes about so long."""
        self._milliseconds = milliseconds

    @contextlib.contextmanager
    def around(self, repetition: int) -> Iterator[None]:
        """Disturb what runs in the block if ``repetition``, from 1, is odd."""
        if self._load is None or not repetition % 2:
            yield
            return
        taken: List[torch.Tensor] = [torch.empty(512 * (1 + repetition % 13) + repetition,
                                                 device='cuda') for _ in range(repetition % 5)]
        settings = getattr(torch.utils, 'deterministic', None)  # torch 2.0 and 2.1 have none
        before = getattr(settings, 'fill_uninitialized_memory', None)
        each = max(self._each / 20, 1e-3)
        self._queue(min(_MOST, int(2 * self._milliseconds / each) + 20))
        try:
            if before is not None:
                settings.fill_uninitialized_memory = repetition % 4 == 3
            yield
        finally:
            if before is not None:
                settings.fill_uninitialized_memory = before
            del taken
            torch.cuda.synchronize()
