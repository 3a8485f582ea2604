"""Exchanges of tensors between the processes of virtual ranks, group by group.

The last rank of a process that comes to a collective operation exchanges for all of them, in its
thread. Tensors travel as bytes, so every type is allowed. With one process nothing is sent.
"""
from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional

from ..distributed.control import default_timeout
from ..distributed.lost_ranks import let_go_at_exit
from ..distributed.ordered_sums import (
    Combine,
    Node,
    ReductionTree,
    all_gather_single,
    combine_of,
    finish_of,
    nodes_of,
)
from ..distributed.scheduler import wait_for_processes
from ..objects.digests import as_bytes

# Bytes from which on a sum is divided among the processes: each adds up one part and sends the
# result. Smaller sums are added up by every process, which needs one message less.
DIVIDE_FROM = 1 << 16
PACKET = 256  # bytes: objects of a process that fit need one message only


def _of_process() -> AbstractContextManager[None]:
    """Let this rank see torch.distributed as the process does, inside the block."""
    world: Any = c10d._world
    block: AbstractContextManager[None] = world.of_process()
    return block


class Transport:
    """A group of real processes: the only place that knows their process groups.

    Each operation is begun by all processes of the group, in the same order, and returns work to
    wait for: ``is_completed()``, and ``wait()``, which raises RuntimeError when a process has ended
    or the timeout of the group has passed. Tensors are one-dimensional, of bytes, on
    :attr:`device`. Tests put a simulated transport in its place.

    Args:
        aside: Between the same processes, for exchanges that are under way while other operations
            begin, and not everywhere the same ones.
    """

    def __init__(self, group: Any, aside: Transport | None = None) -> None:
        self._group, self.aside = group, aside
        let_go_at_exit(self, '_group')
        self.device = torch.device('cuda', torch.cuda.current_device()) \
            if 'nccl' in dist.get_backend(group) else torch.device('cpu')

    def part(self, processes: Sequence[int]) -> Transport:
        """Return the transport of some processes. All processes make all parts, in order."""
        with _of_process():
            return Transport(dist.new_group(list(processes), timeout=default_timeout()))

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """Fill ``received`` with ``sent`` of every process, in their order."""
        with _of_process():
            return all_gather_single(received, sent, group=self._group, async_op=True)

    def broadcast(self, value: Tensor, source: int) -> Any:
        """Overwrite ``value`` with that of process ``source`` of the group."""
        with _of_process():
            root = dist.get_process_group_ranks(self._group)[source]
            return dist.broadcast(value, root, group=self._group, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int],
                   sent_sizes: Sequence[int]) -> Any:
        """Send a part to every process, and receive one of each; sizes in bytes."""
        with _of_process():
            return dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes),
                                          group=self._group, async_op=True)


def groups_of(tensors: Iterable[tuple[int, Tensor]], size: int) -> list[dict[int, Tensor]]:
    """Divide numbered tensors, in order, by type and device; a group takes on until ``size``."""
    groups: list[dict[int, Tensor]] = []
    filling: dict[Any, dict[int, Tensor]] = {}
    bytes_of: dict[Any, int] = {}
    for number, tensor in tensors:
        kind = tensor.dtype, tensor.device
        if bytes_of.get(kind, size) >= size:
            filling[kind], bytes_of[kind] = {}, 0
            groups.append(filling[kind])
        filling[kind][number] = tensor
        bytes_of[kind] += tensor.numel() * tensor.element_size()
    return groups


class Processes:
    """The processes that share the ranks of one group.

    Args:
        members: Per process, the group's ranks there (numbers within the group). Processes have
            consecutive ranks, and torch sorts the ranks of a group.
        mine: The number of this process among them.
        transport: Between these processes; None: all ranks are in this process.
    """

    def __init__(self, members: Sequence[Sequence[int]], mine: int = 0,
                 transport: Any = None) -> None:
        self.members, self.mine = [list(ranks) for ranks in members], mine
        self.ranks = sum(map(len, self.members))
        self._transport = transport
        self.alone = len(self.members) == 1  # all ranks are in this process

    @property
    def device(self) -> torch.device:
        """The device of what processes exchange."""
        device: torch.device = self._transport.device
        return device

    def process_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.members) if rank in ranks)

    def _all_gather(self, value: Tensor) -> Tensor:
        """Return the bytes of a tensor of every process, end to end."""
        if not value.numel():  # on all of them
            return value.new_empty(0, dtype=torch.uint8)
        sent = as_bytes(value).to(self._transport.device)
        received = sent.new_empty(len(self.members) * sent.numel())
        wait_for_processes(self._transport.all_gather(received, sent))
        return received.to(value.device)

    def gather(self, values: Sequence[Tensor], counts: Sequence[int] = ()) -> list[Tensor]:
        """Return the tensors of all processes, flat, in order.

        Args:
            values: Of this process, of one type and number of elements: of its ranks.
            counts: How many each process has, if not one of each rank.
        """
        flat = [value.reshape(-1) for value in values]
        if self.alone:
            return flat
        counts = counts or list(map(len, self.members))
        size, kind = flat[0].numel(), flat[0].dtype
        block = flat[0].new_zeros(max(counts), size)
        for row, value in zip(block, flat):
            row.copy_(value)
        received = self._all_gather(block).view(kind).view(
            len(self.members), max(counts), size)
        return [row for count, rows in zip(counts, received) for row in rows[:count]]

    def gather_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return the objects of the ranks of all processes, in order; what pickle can hold."""
        if self.alone:
            return list(values)
        content = pickle.dumps(list(values))
        size = PACKET - 8
        packet = len(content).to_bytes(8, 'little') + content[:size].ljust(size, b'\0')
        packets = self._all_gather(torch.frombuffer(bytearray(packet), dtype=torch.uint8))
        parts = [part.numpy().tobytes() for part in packets.view(-1, PACKET)]
        sizes = [int.from_bytes(part[:8], 'little') for part in parts]
        parts = [part[8:] for part in parts]
        if max(sizes) > size:
            rest = content[size:].ljust(max(sizes) - size, b'\0')
            rests = self._all_gather(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
            parts = [part + more.numpy().tobytes()
                     for part, more in zip(parts, rests.view(len(parts), -1))]
        return [value for part in parts for value in pickle.loads(part)]  # ignores the padding

    def broadcast(self, value: Tensor, source: int) -> Tensor:
        """Return ``value`` as process ``source`` has it, flat. Overwrites it elsewhere."""
        flat = value.reshape(-1)
        if self.alone or not len(flat):
            return flat
        sent = as_bytes(flat).to(self._transport.device)
        wait_for_processes(self._transport.broadcast(sent, source))
        return sent.to(value.device).view(value.dtype)

    def reduce(self, nodes: Sequence[Node], op: Any) -> Tensor:
        """Return the reduction of the nodes of all processes, given those of this one.

        Their values are flat tensors of the same size and type everywhere, and are overwritten.
        """
        values = [node.value for node in nodes]
        root = _root([node[:2] for node in nodes], values, combine_of(op)) if self.alone \
            else self.begin(values)(combine_of(op))
        return finish_of(op, self.ranks)(root)

    def begin(self, values: Sequence[Tensor], received: Tensor | None = None,
              aside: bool = False) -> Callable[[Combine], Tensor]:
        """Begin to exchange nodes; return a function that waits for their reduction and returns it.

        Args:
            values: Of the nodes of this process, flat; overwritten.
            received: Memory for the bytes of all processes; None: new memory.
            aside: Other operations may begin before this one has ended.
        """
        transport, count = self._transport.aside if aside else self._transport, len(self.members)
        rows = [nodes_of(ranks) for ranks in self.members]  # per process, (level, index)
        places = [place for row in rows for place in row]
        total, kind, device = values[0].numel(), values[0].dtype, values[0].device
        item = values[0].element_size()
        if total * item < DIVIDE_FROM:
            return lambda combine: _root(places, self.gather(
                values, list(map(len, rows))), combine)
        if count == 2 and len(places) == 2 and total % 2 == 0:
            return self._swap(values[0], places, received, transport)
        size = -(-total // count)  # of a part; the last part is padded
        # (process, node, size): what each process gets of the nodes of this one
        values = [value if size * count == total else functional.pad(
            value, (0, size * count - total)) for value in values]
        parts = torch.stack([value.view(count, size) for value in values], 1) \
            if len(values) > 1 else values[0]
        sent = as_bytes(parts).to(transport.device)
        step = size * item
        received = (sent.new_empty(len(places) * step) if received is None else
                    received[:len(places) * step])
        work = transport.all_to_all(
            received, sent, [len(row) * step for row in rows], [len(values) * step] * count)

        def finish(combine: Combine) -> Tensor:
            wait_for_processes(work)
            mine = _root(places, received.to(device).view(kind).view(-1, size), combine)
            whole = sent[:count * step]
            wait_for_processes(transport.all_gather(whole, as_bytes(mine).to(transport.device)))
            return whole.to(device).view(kind)[:total]

        return finish

    def _swap(self, flat: Tensor, places: Sequence[tuple[int, int]], received: Tensor | None,
              transport: Any) -> Callable[[Combine], Tensor]:
        """Let two processes with a node each reduce a half: nothing is copied within a process."""
        sent = as_bytes(flat).to(transport.device)
        # the left process reduces the left half; a process sends nothing to itself
        is_left, halves, half = self.mine == 0, sent.chunk(2), len(sent) // 2
        sizes = [0, half] if is_left else [half, 0]
        mine, other = halves[self.mine], halves[1 - self.mine]
        received = torch.empty_like(mine) if received is None else received[:len(mine)]
        work = transport.all_to_all(received, other, sizes, sizes)

        def finish(combine: Combine) -> Tensor:
            wait_for_processes(work)
            parts = (mine, received) if is_left else (received, mine)
            values = [part.to(flat.device).view(flat.dtype) for part in parts]
            root = _root(places, values, combine)
            if not is_left or mine.device != flat.device:  # it is in the memory of the left one
                mine.view(flat.dtype).copy_(root)
            wait_for_processes(transport.all_to_all(other, mine, sizes, sizes))
            return sent.to(flat.device).view(flat.dtype)

        return finish


def _root(places: Sequence[tuple[int, int]], values: Iterable[Any], combine: Combine) -> Any:
    """Reduce nodes, given by (level, index) and value."""
    tree = ReductionTree(combine)
    for place, value in zip(places, values):
        tree.add(Node(*place, value))
    return tree.root()
