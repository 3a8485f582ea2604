"""What the processes of virtual ranks send each other, group by group.

Each function is a generator, as the scheduler expects it: it yields what has to be waited for, so
that other virtual ranks can run meanwhile, and returns the result. With one process nothing is
sent. Tensors travel as bytes, so every type is allowed.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..reduction_tree import Node, ReductionTree, combine_of, finish_of, nodes_of
from .buckets import as_bytes
from .scheduler import Exchange
from .transport import Transport

# Bytes from which on a sum is divided among the processes: each adds up one part and sends the
# result. Smaller ones are added up by every process, which needs one message less.
DIVIDE_FROM = 1 << 16


class Processes:
    """The processes that share the ranks of one group.

    Args:
        members: Per process, the group's ranks there (numbers within the group), ascending.
        mine: Which of the processes this one is.
        transport: Between these processes; None: all ranks are in this one.
    """

    def __init__(self, members: Sequence[Sequence[int]], mine: int = 0,
                 transport: Transport | None = None) -> None:
        self.members, self.mine = [list(one) for one in members], mine
        self.ranks = sum(map(len, self.members))
        self._transport = transport
        self.alone = len(self.members) == 1  # all ranks are in this process

    def process_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    def _all_gather(self, value: Tensor) -> Exchange:
        """The bytes of a tensor of every process, one after the other."""
        sent = as_bytes(value).to(self._transport.device)
        received = sent.new_empty(len(self.members) * sent.numel())
        yield self._transport.all_gather(received, sent)
        return received.to(value.device)

    # ---------------------------------------------------------------------------- all to all

    def gather(self, values: Sequence[Tensor]) -> Exchange:
        """The tensors of all ranks, in the order of the group, from those of this process.

        They have one type and one number of elements; one-dimensional ones come back.
        """
        own = [value.reshape(-1) for value in values]
        if self.alone:
            return own
        most = max(map(len, self.members))
        size, kind = own[0].numel(), own[0].dtype
        block = own[0].new_zeros(most, size)
        for row, value in zip(block, own):
            row.copy_(value)
        received = (yield from self._all_gather(block)).view(kind).view(-1, most, size)
        found: list[Tensor | None] = [None] * self.ranks
        for ranks, rows in zip(self.members, received):
            for rank, row in zip(ranks, rows):
                found[rank] = row
        return found

    def broadcast(self, value: Tensor, source: int) -> Exchange:
        """``value`` as process ``source`` has it; one-dimensional. Overwrites it elsewhere."""
        flat = value.reshape(-1)
        if self.alone:
            return flat
        sent = as_bytes(flat).to(self._transport.device)
        yield self._transport.broadcast(sent, source)
        return sent.to(value.device).view(value.dtype)

    def barrier(self) -> Exchange:
        if not self.alone:
            yield from self._all_gather(torch.zeros(1, dtype=torch.uint8))

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

    def _rows(self) -> list[list[tuple]]:
        """Per process, (level, index) of its nodes."""
        return [nodes_of(ranks) for ranks in self.members]

    def _reduce_everywhere(self, nodes: Sequence[Node], op: Any) -> Exchange:
        rows = self._rows()
        # as if the nodes of a process were its ranks
        every = Processes(_numbered(rows), self.mine, self._transport)
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
        sent = as_bytes(parts).to(self._transport.device)
        del parts
        step = size * flat.element_size()
        received = sent.new_empty(sum(map(len, rows)) * step)
        yield self._transport.all_to_all(received, sent, [len(own) * step for own in rows],
                                         [len(nodes) * step] * count)
        values = received.to(device).view(kind).view(-1, size)
        places = [place for own in rows for place in own]
        mine = _root([Node(*place, value) for place, value in zip(places, values)], op)
        return (yield from self._all_gather(mine)).view(kind)[:total]


def _root(nodes: Sequence[Node], op: Any) -> Tensor:
    tree = ReductionTree(combine_of(op))
    for node in sorted(nodes, key=lambda node: node.first):
        tree.add(node)
    return tree.root()


def _numbered(rows: Sequence[Sequence[Any]]) -> list[list[int]]:
    """The entries of all rows, numbered one after the other."""
    numbers, found = iter(range(sum(map(len, rows)))), []
    for row in rows:
        found.append([next(numbers) for _ in row])
    return found


def _filled(value: Tensor, size: int) -> Tensor:
    """With zeros at the end, if ``size`` asks for them."""
    missing = size - value.numel()
    return torch.cat([value, value.new_zeros(missing)]) if missing else value
