"""The world of ``torch.distributed`` that each virtual rank of a process has."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..reduction_tree import shares
from .exchange import Processes
from .group import BACKEND, Collect, VirtualGroup
from .scheduler import Exchange, Scheduler
from .transport import Transport

_runs = itertools.count(1)  # of this process


class Worlds:
    """Makes the process groups of all virtual ranks of one process.

    Args:
        ranks: V.
        mine: The number of the process.
        processes: N, which share the ranks.
        transport: Between the processes; None: there is one.
        store: Of ``torch.distributed``, the same for all ranks.
    """

    def __init__(self, ranks: int, mine: int, processes: int, transport: Transport | None,
                 store: dist.Store) -> None:
        self._ranks, self._mine, self._transport = ranks, mine, transport
        self.shares = shares(ranks, processes)
        self.scheduler = Scheduler(self.shares[mine], ranks, processes)
        self._all = Processes(self.shares, mine, transport)
        self._store = dist.PrefixStore('virtual ranks', store)
        self._made = 0  # groups
        # torch keeps a register of names for each thread, and the main thread stays: numbers that
        # neither an earlier run nor a group of the real processes has
        self._first_name = next(_runs) << 20
        if BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(BACKEND, _create, extended_api=False,
                                          devices=['cpu', 'cuda'])

    def of_rank(self, number: int) -> Any:
        """The world of a rank, with its default group."""
        group = VirtualGroup(number, self._ranks, self.scheduler, self._all, 'of all ranks')
        # torch's class keeps most of its state in its module: the same attributes, empty
        world = SimpleNamespace(**{name: type(value)() if value is not None else None
                                   for name, value in _attributes(c10d._World())})
        world.default_pg = group
        world.pg_map[group] = (BACKEND, self._store)
        world.pg_names[group] = '0'
        world.pg_group_ranks[group] = {rank: rank for rank in range(self._ranks)}
        world.pg_backend_config[group] = f'cpu:{BACKEND},cuda:{BACKEND}'
        world.group_count = self._first_name
        return world

    @contextmanager
    def new_group(self, ranks: list[int]) -> Iterator[str]:
        """A rank makes a group of ``ranks``; every rank comes here, as torch demands."""
        whole: VirtualGroup = c10d._world.default_pg
        processes, key = whole.meet(
            f'new_group({ranks})', None, lambda: Collect(lambda values: self._make(ranks)))
        global _creating
        _creating = (self.scheduler, processes, key)
        try:
            yield BACKEND
        finally:
            _creating = None

    def _make(self, ranks: Sequence[int]) -> Exchange:
        """Also of real processes; every process makes all groups, in the same order."""
        yield from ()  # waits for nothing
        self._made += 1
        members: list[tuple[int, list[int]]] = []
        for process, share in enumerate(self.shares):
            own = [index for index, rank in enumerate(ranks) if rank in share]
            if own:
                members.append((process, own))
        numbers = [process for process, _ in members]
        transport = self._transport.part(numbers) if len(members) > 1 else None
        mine = numbers.index(self._mine) if self._mine in numbers else 0
        return Processes([own for _, own in members], mine, transport), \
            f'{self._made} of ranks {list(ranks)}'


# scheduler, processes and key of the group that torch is making; ranks run one at a time
_creating: tuple[Scheduler, Processes, str] | None = None


def _create(store: Any, rank: int, size: int, timeout: Any) -> VirtualGroup:
    if _creating is None:
        raise RuntimeError(f'the backend {BACKEND!r} belongs to mmrepro.on_virtual_ranks')
    scheduler, processes, key = _creating
    return VirtualGroup(rank, size, scheduler, processes, key)


def _attributes(world: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(world):
        if not name.startswith('_') and name != 'pg_config_info':
            value = getattr(world, name)
            if value is None or isinstance(value, (dict, list, int)):
                yield name, value
