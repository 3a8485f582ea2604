"""State of ``torch.distributed``, of which each virtual rank of a process has its own."""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ..distributed.reduction_tree import shares
from ..distributed.scheduler import Baton, Scheduler
from ..errors import VirtualRanksError
from ..util.scoped import replaced
from .exchange import Processes
from .group import BACKEND, Collect, VirtualGroup

_runs = itertools.count(1)  # of this process


class ThreadLocalWorld:
    """Stands for ``distributed_c10d._world`` while virtual ranks run: each rank has its own.

    PyTorch tests collectives with such a class, ``ThreadLocalWorld`` of
    torch/testing/_internal/distributed/multi_threaded_pg.py. Here the world is an attribute of the
    rank, and a thread that is not a rank's sees that of the rank which has the baton.
    """

    def __init__(self, process: Any, baton: Baton) -> None:
        vars(self).update(_process=process, _baton=baton)

    def of_process(self) -> AbstractContextManager[None]:
        """Let the running rank see the world of the process inside the block."""
        return replaced(self._baton.running(), world=self._process)

    def _world(self) -> Any:
        rank = self._baton.running()
        return self._process if rank is None else rank.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._world(), name, value)


class Worlds:
    """Makes the ranks of process ``mine``, and their process groups.

    ``transport`` is that between the processes, None if there is one.
    """

    def __init__(self, ranks: int, mine: int, processes: int, transport: Any,
                 store: dist.Store) -> None:
        self._ranks, self._mine, self._transport = ranks, mine, transport
        self.shares = shares(ranks, processes)
        self.scheduler = Scheduler(self.shares[mine], ranks, processes)
        self._all = Processes(self.shares, mine, transport)
        self._store = dist.PrefixStore('virtual ranks', store)
        self._groups = 0  # that were made
        # torch keeps a registry of names for each thread, and the main thread stays: numbers that
        # neither an earlier run nor a group of the real processes has
        self._first_name = next(_runs) << 20
        if BACKEND.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(BACKEND, _create, extended_api=False,
                                          devices=['cpu', 'cuda'])
        for rank in self.scheduler.ranks:
            rank.world = self._of_rank(rank.number)

    def _of_rank(self, number: int) -> Any:
        """Return the world of a rank, with its default group."""
        group = VirtualGroup(number, self._ranks, self.scheduler, self._all, 'of all ranks')
        # torch's class keeps most of its state in its module: the same attributes, empty
        names = {name for name in dir(c10d._World) if not name.startswith('_')}
        world = SimpleNamespace(virtual=self, default_pg=group, **{
            name: type(getattr(c10d._world, name))()
            for name in names - {'default_pg', 'pg_config_info'}})
        world.pg_map[group] = (BACKEND, self._store)
        world.pg_names[group] = '0'
        world.pg_group_ranks[group] = {rank: rank for rank in range(self._ranks)}
        world.pg_backend_config[group] = f'cpu:{BACKEND},cuda:{BACKEND}'
        world.group_count = self._first_name
        return world

    @contextmanager
    def new_group(self, ranks: list[int]) -> Iterator[str]:
        """Let torch make a group of ``ranks`` inside the block; yields the name of the backend.

        Every rank comes here, as torch demands.
        """
        everyone: Any = c10d._world.default_pg
        processes, key = everyone.meet(
            f'new_group({ranks})', lambda: None, lambda: Collect(lambda values: self._make(ranks)))
        token = _creating.set((self.scheduler, processes, key))
        try:
            yield BACKEND
        finally:
            _creating.reset(token)

    def _make(self, ranks: Sequence[int]) -> tuple[Processes, str]:
        """Make the matching group of real processes too; collective, the same order everywhere."""
        self._groups += 1
        members = {process: [index for index, rank in enumerate(ranks) if rank in share]
                   for process, share in enumerate(self.shares)}
        members = {process: indices for process, indices in members.items() if indices}
        numbers = list(members)
        transport = self._transport.part(numbers) if len(members) > 1 else None
        mine = numbers.index(self._mine) if self._mine in numbers else 0
        return Processes(list(members.values()), mine, transport), \
            f'{self._groups} of ranks {list(ranks)}'


# scheduler, processes and key of the group that torch is making in this thread
_creating: ContextVar[tuple[Scheduler, Processes, str] | None] = ContextVar(
    'creating', default=None)


def _create(store: Any, rank: int, size: int, timeout: Any) -> VirtualGroup:
    creating = _creating.get()
    if creating is None:
        raise VirtualRanksError(f'the backend {BACKEND!r} belongs to mmrepro.on_virtual_ranks')
    return VirtualGroup(rank, size, *creating)
