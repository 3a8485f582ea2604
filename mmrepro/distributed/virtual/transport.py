"""How bytes come from one process to the others: the only place that knows real process groups.

Tests put a simulated one in its place, in which all processes of a run are threads.
"""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

# torch 2.13 gives it another name and warns of the old one
_all_gather = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor


class Transport:
    """A group of real processes.

    Each operation is begun by all processes of the group, in the same order, and returns work to
    wait for: ``is_completed()``, and ``wait()``, which raises RuntimeError when a process has ended
    or the timeout of the group has passed. Tensors are one-dimensional, of bytes, on
    :attr:`device`.

    Args:
        world: torch's world of the processes.
        group: None: all of them.
    """

    def __init__(self, world: Any, group: Any = None) -> None:
        self._world, self._group = world, group
        backend = world.pg_map[group or world.default_pg][0]
        self.device = torch.device('cuda', torch.cuda.current_device()) if 'nccl' in backend \
            else torch.device('cpu')

    @contextmanager
    def _outside(self) -> Iterator[None]:
        """torch.distributed is that of the processes in this block, not that of a virtual rank."""
        before, c10d._world = c10d._world, self._world
        try:
            yield
        finally:
            c10d._world = before

    def part(self, processes: Sequence[int]) -> Transport:
        """The transport of some processes. All processes make all parts, in the same order."""
        with self._outside():
            return Transport(self._world, dist.new_group(list(processes)))

    def all_gather(self, received: Tensor, sent: Tensor) -> Any:
        """``received`` has ``sent`` of every process, in their order."""
        with self._outside():
            return _all_gather(received, sent, group=self._group, async_op=True)

    def broadcast(self, value: Tensor, source: int) -> Any:
        """``value`` becomes that of process ``source`` of the group."""
        with self._outside():
            root = dist.get_process_group_ranks(self._group or c10d._world.default_pg)[source]
            return dist.broadcast(value, root, group=self._group, async_op=True)

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Sequence[int],
                   sent_sizes: Sequence[int]) -> Any:
        """Send a part to every process, and receive one of each; sizes in bytes."""
        with self._outside():
            return dist.all_to_all_single(received, sent, list(received_sizes), list(sent_sizes),
                                          group=self._group, async_op=True)
