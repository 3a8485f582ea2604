"""The process group of virtual ranks, and the state of ``torch.distributed`` that each rank has.

The group has the methods that ``torch.distributed`` calls.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..distributed.ordered_sums import ReductionTree, combine_of, shares
from ..distributed.scheduler import Baton, Scheduler
from ..errors import VirtualRanksError
from ..util.scoped import replaced
from .exchange import Processes

BACKEND = 'virtual'  # the name that torch.distributed.get_backend() gives
_c10d: Any = torch._C._distributed_c10d
_ProcessGroup: Any = dist.ProcessGroup  # the signatures of its methods differ between versions


def _done(value: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return _c10d._create_work_from_future(future)


def _text(name: str, *tensors: Tensor) -> str:
    """Return the operation with all that must be the same on all ranks."""
    return f'{name}({", ".join(f"{tuple(part.shape)} {part.dtype}" for part in tensors)})'


class Collect:
    """Keeps the values of the ranks of this process.

    When all have come, the result is ``merge`` of the values, in the order of the ranks.
    """

    def __init__(self, merge: Callable[[list[Any]], Any]) -> None:
        self._values: dict[int, Any] = {}
        self._merge = merge

    def add(self, index: int, value: Any) -> None:
        self._values[index] = value

    def finish(self) -> Any:
        return self._merge([self._values[index] for index in sorted(self._values)])


class Reduce:
    """Reduces flat tensors as soon as ranks of this process bring them, if in order.

    The tensors belong to the operation: it overwrites them.
    """

    def __init__(self, processes: Processes, op: Any) -> None:
        self._processes, self._op = processes, op
        self._expected = iter(processes.members[processes.mine])
        self._next = next(self._expected)
        self._early: dict[int, Tensor] = {}
        self._tree = ReductionTree(combine_of(op))

    def add(self, index: int, value: Tensor) -> None:
        self._early[index] = value
        while self._next in self._early:
            self._tree.add_leaf(self._next, self._early.pop(self._next))
            self._next = next(self._expected, -1)

    def finish(self) -> Tensor:
        return self._processes.reduce(self._tree.nodes, self._op)


class VirtualGroup(_ProcessGroup):
    """Some or all of the virtual ranks.

    An operation blocks, also with ``async_op=True``: its work is done when it is returned. ``key``
    names the group, and is the same for all of its ranks.
    """

    def __init__(self, rank: int, ranks: int, scheduler: Scheduler, processes: Processes,
                 key: Any) -> None:
        super().__init__(rank, ranks)
        self._index, self._count = rank, ranks
        self._scheduler, self._processes, self._key = scheduler, processes, key

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        """The name under which torch has registered the group."""
        return c10d._world.pg_names[self]

    def __repr__(self) -> str:
        return f'VirtualGroup({self._key}, rank {self._index} of {self._count})'

    @property
    def alone(self) -> bool:
        """Whether all of its ranks are in this process."""
        return self._processes.alone

    # All ranks of a process get the same objects from these operations: they must not change them.

    def meet(self, name: str, contribute: Callable[[], Any], begin: Callable[[], Any]) -> Any:
        """Take part in an operation of this group, see :meth:`Scheduler.meet`."""
        return self._scheduler.meet(
            self._key, len(self._processes.members[self._processes.mine]),
            f'{name} of group {self._key}', self._index, contribute, begin)

    def of_processes(self, make: Callable[[Processes], Any], name: str) -> Any:
        """Return ``make`` of the group's processes: one object for the ranks of a process."""
        return self.meet(name, lambda: None, lambda: Collect(lambda _: make(self._processes)))

    def _reduced(self, tensor: Tensor, op: Any, name: str) -> Tensor:
        op = getattr(op, 'op', op)
        reduced: Tensor = self.meet(_text(f'{name} {op.name}', tensor),
                                    lambda: tensor.detach().reshape(-1).clone(),
                                    lambda: Reduce(self._processes, op))
        return reduced

    def _gathered(self, tensor: Tensor, name: str) -> list[Tensor]:
        """Return ``tensor`` of all ranks, flat."""
        gathered: list[Tensor] = self.merged(tensor.clone(), list, name)
        return gathered

    def merged(self, tensor: Tensor, merge: Callable[[list[Tensor]], Any],
               name: str = 'merged') -> Any:
        """Return ``merge`` of the flat tensors of all ranks; called once in a process."""
        return self.meet(_text(name, tensor), tensor.detach,
                         lambda: Collect(lambda values: merge(self._processes.gather(values))))

    def objects(self, value: Any, name: str) -> list[Any]:
        """Return an object of every rank, what pickle can hold; one meeting."""
        values: list[Any] = self.meet(
            name, lambda: value, lambda: Collect(self._processes.gather_objects))
        return values

    # ---------------------------------------------------------------------------- collectives

    @torch.no_grad()
    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        for tensor in [tensors] if isinstance(tensors, Tensor) else tensors:
            root = self._reduced(tensor, op, 'all_reduce')
            tensor.detach().copy_(root.view(tensor.shape))
        return _done(tensors)

    allreduce_coalesced = allreduce

    @torch.no_grad()
    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            root = self._reduced(tensor, opts.reduceOp, f'reduce to {opts.rootRank}')
            if self._index == opts.rootRank:
                tensor.detach().copy_(root.view(tensor.shape))
        return _done(tensors)

    @torch.no_grad()
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor],
                  opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs):
            _spread(self._gathered(tensor, 'all_gather'), output)
        return _done(outputs)

    @torch.no_grad()
    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        parts = self._gathered(tensor, 'all_gather_single')
        output.detach().copy_(torch.cat(parts).view(output.shape))
        return _done(output)

    _allgather_base = all_gather_single  # before torch 2.13

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            self._broadcast(tensor, opts.rootRank)
        return _done(tensors)

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        def value() -> Tensor | None:
            return tensor.detach().reshape(-1).clone() if self._index == root else None

        def merge(values: list[Tensor | None]) -> Tensor:
            present = next((value for value in values if value is not None), None)
            return self._processes.broadcast(
                tensor.new_empty(tensor.numel()) if present is None else present,
                self._processes.process_of(root))

        sent = self.meet(_text(f'broadcast from {root}', tensor), value, lambda: Collect(merge))
        if self._index != root:
            tensor.detach().copy_(sent.view(tensor.shape))

    @torch.no_grad()
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor],
               opts: Any = None) -> Any:
        for number, tensor in enumerate(inputs):
            parts = self._gathered(tensor, f'gather to {opts.rootRank}')
            if self._index == opts.rootRank:
                _spread(parts, outputs[number])
        return _done(outputs)

    @torch.no_grad()
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]],
                opts: Any = None) -> Any:
        for number, output in enumerate(outputs):
            whole = output.new_empty((self._count, *output.shape))
            if self._index == opts.rootRank:
                torch.stack([part.detach() for part in inputs[number]], out=whole)
            self.broadcast([whole], opts)
            output.detach().copy_(whole[self._index])
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]],
                       opts: Any = None) -> Any:
        for output, parts in zip(outputs, inputs):
            self.reduce_scatter_single(output, torch.stack([part.detach() for part in parts]), opts)
        return _done(outputs)

    @torch.no_grad()
    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        root = self._reduced(tensor, opts.reduceOp, 'reduce_scatter')
        output.detach().copy_(root.view(self._count, -1)[self._index].view(output.shape))
        return _done(output)

    _reduce_scatter_base = reduce_scatter_single  # before torch 2.13

    @torch.no_grad()
    def all_to_all_single(self, output: Tensor, tensor: Tensor, output_sizes: Sequence[int],
                          sizes: Sequence[int], opts: Any = None) -> Any:
        if output_sizes or sizes:
            raise VirtualRanksError(f'all_to_all_single with sizes {output_sizes} and {sizes}: '
                                    'virtual ranks exchange parts of one size only')
        parts = self._gathered(tensor, 'all_to_all_single')
        mine = [part.view(self._count, -1)[self._index] for part in parts]
        output.detach().copy_(torch.cat(mine).view(output.shape))
        return _done(output)

    alltoall_base = all_to_all_single  # before torch 2.13

    @torch.no_grad()
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                 opts: Any = None) -> Any:
        for part in inputs:
            if part.shape != inputs[0].shape:
                raise VirtualRanksError(
                    f'all_to_all of shapes {[tuple(tensor.shape) for tensor in inputs]}: virtual '
                    'ranks exchange parts of one shape only')
        parts = self._gathered(torch.stack([part.detach() for part in inputs]), 'all_to_all')
        for output, part in zip(outputs, parts):
            output.detach().copy_(part.view(self._count, -1)[self._index].view(output.shape))
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self.meet('barrier', lambda: torch.zeros(1), lambda: Collect(self._processes.gather))
        return _done(None)

    def send(self, *args: Any, **kwargs: Any) -> Any:
        raise VirtualRanksError('virtual ranks have no send and recv: use a collective '
                                'operation, such as torch.distributed.broadcast')

    recv = recv_anysource = send


def _spread(parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for part, output in zip(parts, outputs):
        output.detach().copy_(part.view(output.shape))


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
        self._groups = 0  # number of groups made
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
