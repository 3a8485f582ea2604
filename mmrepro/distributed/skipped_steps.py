"""A rank that takes no step in an iteration in which other ranks take one.

Such a rank would go on, and its next gradients would be added to those of an earlier iteration. The
other ranks wait for its gradients in their backward passes, which nothing interrupts. So a thread
of each process polls the store of the process group for ranks without a step, and answers for the
ranks of this process that take a step.
"""
from __future__ import annotations

import itertools
import math
import sys
import threading
import time
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist
from mmengine.dist import get_rank, get_world_size
from torch.distributed import distributed_c10d as c10d

from ..errors import AgreementError
from .scheduler import current

LOOK = 0.5  # seconds between two looks into the store
FIRST = 100  # iterations in which ranks ask though no step was counted yet
ALONE = 30.  # seconds without a sign of the other processes, which are in the same iteration

_trainings = itertools.count()  # of this process, the same in all processes of a run


class _Process:
    """The ranks of this process that train."""

    def __init__(self, codes: set[CodeType], store: Any) -> None:
        self.threads: dict[int, int] = {}  # rank -> its thread
        self.ended: dict[int, int] = {}  # rank -> the last iteration that it has ended
        self.without: dict[int, set[int]] = {}  # iteration -> ranks that have ended it without one
        self._codes = codes  # of the backward passes that lead to a step
        number = next(_trainings)
        self.store = None if store is None else dist.PrefixStore(f'mmrepro/steps{number}', store)
        self._closed = threading.Event()
        if self.store is not None:
            threading.Thread(target=self._look, name='mmrepro: steps of other ranks',
                             daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def without_step(self, iteration: int) -> set[int]:
        """Return the ranks that have ended an iteration without a step."""
        return self.without.get(iteration, set())

    def with_step(self, iteration: int) -> int | None:
        """Return a rank that takes a step in this iteration, or has; None if none does by now."""
        frames = sys._current_frames()
        for rank, ended in list(self.ended.items()):
            if rank in self.without_step(iteration):
                continue
            if ended >= iteration or ended + 1 == iteration and self._in_backward(
                    frames.get(self.threads.get(rank, 0))):
                return rank
        return None

    def _in_backward(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._codes:
                return True
            frame = frame.f_back
        return False

    def all_without(self, iteration: int) -> bool:
        return self.without_step(iteration).issuperset(self.threads)

    def _look(self) -> None:
        """Answer ranks of other processes that are without a step."""
        store: Any = self.store
        answered = -1
        while not self._closed.wait(LOOK):
            try:
                iteration = int(store.get('asked')) if store.check(['asked']) else -1
                if iteration == answered:
                    continue
                rank = self.with_step(iteration)
                if rank is not None:
                    store.set(f'{iteration}/with', str(rank))
                if rank is not None or self.all_without(iteration):
                    answered = iteration
                store.add(f'{iteration}/signs', 1)  # this process is alive
            except RuntimeError:  # the store has gone with the process that kept it: the run ends
                return

    def ask(self, rank: int, iteration: int) -> None:
        """Wait until all ranks have ended an iteration without a step; those of this process have.

        Raises:
            AgreementError: another rank takes one; or has given no sign for long.
        """
        store: Any = self.store
        keys = {other: f'{iteration}/without{other}' for other in range(get_world_size())}
        for mine in self.without_step(iteration):  # the others of this process wait meanwhile
            store.set(keys[mine], '')
        store.set('asked', str(iteration))
        signs, end, pause = 0, time.monotonic() + ALONE, 0.001
        while True:
            if store.check([f'{iteration}/with']):
                raise AgreementError(_text(rank, iteration, int(store.get(f'{iteration}/with'))))
            if store.check(list(keys.values())):
                return
            seen = store.add(f'{iteration}/signs', 0)
            if seen != signs:
                signs, end = seen, time.monotonic() + ALONE
            elif time.monotonic() > end:
                missing = [other for other, key in keys.items() if not store.check([key])]
                raise AgreementError(_text(rank, iteration, None) + (
                    f'. For {ALONE:g} s there is no sign of rank '
                    f'{", ".join(map(str, missing))}'))
            time.sleep(pause)
            pause = min(2 * pause, LOOK / 5)


def _store() -> Any:
    """Return the store that all processes of the run can read and write; None without one."""
    store = c10d._get_default_store()
    inner = store
    while hasattr(inner, 'underlying_store'):
        inner = inner.underlying_store
    return None if inner is None or isinstance(inner, dist.HashStore) else store


def _text(rank: int, iteration: int, other: int | None) -> str:
    text = (f'rank {rank} takes no step of the optimizer in iteration {iteration} (counted from 0; '
            'is its loss not finite?)')
    return text if other is None else (
        f'{text}, and rank {other} takes one. A step is taken or left out on all ranks: decide it '
        'from a value that was reduced over them')


_processes: dict[Any, _Process] = {}  # by the scheduler of its virtual ranks, or None


class StepsTaken:
    """Notices that this rank takes no step in an iteration in which other ranks take one.

    A rank without a step waits for all others to say the same. All ranks make one when their
    training begins.

    Args:
        wrappers: The optimizer wrappers, whose ``backward`` leads to a step.
        iteration: The first of the training.
    """

    def __init__(self, wrappers: Iterable[Any], iteration: int) -> None:
        self._rank, self._key = get_rank(), current()
        self._wrappers = list(wrappers)
        self._seen = 0
        self._tries: float = FIRST  # if wrappers never count losses, ranks need not ask for ever
        self._process: _Process | None = None
        if get_world_size() > 1:
            codes = {vars(cls)['backward'].__code__ for wrapper in self._wrappers
                     for cls in type(wrapper).__mro__
                     if hasattr(vars(cls).get('backward'), '__code__')}
            if self._key not in _processes:
                _processes[self._key] = _Process(codes, _store())
            self._process = _processes[self._key]
            self._process.threads[self._rank] = threading.get_ident()
            self._process.ended[self._rank] = iteration - 1

    def close(self) -> None:
        """End with the training. May be called several times."""
        process, self._process = self._process, None
        if process is not None:
            process.ended.pop(self._rank, None)
            process.threads.pop(self._rank, None)
            if not process.threads and _processes.get(self._key) is process:
                del _processes[self._key]
                process.close()

    def _count(self) -> int:
        """Return the losses that the optimizers have seen, on this rank."""
        count = 0
        for wrapper in self._wrappers:
            count += wrapper._inner_count
        return count

    def begin_epoch(self) -> None:
        """Count anew: a checkpoint or a hook may have set the counts of the wrappers."""
        self._seen = self._count()

    def end(self, iteration: int) -> None:
        """Compare the steps after an iteration.

        Raises:
            AgreementError: other ranks take a step, or took none; names one of them.
        """
        process = self._process
        if process is None:
            return
        count = self._count()  # every iteration comes here: nothing else is asked in most of them
        if count != self._seen:
            self._seen, self._tries = count, math.inf
            process.ended[self._rank] = iteration
            if process.without:
                for other in process.without_step(iteration):
                    raise AgreementError(_text(other, iteration, self._rank))
        elif self._tries > 0:
            self._tries -= 1
            self._ask(process, iteration)

    def _ask(self, process: _Process, iteration: int) -> None:
        process.without.setdefault(iteration, set()).add(self._rank)
        process.ended[self._rank] = iteration
        if self._key is not None:
            self._key.wait(lambda: process.all_without(iteration) or process.with_step(
                iteration) is not None, f'the end of iteration {iteration} without a step')
        other = process.with_step(iteration)
        if other is not None:
            raise AgreementError(_text(self._rank, iteration, other))
        if process.store is not None:
            process.ask(self._rank, iteration)
