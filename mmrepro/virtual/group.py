"""The process group of virtual ranks: the methods that ``torch.distributed`` calls."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..distributed.reduction_tree import ReductionTree, combine_of
from ..distributed.scheduler import Scheduler
from ..errors import VirtualRanksError
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
        return self.meet(_text(f'{name} {op.name}', tensor),
                         lambda: tensor.detach().reshape(-1).clone(),
                         lambda: Reduce(self._processes, op))

    def _gathered(self, tensor: Tensor, name: str) -> list[Tensor]:
        """Return ``tensor`` of all ranks, flat."""
        return self.merged(tensor.clone(), list, name)

    def merged(self, tensor: Tensor, merge: Callable[[list[Tensor]], Any],
               name: str = 'merged') -> Any:
        """Return ``merge`` of the flat tensors of all ranks; called once in a process."""
        return self.meet(_text(name, tensor), tensor.detach,
                         lambda: Collect(lambda values: merge(self._processes.gather(values))))

    def objects(self, value: Any, name: str) -> list[Any]:
        """Return an object of every rank, what pickle can hold; one meeting."""
        return self.meet(name, lambda: value, lambda: Collect(self._processes.gather_objects))

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
