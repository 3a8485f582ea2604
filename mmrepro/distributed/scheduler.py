"""Virtual ranks as threads, of which exactly one runs at a time: the one that has the baton.

State of the process of which each rank has its own is exchanged with the baton. State that torch or
mmrepro keep for each thread needs no exchange: a rank has a thread.
"""
from __future__ import annotations

import contextvars
import copy
import functools
import os
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Callable

import numpy as np
import torch
from mmengine.utils import ManagerMixin

from .. import seeds
from ..errors import CollectiveMismatch, Deadlock, VirtualRanksError
from ..util.libraries import belongs_to_user

# module and variable
MODULE_STATE: tuple[tuple[str, str], ...] = (
    ('mmengine.dist.utils', '_LOCAL_PROCESS_GROUP'),
    # on while a model is built, where ranks may meet
    ('torch.utils.deterministic', 'fill_uninitialized_memory'),
    ('sys', 'stdout'),
    # of `catch_warnings`
    ('warnings', 'filters'), ('warnings', 'showwarning'), ('warnings', '_showwarnmsg_impl'),
)
# Flags of torch that a block may change, and ranks may meet inside of it: module, attribute or
# function that tells the value, function that changes it.
FLAGS: tuple[tuple[Any, str, str], ...] = (
    *((backend, name, '') for backend, names in (
        (torch.backends.cudnn, ('enabled', 'benchmark', 'deterministic')),
        (torch.backends.mkldnn, ('enabled', 'deterministic'))) for name in names),
    *((torch.backends.cuda, f'{name}_sdp_enabled', f'enable_{name}_sdp')
      for name in ('flash', 'mem_efficient', 'math', 'cudnn')),
    (torch, 'get_deterministic_debug_mode', 'set_deterministic_debug_mode'),
)
# variables that a launcher sets, and user code reads
LAUNCHED: tuple[str, ...] = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')

# the user's classes of which each rank has its own attributes -> attributes at the start
_classes: dict[type, dict[str, Any]] = {}


def isolate_class_attributes(objects: Iterable[Any]) -> None:
    """Give each rank its own attributes of the classes of ``objects``."""
    for cls in {cls for instance in objects for cls in type(instance).__mro__}:
        if belongs_to_user(cls.__module__):
            _classes.setdefault(cls, dict(vars(cls)))


def managers() -> list[type[ManagerMixin]]:
    """Return MMEngine's classes that keep instances by name: loggers, message hubs, scopes."""
    classes = [ManagerMixin]
    for cls in classes:  # grows meanwhile
        classes += cls.__subclasses__()
    return classes


@functools.cache
def _nowhere() -> Any:
    return open(os.devnull, 'w', encoding='utf-8')


def _accelerator() -> torch.Generator | None:
    """Return the generator of the device in use, where there is one."""
    if torch.cuda.is_initialized():
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return None


def _flags() -> list[Any]:
    """Return the values of :data:`FLAGS`; None where this torch does not have one."""
    values = (getattr(owner, tell, None) for owner, tell, _ in FLAGS)
    return [value() if callable(value) else value for value in values]


class ProcessState:
    """The state of one rank while another rank runs."""

    def __init__(self) -> None:
        self._generators = seeds.capture_rng(accelerators=False)
        self._dtype = torch.get_default_dtype()
        generator = _accelerator()
        self._device = None if generator is None else generator.get_state()
        self._modules: dict[tuple[str, str], Any] = {
            (module, name): getattr(sys.modules[module], name) for module, name in MODULE_STATE
            if hasattr(sys.modules.get(module), name)}
        self._flags = _flags()
        self._instances = {cls: cls._instance_dict for cls in managers()}
        self._environment = {name: os.environ.get(name) for name in LAUNCHED}
        self._classes = {cls: dict(vars(cls)) for cls in _classes}

    def restore(self) -> None:
        """Bring the state back into force."""
        seeds.restore_rng(self._generators)
        torch.set_default_dtype(self._dtype)
        generator = _accelerator()
        if generator is not None and self._device is not None:
            generator.set_state(self._device)
        for module, name in MODULE_STATE:
            if hasattr(sys.modules.get(module), name):
                # None, the initial value, if another rank was the first to import the module
                setattr(sys.modules[module], name, self._modules.get((module, name)))
        for (owner, tell, change), now, value in zip(FLAGS, _flags(), self._flags):
            if now != value and change:
                getattr(owner, change)(value)
            elif now != value:
                setattr(owner, tell, value)
        for cls in managers():
            # no instance yet of a class that another rank was the first to import
            cls._instance_dict = self._instances.setdefault(cls, type(cls._instance_dict)())
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        for cls, start in _classes.items():
            before, now = self._classes.get(cls, start), dict(vars(cls))
            for name in now.keys() - before.keys():
                delattr(cls, name)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    setattr(cls, name, value)

    def end(self) -> None:
        """Restore the state when all ranks have ended. Flags that the run has set stay."""
        self._flags = _flags()
        self.restore()
        _classes.clear()

    def of_rank(self, number: int, world_size: int) -> ProcessState:
        """Return a copy for a rank that begins.

        Its environment says that all ranks run on one machine: a process may have any of them.
        Its flags are those in force then, which modules may have set that an earlier rank imported.
        """
        state = copy.copy(self)
        state._flags = []
        state._modules = dict(self._modules)
        if number:  # only the first rank prints
            state._modules['sys', 'stdout'] = _nowhere()
        state._environment = {name: str(world_size if name.endswith('SIZE') else number)
                              for name in LAUNCHED}
        state._instances = {cls: copy.copy(value) for cls, value in self._instances.items()}
        return state


POLL = 0.001  # seconds between two looks at the exchanges of several sub-groups


class RankStopped(BaseException):
    """Raised in the surviving virtual ranks of a process after one of them has failed."""


class VirtualRank:
    """One rank of a process."""

    def __init__(self, number: int, scheduler: Scheduler) -> None:
        self.number, self.scheduler = number, scheduler
        self.baton = threading.Event()  # set while the rank may run
        self.over = threading.Event()  # set when its thread ends
        self.ready: Callable[[], bool] | None = None  # the condition it waits for
        self.work: Any = None  # the operation of several processes it waits for
        self.where = ''  # the name of what it waits in
        self.ended = ''  # how it has ended; '' before
        self.world: Any = None  # its state of torch.distributed
        self.state: Any = None  # its ProcessState while another rank runs
        self.result: Any = None

    def may_run(self) -> bool:
        """Whether the condition holds. An error of ``ready`` ends all ranks of the process."""
        if self.scheduler.failed is not None:
            return True
        try:
            return self.work is None and (self.ready is None or self.ready())
        except BaseException as error:
            self.scheduler.fail(error, self.number)
            return True


class Meeting:
    """A collective operation that some ranks of this process have come to.

    ``operation.add(index, value)`` is called as ranks come, and ``operation.finish()`` when all
    ranks of this process have come, in the thread of the last one.
    """

    def __init__(self, name: str, operation: Any) -> None:
        self.name, self.operation = name, operation
        self.present: list[int] = []
        self.ended = False
        self.result: Any = None


def _like_this_thread(function: Callable[..., None]) -> Callable[..., None]:
    """Return ``function`` for another thread, with what holds for the calling thread alone.

    These are context variables, NumPy's handling of errors, and torch's gradient mode and default
    device.
    """
    context, errors = contextvars.copy_context(), np.geterr()
    inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    device_of: Any = getattr(torch, 'get_default_device', str)  # torch 2.3
    device = device_of()

    def run(*args: Any) -> None:
        np.seterr(**errors)
        if device_of() != device:
            torch.set_default_device(device)
        with torch.inference_mode() if inference else torch.set_grad_enabled(gradients):
            function(*args)

    return functools.partial(context.run, run)


_thread = threading.local()  # `rank`: the virtual rank whose thread this is


class Baton:
    """Hands the baton from thread to thread. Every choice between ranks is made here.

    There are several schedulers, one for each process, only in simulations.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = list(schedulers)
        for scheduler in self.schedulers:
            scheduler.baton = self

    @property
    def ranks(self) -> list[VirtualRank]:
        return [rank for scheduler in self.schedulers for rank in scheduler.ranks]

    def running(self) -> VirtualRank | None:
        """Return the rank of the calling thread; in other threads, the rank that has the baton."""
        return getattr(_thread, 'rank', None) or next(
            (rank for rank in self.ranks if rank.baton.is_set() and not rank.ended), None)

    def run(self, function: Callable[[], Any]) -> None:
        """Call ``function`` in every rank, and wait until all ranks have ended."""
        start = ProcessState()
        for rank in self.ranks:
            rank.state = start.of_rank(rank.number, rank.scheduler.world_size)
        # the lowest rank in this thread: only the main thread receives signals
        first, *others = self.ranks
        threads = [threading.Thread(
            target=_like_this_thread(self._in_thread), args=(rank, function),
            name=f'virtual rank {rank.number}') for rank in others]
        try:
            started = self._start(threads)
            if started < len(threads):  # waiting threads are stopped, as after any error
                for rank in others[started:]:
                    rank.ended = 'was not started'
            first.baton.set()
            self._main(first, function)
            for rank, thread in zip(others, threads[:started]):
                self._await_end(rank)
                thread.join()
        finally:
            _thread.rank = None
            start.end()

    def _start(self, threads: Sequence[threading.Thread]) -> int:
        """Start the threads; return how many have, which are all unless the ranks have failed."""
        for number, thread in enumerate(threads):
            try:
                thread.start()
            except BaseException as error:
                if isinstance(error, RuntimeError):  # Python's word for a limit of the system
                    reason = VirtualRanksError(
                        f'{thread.name} is a thread, and no more can be started in this process '
                        f'({error}). Allow more (`ulimit -u`, pids.max of the container or job), '
                        'or start more processes, each with fewer virtual ranks')
                    reason.__cause__ = error
                    error = reason
                for scheduler in self.schedulers:
                    scheduler.fail(error)
                return number
        return len(threads)

    def _in_thread(self, rank: VirtualRank, function: Callable[[], Any]) -> None:
        try:
            self._main(rank, function)
        finally:
            rank.over.set()

    def _await_end(self, rank: VirtualRank) -> None:
        # a signal ends Thread.join too early, and no wait where the system gives it to a rank
        while not rank.over.is_set():
            try:
                rank.over.wait(1.)
            except BaseException as error:  # a signal's handler raised while another rank runs
                rank.scheduler.fail(error)

    def _main(self, rank: VirtualRank, function: Callable[[], Any]) -> None:
        _thread.rank = rank
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
            following.baton.set()

    def wait(self, rank: VirtualRank) -> None:
        """Let other ranks run until this one is chosen again."""
        following = self._choose()
        if following is None or following is rank:
            return
        rank.state = ProcessState()
        rank.baton.clear()
        following.baton.set()
        self._sleep(rank)
        rank.state.restore()
        rank.state = None

    def _sleep(self, rank: VirtualRank) -> None:
        while not rank.baton.is_set():
            try:
                rank.baton.wait()
            except BaseException as error:  # a signal's handler raised while another rank runs
                rank.scheduler.fail(error, rank.number)

    def _choose(self) -> VirtualRank | None:
        """Return the rank that runs next; None when all ranks have ended."""
        while True:
            alive = [rank for rank in self.ranks if not rank.ended]
            if not alive:
                return None
            chosen = self.pick(rank for rank in alive if rank.may_run())
            if chosen is None:
                chosen = self.pick_waiting([rank for rank in alive if rank.work is not None])
            if chosen is not None:
                return chosen

    def pick(self, ready: Iterator[VirtualRank]) -> VirtualRank | None:
        """Choose among the ranks that may run: the lowest; None if there is none."""
        return next(ready, None)

    def pick_waiting(self, waiting: Sequence[VirtualRank]) -> VirtualRank | None:
        """Choose among the ranks that wait for other processes, when no other rank may run.

        If there is none, the ranks wait for each other and have failed.
        """
        if not waiting:
            for scheduler in self.schedulers:
                scheduler.fail(Deadlock('the virtual ranks of this process wait for each other, or '
                                        'for one that has ended:' + scheduler.places()))
            return None
        if len(waiting) == 1:
            return waiting[0]
        # several sub-groups: any of them may be completed first
        time.sleep(POLL)
        return next((rank for rank in waiting if rank.work.is_completed()), None)


class Scheduler:
    """The virtual ranks of one process, by their numbers, and their collective operations."""

    def __init__(self, numbers: Sequence[int], world_size: int, processes: int = 1) -> None:
        self.ranks = [VirtualRank(number, self) for number in numbers]
        self.world_size, self.processes = world_size, processes
        self.baton: Any = None  # hands itself to one of these ranks at a time
        self.failed: BaseException | None = None
        self.failed_rank: int | None = None
        self._meetings: dict[Hashable, Meeting] = {}

    @property
    def me(self) -> VirtualRank:
        """The rank of the calling thread.

        Raises:
            VirtualRanksError: the thread is not a rank's; names it, and ends all ranks.
        """
        rank: VirtualRank | None = getattr(_thread, 'rank', None)
        if rank is None:
            error = VirtualRanksError(
                f'the thread {threading.current_thread().name!r} is not the thread of a virtual '
                'rank, and came to a collective operation. Communicate in the thread that trains, '
                'or train without randomness.virtual_ranks')
            self.fail(error)  # the error ends the thread, and a rank may go on without its result
            raise error
        return rank

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """End all ranks: each raises RankStopped where it waits, or when it next waits."""
        if self.failed is None:
            self.failed, self.failed_rank = error, rank

    def wait(self, ready: Callable[[], bool], where: str) -> None:
        """Let other ranks run until ``ready()``.

        Args:
            ready: Called in the thread of any rank, with that rank's state in force: it must not
                depend on the state, and change nothing.
            where: Named in the message of a deadlock.

        Raises:
            RankStopped: the ranks of this process were stopped meanwhile.
        """
        rank = self.me
        rank.ready, rank.where = ready, where
        self.baton.wait(rank)
        rank.ready = None
        if self.failed is not None:
            raise RankStopped

    def places(self) -> str:
        """Return where each rank waits, or how it has ended, in a line each."""
        return ''.join(f'\n  virtual rank {rank.number} {rank.ended or f"waits in {rank.where}"}'
                       for rank in self.ranks)

    def meet(self, key: Hashable, count: int, name: str, index: int,
             contribute: Callable[[], Any], begin: Callable[[], Any]) -> Any:
        """Take part in a collective operation: wait for the ranks of this process, then for all.

        Args:
            key: Of the process group; at most one meeting of it is open at a time.
            count: Members of the group in this process.
            name: Of the operation, the same on all ranks.
            index: Of this rank in the group.
            contribute: Returns the value of this rank. Only the operation refers to it, so that it
                can be freed while this rank waits.
            begin: Makes the operation, see :class:`Meeting`.

        Returns:
            The result of the operation, the same object for all ranks.

        Raises:
            CollectiveMismatch: another rank has come to another operation.
            RuntimeError: the calling thread is not a rank's.
        """
        rank = self.me
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting(name, begin())
        if meeting.name != name:
            raise CollectiveMismatch(
                f'virtual rank {rank.number} has come to {name}, virtual rank '
                f'{meeting.present[0]} waits in {meeting.name}')
        meeting.operation.add(index, contribute())
        meeting.present.append(rank.number)
        rank.where = name
        if len(meeting.present) == count:
            del self._meetings[key]
            operation, meeting.operation = meeting.operation, None
            meeting.result, meeting.ended = operation.finish(), True
        self.wait(lambda: meeting.ended, name)
        return meeting.result


def current() -> Scheduler | None:
    """Return the scheduler of this process if the calling thread is a virtual rank's; else None."""
    rank: VirtualRank | None = getattr(_thread, 'rank', None)
    return None if rank is None else rank.scheduler


def wait_for_processes(work: Any) -> None:
    """Let other ranks run until ``work`` of several processes is done: ``work.is_completed()``.

    ``work.wait()`` raises RuntimeError if a process has ended.

    Raises:
        RankStopped: as :meth:`Scheduler.wait`. If a process has ended, all ranks of this process
            end with an error that says where each waits.
    """
    rank: VirtualRank = _thread.rank
    scheduler = rank.scheduler
    rank.work = work
    scheduler.baton.wait(rank)
    rank.work = None
    if scheduler.failed is None:
        try:
            work.wait()
        except RuntimeError as error:
            lost = RuntimeError(f'{error}\nOf this process:{scheduler.places()}')
            lost.__cause__ = error
            scheduler.fail(lost)
    if scheduler.failed is not None:
        raise RankStopped
