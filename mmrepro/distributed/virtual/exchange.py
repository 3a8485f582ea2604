"""What the processes of virtual ranks send each other, group by group.

Each function is a generator, as the scheduler expects it: it yields what has to be waited for, so
that other virtual ranks can run meanwhile, and returns the result. With one process nothing is
sent. Tensors travel as bytes, so every type is allowed.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from ..presence import of_run
from ..reduction_tree import Node, ReductionTree, combine_of, finish_of, nodes_of
from ..waiting import Awaited
from .buckets import as_bytes
from .scheduler import Exchange

__all__ = ['Processes']

# torch 2.13 gives it another name and warns of the old one
_all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor

# Bytes from which on a sum is divided among the processes: each adds up one part and sends the
# result. Smaller ones are added up by every process, which needs one message less.
DIVIDE_FROM = 1 << 16


class Processes:
    """The processes that share the ranks of one group.

    Args:
        members: Per process, the group's ranks there (numbers within the group), ascending.
        mine: Which of the processes this one is.
        world: torch's world of the real process group; None: one process.
        group: The real process group of these processes; None: the default one of ``world``.
    """

    def __init__(self, members: Sequence[Sequence[int]], mine: int = 0, world: Any = None,
                 group: Any = None) -> None:
        self.members, self.mine = [list(one) for one in members], mine
        self.ranks = sum(map(len, self.members))
        self._world, self._group = world, group
        self.alone = len(self.members) == 1  # all ranks are in this process

    def process_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """torch.distributed is that of the processes in this block, not that of a virtual rank."""
        before, c10d._world = c10d._world, self._world
        try:
            yield
        finally:
            c10d._world = before

    def _device(self) -> torch.device:
        backend = c10d._world.pg_map[self._group or c10d._world.default_pg][0]
        return torch.device('cuda', torch.cuda.current_device()) if 'nccl' in backend \
            else torch.device('cpu')

    def _started(self, work: Any) -> Any:
        """Work on a device is waited for there; of other work, waiting ends when a process does."""
        presence = of_run()
        if presence is None or self._device().type != 'cpu':
            return work
        return Awaited(work, dist.get_process_group_ranks(
            self._group or c10d._world.default_pg), presence)

    # ---------------------------------------------------------------------------- all to all

    def gather(self, values: Sequence[Tensor]) -> Exchange:
        """The tensors of all ranks, in the order of the group, from those of this process.

        They have one type and one number of elements; one-dimensional ones come back.
        """
        own = [value.reshape(-1) for value in values]
        if self.alone:
            return own
        most = max(map(len, self.members))
        size, kind, device = own[0].numel(), own[0].dtype, own[0].device
        block = own[0].new_zeros(most, size)
        for row, value in zip(block, own):
            row.copy_(value)
        with self._outside():
            sent = as_bytes(block).to(self._device())
            parts = [torch.empty_like(sent) for _ in self.members]
            work = self._started(dist.all_gather(parts, sent, group=self._group, async_op=True))
        yield work
        found: List[Optional[Tensor]] = [None] * self.ranks
        for ranks, part in zip(self.members, parts):
            rows = part.to(device).view(kind).view(most, size)
            for rank, row in zip(ranks, rows):
                found[rank] = row
        return found

    def broadcast(self, value: Tensor, source: int) -> Exchange:
        """``value`` as process ``source`` has it; one-dimensional. Overwrites it elsewhere."""
        flat = value.reshape(-1)
        if self.alone:
            return flat
        with self._outside():
            sent = as_bytes(flat).to(self._device())
            root = dist.get_process_group_ranks(self._group or c10d._world.default_pg)[source]
            work = self._started(dist.broadcast(sent, root, group=self._group, async_op=True))
        yield work
        return sent.to(value.device).view(value.dtype)

    def barrier(self) -> Exchange:
        if not self.alone:
            with self._outside():
                sign = torch.zeros(1, device=self._device())
                work = self._started(dist.all_reduce(sign, group=self._group, async_op=True))
            yield work

    # ---------------------------------------------------------------------------- reductions

    def reduce(self, nodes: Sequence[Node], op: Any) -> Exchange:
        """The root of the tree whose nodes this process has: flat tensors of one size and type.

        Overwrites the values of the nodes.
        """
        finish = finish_of(op, self.ranks)
        if self.alone:
            return finish(_root(nodes, op))
        value = nodes[0].value
        if value.numel() * value.element_size() < DIVIDE_FROM:
            root = yield from self._reduce_everywhere(nodes, op)
        else:
            root = yield from self._reduce_divided(nodes, op)
        return finish(root)

    def _rows(self) -> List[List[tuple]]:
        """Per process, (level, index) of its nodes."""
        return [nodes_of(ranks) for ranks in self.members]

    def _reduce_everywhere(self, nodes: Sequence[Node], op: Any) -> Exchange:
        rows = self._rows()
        # as if the nodes of a process were its ranks
        every = Processes(_numbered(rows), self.mine, self._world, self._group)
        values = yield from every.gather([node.value for node in nodes])
        places = [place for own in rows for place in own]
        return _root([Node(*place, value) for place, value in zip(places, values)], op)

    def _reduce_divided(self, nodes: Sequence[Node], op: Any) -> Exchange:
        rows, count = self._rows(), len(self.members)
        flat = nodes[0].value
        kind, device, total = flat.dtype, flat.device, flat.numel()
        size = -(-total // count)  # of a part; the last one is filled up
        # (process, node, size): what each process gets of the nodes of this one
        parts = torch.stack([_filled(node.value, size * count).view(count, size)
                             for node in nodes], 1) \
            if len(nodes) > 1 else _filled(flat, size * count)
        with self._outside():
            there = self._device()
            sent = as_bytes(parts).to(there)
            del parts
            step = size * flat.element_size()
            received = torch.empty(sum(map(len, rows)) * step, dtype=torch.uint8, device=there)
            work = self._started(dist.all_to_all_single(
                received, sent.reshape(-1), [len(own) * step for own in rows],
                [len(nodes) * step] * count, group=self._group, async_op=True))
        yield work
        values = received.to(device).view(kind).view(-1, size)
        places = [place for own in rows for place in own]
        mine = _root([Node(*place, value) for place, value in zip(places, values)], op)
        with self._outside():
            sent = as_bytes(mine).to(there)
            sums = torch.empty(count * sent.numel(), dtype=torch.uint8, device=there)
            work = self._started(_all_gather(sums, sent, group=self._group, async_op=True))
        yield work
        return sums.to(device).view(kind)[:total]


def _root(nodes: Sequence[Node], op: Any) -> Tensor:
    tree = ReductionTree(combine_of(op))
    for node in sorted(nodes, key=lambda node: node.first):
        tree.add(node)
    return tree.root()


def _numbered(rows: Sequence[Sequence[Any]]) -> List[List[int]]:
    """The entries of all rows, numbered one after the other."""
    numbers, found = iter(range(sum(map(len, rows)))), []
    for row in rows:
        found.append([next(numbers) for _ in row])
    return found


def _filled(value: Tensor, size: int) -> Tensor:
    """With zeros at the end, if ``size`` asks for them."""
    missing = size - value.numel()
    return torch.cat([value, value.new_zeros(missing)]) if missing else value
