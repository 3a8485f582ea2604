"""Virtual ranks of one process as threads, of which exactly one runs at a time."""
from __future__ import annotations

import threading
import time
from typing import Any, Callable, Dict, Generator, Hashable, List, Optional, Sequence

import torch

from .process_state import ProcessState

__all__ = ['CollectiveMismatch', 'Deadlock', 'Exchange', 'Meeting', 'RankStopped', 'Scheduler',
           'VirtualRank', 'current']

# yields what has to be waited for (``wait()``), returns the result
Exchange = Generator[Any, None, Any]

POLL = 0.001  # seconds between two looks at other processes, when no rank here can go on


class RankStopped(BaseException):
    """Raised in the virtual ranks of a process of which another one has ended with an error."""


class Deadlock(RuntimeError):
    """Virtual ranks wait for one that has ended, or for each other; says who waits where."""


class CollectiveMismatch(RuntimeError):
    """Virtual ranks have come to different collective operations; says which rank to which."""


class VirtualRank:
    """One rank of a process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.turn = False  # whether it may run; its lock is released when that becomes true
        self.lock = threading.Lock()
        self.lock.acquire()
        self.ready: Optional[Callable[[], bool]] = None  # what it waits for; None: nothing
        self.where = ''  # it waits
        self.outside = False  # it waits for something that another process may do
        self.ended = ''  # how
        self.trainings = 0  # that it has begun
        self.state: Optional[ProcessState] = None
        self.result: Any = None


class Meeting:
    """Ranks of one process that have come to one collective operation."""

    def __init__(self, name: str, operation: Any) -> None:
        self.name, self.operation = name, operation
        self.present: List[int] = []
        self.steps: Optional[Exchange] = None
        self.work: Any = None  # of the exchange with other processes, under way
        self.ended = False
        self.result: Any = None


_running: Optional[Scheduler] = None


class Scheduler:
    """Runs a function once per virtual rank of this process.

    Args:
        numbers: The ranks of this process.
        world_size: V, the number of ranks of all processes.
        processes: N.
    """

    def __init__(self, numbers: Sequence[int], world_size: int, processes: int = 1) -> None:
        self.ranks = [VirtualRank(number) for number in numbers]
        self.world_size, self.processes = world_size, processes
        self.failed: Optional[BaseException] = None
        self.failed_rank: Optional[int] = None
        self._meetings: Dict[Hashable, Meeting] = {}
        # by number of a training: what its lowest rank gives to the others of the process
        self.shared: Dict[int, Any] = {}
        self._local = threading.local()

    @property
    def me(self) -> Optional[VirtualRank]:
        """The rank of the calling thread; None in a thread that is not a rank's."""
        return getattr(self._local, 'rank', None)

    # ---------------------------------------------------------------------------- running

    def run(self, function: Callable[[], Any], world_of: Callable[[int], Any]) -> List[Any]:
        """Call ``function`` in every rank; returns the results in the order of the ranks.

        Args:
            world_of: Number of a rank -> its ``torch.distributed`` world.

        Raises:
            BaseException: the first one that a rank raised; all ranks have ended then.
        """
        global _running
        if _running is not None:
            raise RuntimeError('virtual ranks run in this process already')
        start = ProcessState()
        for rank in self.ranks:
            rank.state = start.of_rank(rank.number, world_of(rank.number))
        # the lowest one in this thread: only the main thread gets signals
        first, *others = self.ranks
        threads = [threading.Thread(target=self._main, args=(rank, function),
                                    name=f'virtual rank {rank.number}') for rank in others]
        _running = self
        try:
            for thread in threads:
                thread.start()
            first.turn = True
            self._main(first, function)
            for thread in threads:
                thread.join()
        finally:
            _running = None
            start.restore()
        if self.failed is not None:
            raise self.failed
        return [rank.result for rank in self.ranks]

    def _main(self, rank: VirtualRank, function: Callable[[], Any]) -> None:
        self._local.rank = rank
        self._sleep(rank)
        try:
            rank.state.restore()
            rank.state = None
            if self.failed is None:
                # in this thread: collectives in a backward pass have to hand over as well
                with torch.autograd.set_multithreading_enabled(False):
                    rank.result = function()
            rank.ended = 'has ended'
        except RankStopped:
            rank.ended = 'was stopped'
        except BaseException as error:
            rank.ended = f'has ended with {type(error).__name__}: {error}'
            if not (isinstance(error, SystemExit) and not error.code):
                self.fail(error, rank.number)
        following = self._choose()
        if following is not None:
            self._give(following)

    def fail(self, error: BaseException, rank: Optional[int] = None) -> None:
        """End all ranks: each raises RankStopped where it waits, or when it next waits."""
        if self.failed is None:
            self.failed, self.failed_rank = error, rank

    # ---------------------------------------------------------------------------- waiting

    def wait(self, ready: Callable[[], bool], where: str, outside: bool = False) -> None:
        """Let other ranks run until ``ready()``.

        Args:
            where: For the message when nobody can go on.
            outside: Another process may make it ready without a collective operation.

        Raises:
            RankStopped: the ranks of this process were stopped meanwhile.
        """
        me = self.me
        me.ready, me.where, me.outside = ready, where, outside
        try:
            following = self._choose()
            if following is not me:
                me.state = ProcessState()
                me.turn = False
                me.lock = threading.Lock()
                me.lock.acquire()
                self._give(following)
                self._sleep(me)
                me.state.restore()
                me.state = None
        finally:
            me.ready = None
        if self.failed is not None:
            raise RankStopped

    def _give(self, rank: VirtualRank) -> None:
        rank.turn = True
        rank.lock.release()

    def _sleep(self, me: VirtualRank) -> None:
        while not me.turn:
            try:
                me.lock.acquire()
            except BaseException as error:  # of a signal's handler, while another rank runs
                self.fail(error, me.number)

    def _choose(self) -> Optional[VirtualRank]:
        """The rank that runs next; None when all have ended."""
        while True:
            waiting = [rank for rank in self.ranks if not rank.ended]
            if not waiting:
                return None
            for rank in waiting:
                if self.failed is not None or rank.ready is None or rank.ready():
                    return rank
            try:
                self._progress(waiting)
            except BaseException as error:
                self.fail(error)

    def _progress(self, waiting: Sequence[VirtualRank]) -> None:
        """No rank can go on: finish an exchange with other processes, or find a deadlock."""
        pending = [meeting for meeting in self._meetings.values() if meeting.work is not None]
        if len(pending) == 1:
            self._advance(pending[0])
        elif pending:
            # of several sub-groups, the other processes may finish any one first
            for meeting in pending:
                if meeting.work.is_completed():
                    self._advance(meeting)
                    return
            time.sleep(POLL)
        elif self.processes > 1 and any(rank.outside for rank in waiting):
            time.sleep(POLL)
        else:
            raise Deadlock('the virtual ranks of this process wait for each other, or for one that '
                           'has ended:\n' + '\n'.join(
                               f'  virtual rank {rank.number} '
                               f'{rank.ended or f"waits in {rank.where}"}' for rank in self.ranks))

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
        """
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(name, begin())
        if meeting.name != name:
            raise CollectiveMismatch(
                f'virtual rank {self.me.number} has come to {name}, virtual rank '
                f'{meeting.present[0]} waits in {meeting.name}')
        meeting.operation.add(index, value)
        meeting.present.append(self.me.number)
        del value  # the operation may let go of it early
        if len(meeting.present) == count:
            meeting.steps = meeting.operation.finish()
            meeting.operation = None
            self._advance(meeting)
        self.wait(lambda: meeting.ended, name)
        return meeting.result

    def _advance(self, meeting: Meeting) -> None:
        """Go on with the exchange of a meeting, until it has to wait for other processes."""
        if meeting.work is not None:
            meeting.work.wait()
        try:
            meeting.work = next(meeting.steps)
        except StopIteration as end:
            meeting.result, meeting.ended, meeting.work = end.value, True, None
            self._meetings = {key: one for key, one in self._meetings.items() if one is not meeting}


def current() -> Optional[Scheduler]:
    """The scheduler of this process if the calling thread is a virtual rank's; else None."""
    return _running if _running is not None and _running.me is not None else None
