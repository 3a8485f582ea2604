"""The process group of virtual ranks: what ``torch.distributed`` calls, in the order of ranks."""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ..reduction_tree import ReductionTree, combine_of
from .buckets import Buckets
from .exchange import Processes
from .scheduler import Exchange, Scheduler

BACKEND = 'virtual'  # the name that torch.distributed.get_backend() gives


def _done(value: Any) -> Any:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(value)
    return torch._C._distributed_c10d._create_work_from_future(future)


def _text(name: str, *tensors: Tensor) -> str:
    """An operation with what must be the same on all ranks."""
    return f'{name}({", ".join(f"{tuple(one.shape)} {one.dtype}" for one in tensors)})'


class Collect:
    """Keeps the values of the ranks of this process, until ``finish`` gets them in their order."""

    def __init__(self, finish: Callable[[list[Any]], Exchange]) -> None:
        self._values: dict[int, Any] = {}
        self._finish = finish

    def add(self, index: int, value: Any) -> None:
        self._values[index] = value

    def finish(self) -> Exchange:
        return self._finish([self._values[index] for index in sorted(self._values)])


class Reduce:
    """Reduces what ranks of this process bring as soon as they come, if they come in order.

    A value is a list of tensors, which the operation takes out of it: callers that wait would keep
    them alive.

    Args:
        buckets: Makes flat tensors of them, where other processes take part; None: they are flat.
    """

    def __init__(self, processes: Processes, op: Any, buckets: Buckets | None = None) -> None:
        self._processes, self._op = processes, op
        self._buckets = None if processes.alone else buckets
        self._expected = iter(processes.members[processes.mine])
        self._next = next(self._expected)
        self._early: dict[int, list[Tensor]] = {}
        combine = combine_of(op)
        self._tree = ReductionTree(
            lambda left, right: [combine(one, other) for one, other in zip(left, right)])

    def add(self, index: int, value: list[Tensor]) -> None:
        self._early[index] = list(value)
        value.clear()
        while self._next in self._early:
            self._tree.add_leaf(self._next, self._early.pop(self._next))
            self._next = next(self._expected, -1)

    def finish(self) -> Exchange:
        nodes, roots = self._tree.nodes, []
        if self._buckets is not None:
            nodes = [node._replace(value=self._buckets.pack(node.value)) for node in nodes]
        for number in range(len(nodes[0].value)):
            roots.append((yield from self._processes.reduce(
                [node._replace(value=node.value[number]) for node in nodes], self._op)))
        return roots if self._buckets is None else self._buckets.unpack(roots)


class VirtualGroup(dist.ProcessGroup):
    """Some or all of the virtual ranks.

    An operation blocks, also with ``async_op=True``: its work is done when it is returned.

    Args:
        rank: Of this rank within the group.
        ranks: Of the group.
        scheduler: Of this process.
        processes: Of the group.
        key: Names the group; the same for all of its ranks.
    """

    def __init__(self, rank: int, ranks: int, scheduler: Scheduler, processes: Processes,
                 key: Any) -> None:
        super().__init__(rank, ranks)
        self._index, self._count = rank, ranks
        self._scheduler, self._processes, self._key = scheduler, processes, key

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._count

    def getBackendName(self) -> str:
        return BACKEND

    def __repr__(self) -> str:
        return f'VirtualGroup({self._key}, rank {self._index} of {self._count})'

    def meet(self, name: str, value: Any, begin: Callable[[], Any]) -> Any:
        """See :meth:`Scheduler.meet`."""
        return self._scheduler.meet(
            self._key, len(self._processes.members[self._processes.mine]),
            f'{name} of group {self._key}', self._index, value, begin)

    @property
    def alone(self) -> bool:
        """Whether all of its ranks are in this process."""
        return self._processes.alone

    def reduced(self, tensors: list[Tensor], op: Any, name: str,
                buckets: Buckets | None = None) -> list[Tensor]:
        """The reductions of tensors over the ranks; takes the tensors out of the list.

        All ranks get the same results: do not change them.
        """
        return self.meet(name, tensors, lambda: Reduce(self._processes, op, buckets))

    def sent(self, root: int, value: Tensor | None, empty: Callable[[], Tensor],
             name: str) -> Tensor:
        """The tensor that rank ``root`` has as its ``value``, flat.

        All ranks of a process get the same one: do not change it.

        Args:
            empty: Makes one like it, in a process that does not have that rank.
        """
        source = self._processes.process_of(root)

        def finish(values: list[Tensor | None]) -> Exchange:
            own = next((value for value in values if value is not None), None)
            return self._processes.broadcast(empty() if own is None else own, source)

        return self.meet(name, value, lambda: Collect(finish))

    def _reduced(self, tensor: Tensor, op: Any, name: str) -> Tensor:
        op = getattr(op, 'op', op)
        flat = tensor.detach().reshape(-1).clone()
        return self.reduced([flat], op, _text(f'{name} {op.name}', tensor))[0]

    def _gathered(self, tensor: Tensor, name: str) -> list[Tensor]:
        """``tensor`` of all ranks, flat. Do not change them."""
        return self.meet(_text(name, tensor), tensor.detach().clone(),
                         lambda: Collect(self._processes.gather))

    def merged(self, tensor: Tensor, merge: Callable[[list[Tensor]], Any]) -> Any:
        """``merge`` of the tensors of all ranks, which are flat; called once in a process.

        All ranks of a process get the same result: do not change it.
        """
        def finish(values: list[Tensor]) -> Exchange:
            return merge((yield from self._processes.gather(values)))

        return self.meet(_text('merged', tensor), tensor.detach(), lambda: Collect(finish))

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
    def allgather_coalesced(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor],
                            opts: Any = None) -> Any:
        for number, tensor in enumerate(inputs):
            _spread(self._gathered(tensor, 'all_gather'), [output[number] for output in outputs])
        return _done(outputs)

    def all_gather_single_coalesced(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                                    opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs):
            self.all_gather_single(output, tensor)
        return _done(outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # before torch 2.13

    @torch.no_grad()
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        root = opts.rootRank
        for tensor in tensors:
            value = tensor.detach().clone(memory_format=torch.contiguous_format) \
                if self._index == root else None
            found = self.sent(root, value, functools.partial(
                torch.empty_like, tensor, memory_format=torch.contiguous_format),
                _text(f'broadcast from {root}', tensor))
            if self._index != root:
                tensor.detach().copy_(found.view(tensor.shape))
        return _done(tensors)

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
            raise NotImplementedError(f'all_to_all_single with sizes {output_sizes} and {sizes}: '
                                      'virtual ranks exchange parts of one size only')
        parts = self._gathered(tensor, 'all_to_all_single')
        own = [part.view(self._count, -1)[self._index] for part in parts]
        output.detach().copy_(torch.cat(own).view(output.shape))
        return _done(output)

    alltoall_base = all_to_all_single  # before torch 2.13

    @torch.no_grad()
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor],
                 opts: Any = None) -> Any:
        for part in inputs:
            if part.shape != inputs[0].shape:
                raise NotImplementedError(
                    f'all_to_all of shapes {[tuple(one.shape) for one in inputs]}: virtual ranks '
                    'exchange parts of one shape only')
        parts = self._gathered(torch.stack([part.detach() for part in inputs]), 'all_to_all')
        for output, part in zip(outputs, parts):
            output.detach().copy_(part.view(self._count, -1)[self._index].view(output.shape))
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self.meet('barrier', None, lambda: Collect(lambda values: self._processes.barrier()))
        return _done(None)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self.barrier()

    def send(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError('virtual ranks have no send and recv: use a collective '
                                  'operation, such as torch.distributed.broadcast')

    recv = recv_anysource = send


def _spread(parts: Sequence[Tensor], places: Sequence[Tensor]) -> None:
    for part, place in zip(parts, places):
        place.detach().copy_(part.view(place.shape))
