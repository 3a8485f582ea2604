"""Virtual ranks as threads, of which exactly one runs at a time."""
from __future__ import annotations

import threading
import time
from collections.abc import Generator, Hashable, Iterator, Sequence
from typing import Any, Callable

import torch

from ...errors import CollectiveMismatch, Deadlock
from .process_state import ProcessState

# yields work with other processes (`is_completed()`, `wait()`), returns the result
Exchange = Generator[Any, None, Any]

POLL = 0.001  # seconds between two looks at exchanges of several sub-groups


class RankStopped(BaseException):
    """Raised in the virtual ranks of a process of which another one has ended with an error."""


class VirtualRank:
    """One rank of a process."""

    def __init__(self, number: int, scheduler: Scheduler) -> None:
        self.number, self.scheduler = number, scheduler
        self.turn = threading.Event()  # set while it may run
        self.ready: Callable[[], bool] | None = None  # what it waits for; None: nothing
        self.where = ''  # it waits
        self.ended = ''  # how
        self.trainings = 0  # that it has begun
        self.state: ProcessState | None = None
        self.result: Any = None

    def may_run(self) -> bool:
        """Whether it need not wait any longer. An error of ``ready`` ends all ranks."""
        if self.scheduler.failed is not None or self.ready is None:
            return True
        try:
            return self.ready()
        except BaseException as error:
            self.scheduler.fail(error, self.number)
            return True


class Meeting:
    """Ranks of one process that have come to one collective operation."""

    def __init__(self, name: str, operation: Any) -> None:
        self.name, self.operation = name, operation
        self.present: list[int] = []
        self.steps: Exchange | None = None
        self.work: Any = None  # of the exchange with other processes, under way
        self.ended = False
        self.result: Any = None


_local = threading.local()  # `rank`: whose thread this is
_running = False


class Turns:
    """Hands the turn from thread to thread. Every choice between ranks is made here.

    Args:
        schedulers: Of the processes whose ranks are threads here: one, except in simulations.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = list(schedulers)
        for scheduler in self.schedulers:
            scheduler.turns = self

    def run(self, function: Callable[[], Any], world_of: Callable[[int], Any]) -> None:
        """Call ``function`` in every rank, and wait until all ranks have ended.

        Args:
            world_of: Number of a rank -> its ``torch.distributed`` world.
        """
        global _running
        if _running:
            raise RuntimeError('virtual ranks run in this process already')
        start = ProcessState()
        ranks = [rank for scheduler in self.schedulers for rank in scheduler.ranks]
        for rank in ranks:
            rank.state = start.of_rank(rank.number, world_of(rank.number))
        # the lowest one in this thread: only the main thread gets signals
        first, *others = ranks
        threads = [threading.Thread(target=self._main, args=(rank, function),
                                    name=f'virtual rank {rank.number}') for rank in others]
        _running = True
        try:
            for thread in threads:
                thread.start()
            first.turn.set()
            self._main(first, function)
            for thread in threads:
                thread.join()
        finally:
            _running, _local.rank = False, None
            start.end()

    def _main(self, rank: VirtualRank, function: Callable[[], Any]) -> None:
        _local.rank = rank
        scheduler = rank.scheduler
        self._sleep(rank)
        try:
            rank.state.restore()
            rank.state = None
            if scheduler.failed is None:
                # in this thread: collectives in a backward pass have to hand over as well
                with torch.autograd.set_multithreading_enabled(False):
                    rank.result = function()
            rank.ended = 'has ended'
        except RankStopped:
            rank.ended = 'was stopped'
        except BaseException as error:
            rank.ended = f'has ended with {type(error).__name__}: {error}'
            if not (isinstance(error, SystemExit) and not error.code):
                scheduler.fail(error, rank.number)
        following = self._choose()
        if following is not None:
            following.turn.set()

    def wait(self, me: VirtualRank) -> None:
        """Let others run until ``me.may_run()`` and it is chosen."""
        following = self._choose()
        if following is me:
            return
        me.state = ProcessState()
        me.turn.clear()
        following.turn.set()
        self._sleep(me)
        me.state.restore()
        me.state = None

    def _sleep(self, me: VirtualRank) -> None:
        while not me.turn.is_set():
            try:
                me.turn.wait()
            except BaseException as error:  # of a signal's handler, while another rank runs
                me.scheduler.fail(error, me.number)

    def _choose(self) -> VirtualRank | None:
        """The rank that runs next; None when all have ended."""
        while True:
            waiting = [rank for scheduler in self.schedulers for rank in scheduler.ranks
                       if not rank.ended]
            if not waiting:
                return None
            chosen = self.pick(rank for rank in waiting if rank.may_run())
            if chosen is not None:
                return chosen
            self.progress()

    def pick(self, ready: Iterator[VirtualRank]) -> VirtualRank | None:
        """Choose one of the ranks that may run: the lowest; None: there is none."""
        return next(ready, None)

    def progress(self) -> None:
        """Finish something that ranks wait for, when no rank may run."""
        for scheduler in self.schedulers:
            scheduler.progress()


class Scheduler:
    """The virtual ranks of one process, and their collective operations.

    Args:
        numbers: The ranks of this process.
        world_size: V, the number of ranks of all processes.
        processes: N.
    """

    def __init__(self, numbers: Sequence[int], world_size: int, processes: int = 1) -> None:
        self.ranks = [VirtualRank(number, self) for number in numbers]
        self.world_size, self.processes = world_size, processes
        self.turns: Turns | None = None
        self.failed: BaseException | None = None
        self.failed_rank: int | None = None
        self._meetings: dict[Hashable, Meeting] = {}
        # by number of a training: what its lowest rank gives to the others of the process
        self.shared: dict[int, Any] = {}

    @property
    def me(self) -> VirtualRank:
        """The rank of the calling thread.

        Raises:
            RuntimeError: the thread is not a rank's; names it, and ends all ranks.
        """
        rank = getattr(_local, 'rank', None)
        if rank is None:
            error = RuntimeError(
                f'the thread {threading.current_thread().name!r} is not the thread of a virtual '
                'rank, and came to a collective operation. Communicate in the thread that trains, '
                'or train without randomness.virtual_ranks')
            self.fail(error)  # the thread ends with it, and a rank may go on without its result
            raise error
        return rank

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """End all ranks: each raises RankStopped where it waits, or when it next waits."""
        if self.failed is None:
            self.failed, self.failed_rank = error, rank

    def wait(self, ready: Callable[[], bool], where: str) -> None:
        """Let other ranks run until ``ready()``.

        Args:
            ready: Asked in whatever thread has the turn, with the state of another rank in force:
                it must depend on neither, and change nothing.
            where: For the message when nobody can go on.

        Raises:
            RankStopped: the ranks of this process were stopped meanwhile.
        """
        me = self.me
        me.ready, me.where = ready, where
        try:
            self.turns.wait(me)
        finally:
            me.ready = None
        if self.failed is not None:
            raise RankStopped

    def pending(self) -> list[Meeting]:
        """Meetings that wait for other processes."""
        return [meeting for meeting in self._meetings.values() if meeting.work is not None]

    def progress(self) -> None:
        """Finish an exchange with other processes; if there is none, the ranks have failed."""
        pending = self.pending()
        if len(pending) > 1:
            # of several sub-groups, the other processes may finish any one first
            pending = [meeting for meeting in pending if meeting.work.is_completed()][:1]
            if not pending:
                time.sleep(POLL)
                return
        try:
            if not pending:
                raise Deadlock('the virtual ranks of this process wait for each other, or for one '
                               'that has ended:' + self.places())
            self.advance(pending[0])
        except BaseException as error:
            self.fail(error)

    def places(self) -> str:
        """Where each rank waits, or how it has ended, in a line each."""
        return ''.join(f'\n  virtual rank {rank.number} {rank.ended or f"waits in {rank.where}"}'
                       for rank in self.ranks)

    # ---------------------------------------------------------------------------- meeting

    def meet(self, key: Hashable, count: int, name: str, index: int, value: Any,
             begin: Callable[[], Any]) -> Any:
        """A collective operation: wait for the other ranks of this process, then for all.

        Args:
            key: Of the process group; at most one meeting of it is open at a time.
            count: Members of the group in this process.
            name: Of the operation, the same on all ranks.
            index: Of this rank in the group.
            value: Of this rank.
            begin: Makes the operation: an object with ``add(index, value)``, called as ranks come,
                and ``finish()``, an :data:`Exchange`, called when all have.

        Returns:
            The result of ``finish``, the same object for all ranks.

        Raises:
            CollectiveMismatch: another rank has come to another operation.
            RuntimeError: the calling thread is not a rank's.
        """
        me = self.me
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(name, begin())
        if meeting.name != name:
            raise CollectiveMismatch(
                f'virtual rank {me.number} has come to {name}, virtual rank '
                f'{meeting.present[0]} waits in {meeting.name}')
        meeting.operation.add(index, value)
        meeting.present.append(me.number)
        del value  # the operation may let go of it early
        if len(meeting.present) == count:
            meeting.steps = meeting.operation.finish()
            meeting.operation = None
            me.where = name
            self.advance(meeting)
        self.wait(lambda: meeting.ended, name)
        return meeting.result

    def advance(self, meeting: Meeting) -> None:
        """Go on with the exchange of a meeting, until it has to wait for other processes.

        Raises:
            RuntimeError: another process has ended; says where the ranks of this one wait.
        """
        if meeting.work is not None:
            try:
                meeting.work.wait()
            except RuntimeError as error:
                raise RuntimeError(f'{error}\nOf this process:{self.places()}') from error
        try:
            meeting.work = next(meeting.steps)
        except StopIteration as end:
            meeting.result, meeting.ended, meeting.work = end.value, True, None
            self._meetings = {key: one for key, one in self._meetings.items() if one is not meeting}


def current() -> Scheduler | None:
    """The scheduler of this process if the calling thread is a virtual rank's; else None."""
    rank = getattr(_local, 'rank', None)
    return None if rank is None else rank.scheduler
