"""All processes of a run on virtual ranks as threads of this one, under one seeded order.

    world = Simulation(seed, ranks=4, processes=2, faults=...)
    outcome = world.run(main)        # `main` as for mmrepro.on_virtual_ranks

Which rank runs next, which message between processes arrives first, when a signal comes and when a
process is killed are choices of one generator. A seed therefore stands for one schedule, which it
replays. Processes have no sockets: :class:`Network` hands over bytes, and fails as gloo does when a
process has ended.
"""
from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmrepro.distributed.scheduler import Baton, Scheduler, VirtualRank
from mmrepro.errors import Deadlock
from mmrepro.virtual.entry import guarded
from mmrepro.virtual.world import Worlds

LIMIT = 20_000  # turns of a schedule


class ConnectionClosed(RuntimeError):
    """Another process has ended: gloo's error."""


class Killed(BaseException):
    """Ends the ranks of a process that is killed. They do nothing any more."""


class NoEnd(AssertionError):
    """A schedule did not end within :data:`LIMIT` turns."""


class Event(NamedTuple):
    """A signal to a process, or its kill."""
    turn: int  # before which it happens
    process: int
    apply: Callable[[Simulation, int], None]


class _Work:
    """A process's view of an operation of several processes."""

    def __init__(self, network: Network, call: _Call, process: int,
                 deliver: Callable[[], None]) -> None:
        self._network, self._call, self._process = network, call, process
        self._deliver = deliver

    def is_completed(self) -> bool:
        return len(self._call.sent) == len(self._call.members) or self._gone() is not None

    def _gone(self) -> int | None:
        return next((process for process in self._call.members if process in self._network.ended
                     and process not in self._call.sent), None)

    def wait(self) -> None:
        if len(self._call.sent) < len(self._call.members):
            raise ConnectionClosed(f'[gloo/transport] Connection closed by process {self._gone()}')
        kinds = {kind for kind, _ in self._call.sent.values()}
        assert len(kinds) == 1, f'processes have come to different operations: {kinds}'
        self._deliver()


class _Call(NamedTuple):
    members: Sequence[int]
    sent: dict[int, tuple[str, Any]]  # by process: operation, bytes


class Network:
    """What the processes of a simulation send each other."""

    def __init__(self) -> None:
        self.ended: set = set()
        self.calls: dict[tuple[str, int], _Call] = {}


class SimulatedTransport:
    """As :class:`mmrepro.virtual.exchange.Transport`."""
    device = torch.device('cpu')

    def __init__(self, network: Network, process: int, members: Sequence[int],
                 group: str = 'all') -> None:
        self._network, self._process, self._members = network, process, list(members)
        self._group, self._count, self._parts = group, 0, 0

    @functools.cached_property
    def aside(self) -> SimulatedTransport:
        return SimulatedTransport(self._network, self._process, self._members,
                                  f'{self._group} aside')

    def part(self, processes: Sequence[int]) -> SimulatedTransport:
        self._parts += 1
        return SimulatedTransport(self._network, self._process, processes,
                                  f'{self._group}/{self._parts}')

    def _begin(self, kind: str, sent: Any, deliver: Callable[[list[Any]], None]) -> _Work:
        call = self._network.calls.setdefault((self._group, self._count), _Call(self._members, {}))
        self._count += 1
        call.sent[self._process] = kind, sent
        return _Work(self._network, call, self._process, lambda: deliver(
            [call.sent[process][1] for process in self._members]))

    def all_gather(self, received: Tensor, sent: Tensor) -> _Work:
        return self._begin('all_gather', sent.clone(),
                           lambda parts: received.copy_(torch.cat(parts)))

    def broadcast(self, value: Tensor, source: int) -> _Work:
        return self._begin(f'broadcast {source}', value.clone(),
                           lambda parts: value.copy_(parts[source]))

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int],
                   sent_sizes: Sequence[int]) -> _Work:
        mine = self._members.index(self._process)
        return self._begin(
            'all_to_all', sent.clone().split(list(sent_sizes)),
            lambda parts: received.copy_(torch.cat([part[mine] for part in parts])))


class SeededBaton(Baton):
    """Chooses by a generator, and lets things happen to processes between two turns."""

    def __init__(self, simulation: Simulation, schedulers: Sequence[Scheduler], seed: int) -> None:
        super().__init__(schedulers)
        self._simulation, self._random = simulation, random.Random(seed)
        self.turn = 0

    def pick(self, ready: Iterator[VirtualRank]) -> VirtualRank:
        while True:
            self.turn += 1
            if self.turn > LIMIT:
                self._give_up()
            self._simulation.happen(self.turn)
            options = [rank for rank in self.ranks if not rank.ended and (
                rank.may_run() or rank.work is not None and rank.work.is_completed())]
            if options:
                return options[self._random.randrange(len(options))]
            self._stuck()

    def _main(self, rank: VirtualRank, function: Callable[[], Any]) -> None:
        try:
            super()._main(rank, function)
        except BaseException as error:  # the thread would end, and nobody would run any more
            for scheduler in self.schedulers:
                scheduler.failed = NoEnd(f'the thread of rank {rank.number} has ended with '
                                         f'{error!r}, and all others sleep')
            for rank in [rank for rank in self.ranks if not rank.ended][:1]:
                rank.baton.set()

    def _stuck(self) -> None:
        """No rank may run and no message is under way."""
        if all(rank.ended for rank in self.ranks):
            raise AssertionError('asked for a rank when all have ended')
        for scheduler in self.schedulers:
            if scheduler.failed is None and any(not rank.ended for rank in scheduler.ranks):
                # with messages under way: the timeout of the process group
                scheduler.fail(Deadlock(f'nobody can go on:{scheduler.places()}'))

    def _give_up(self) -> None:
        for scheduler in self.schedulers:
            scheduler.failed = scheduler.failed or NoEnd(f'more than {LIMIT} turns')
        if self.turn > 2 * LIMIT:
            raise NoEnd('ranks go on although they were stopped')


class Outcome(NamedTuple):
    """How a schedule has ended."""
    turns: int
    results: dict[int, Any]  # by rank, of those that have ended without an error
    errors: list[BaseException | None]  # by process


class Simulation:
    """One schedule: V ranks on N processes, in the order of ``seed``, and what happens outside."""

    def __init__(self, seed: int, ranks: int, processes: int,
                 events: Sequence[Event] = ()) -> None:
        self.network = Network()
        self._events = sorted(events, key=lambda event: event.turn)
        store = dist.HashStore()
        everyone = list(range(processes))
        self.worlds = [Worlds(ranks, mine, processes, None if processes == 1 else
                              SimulatedTransport(self.network, mine, everyone), store)
                       for mine in everyone]
        self.baton = SeededBaton(self, [world.scheduler for world in self.worlds], seed)

    def happen(self, turn: int) -> None:
        """Let the events before this turn happen; ended processes close their connections."""
        while self._events and self._events[0].turn <= turn:
            event = self._events.pop(0)
            if self.lives(event.process):
                event.apply(self, event.process)
        for number, world in enumerate(self.worlds):
            if all(rank.ended for rank in world.scheduler.ranks):
                self.network.ended.add(number)

    def lives(self, process: int) -> bool:
        return process not in self.network.ended and any(
            not rank.ended for rank in self.worlds[process].scheduler.ranks)

    def kill(self, process: int) -> None:
        """As SIGKILL: its ranks end where they are, and nothing that they do counts."""
        self.network.ended.add(process)
        self.worlds[process].scheduler.fail(Killed())

    def run(self, main: Callable[[], Any]) -> Outcome:
        with guarded(self.baton):
            self.baton.run(main)
        schedulers = [world.scheduler for world in self.worlds]
        return Outcome(self.baton.turn, {
            rank.number: rank.result for scheduler in schedulers for rank in scheduler.ranks
            if rank.ended == 'has ended'}, [scheduler.failed for scheduler in schedulers])
