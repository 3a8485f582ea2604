"""Sums over ranks in a fixed order: that of the ranks, or that of a binary tree.

**In the order of the ranks**, whatever DistributedDataParallel's buckets are (scheme 1). An
all-reduce may add up an element in an order that depends on its offset in the buffer. DDP rebuilds
its buckets after the first backward pass, so a resumed run adds up its first step in a different
order than an uninterrupted run, and with three or more ranks that changes bits. (Two terms give the
same sum in either order.) Here every element is

    (((g[0] / n) + (g[1] / n)) + (g[2] / n)) + ...      n ranks, g[r] the gradient of rank r

with each operation rounded to the type of the gradient, so no layout can matter. The factor 1/n is
multiplied in before the sum, as DDP does; hence with two ranks the bits are those of plain DDP.

Each rank sums one n-th of the bucket: an all-to-all brings the pieces, an all-gather spreads the
sums. The traffic is that of a ring all-reduce; the extra memory is one bucket. The communication
does not overlap with the backward pass.

**In the order of a fixed binary tree**, however the leaves are spread over processes (scheme 2, of
virtual ranks). The n leaves are the values of n ranks, in the order of the ranks. Node (level,
index) covers the ``2**level`` leaves from ``index * 2**level`` on; a node whose leaves all exist is
the reduction of its left and its right half. What remains is reduced from the right:

    n = 4    (0 1) (2 3)
    n = 7    ((0 1) (2 3)) ((4 5) 6)

Each operation is rounded to the type of the values. A process that has some of the leaves reduces
the nodes of which it has all leaves, and other processes continue from these: the bits depend on n
alone. Two leaves give the same bits in any order.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

ORDER_MATTERS_FROM = 3  # ranks; a sum of two is the same in either order

# torch 2.13 gives it another name and warns of the old one
all_gather_single = getattr(dist, 'all_gather_single', None) or dist.all_gather_into_tensor


def ordered_mean(flat: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the mean of ``flat`` over the ranks, added up in the order of the ranks.

    Args:
        flat: One-dimensional, contiguous, of the same length on every rank. Overwritten.
        group: The process group; None: the default one.

    Returns:
        Tensor: ``flat``, with the same bits on every rank. They do not depend on the offset of an
        element.
    """
    world = dist.get_world_size(group)
    flat.mul_(1.0 / world)
    size = flat.numel() // world
    main, rest = flat[:size * world], flat[size * world:]
    if size:
        pieces = torch.empty_like(main)
        dist.all_to_all_single(pieces, main, group=group)
        all_gather_single(main, _sum_rows(pieces, size), group=group)
    if rest.numel():  # fewer elements than ranks
        pieces = rest.new_empty(world * rest.numel())
        all_gather_single(pieces, rest, group=group)
        rest.copy_(_sum_rows(pieces, rest.numel()))
    return flat


def _sum_rows(pieces: Tensor, size: int) -> Tensor:
    """Sum the pieces of ``size`` elements, from the first to the last, in the first."""
    first: Tensor
    first, *others = pieces.split(size)
    for piece in others:
        first += piece
    return first


# Without annotations: DDP compares them with its own types, and here they would be strings.
def ordered_mean_hook(group, bucket):  # type: ignore[no-untyped-def]
    """Take :func:`ordered_mean` of a bucket, as a communication hook of DistributedDataParallel.

    The hook blocks: collectives that are started from callbacks would be queued in an order that
    differs between ranks.
    """
    flat = bucket.buffer()
    devices = [] if flat.device.type == 'cpu' else [flat.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(ordered_mean(flat, group))
    return future


def fix_gradient_order(model: nn.Module) -> list[DistributedDataParallel]:
    """Register :func:`ordered_mean_hook` with every DistributedDataParallel in ``model``.

    Nothing is registered with fewer ranks than :data:`ORDER_MATTERS_FROM`.

    Returns:
        list: the wrappers that have the hook now.

    Raises:
        RuntimeError: a wrapper has a communication hook already.
    """
    # MMSeparateDistributedDataParallel has no reducer; the wrappers inside of it do
    wrappers = [module for module in model.modules()
                if isinstance(module, DistributedDataParallel) and hasattr(module, 'reducer')
                and dist.get_world_size(module.process_group) >= ORDER_MATTERS_FROM]
    for wrapper in wrappers:
        wrapper.register_comm_hook(wrapper.process_group, ordered_mean_hook)
    return wrappers


_Op = dist.ReduceOp


class Node(NamedTuple):
    """The reduction of the leaves ``index * 2**level`` up to ``(index + 1) * 2**level``."""
    level: int
    index: int  # type: ignore[assignment]  # tuple.index, which nobody calls
    value: Any

    @property
    def first(self) -> int:
        """The first leaf."""
        return self.index << self.level


Combine = Callable[[Any, Any], Any]  # (left, right) -> their reduction, in the memory of left

_COMBINE: dict[Any, Combine] = {
    _Op.SUM: lambda left, right: left.add_(right),
    _Op.AVG: lambda left, right: left.add_(right),
    _Op.PRODUCT: lambda left, right: left.mul_(right),
    _Op.MIN: lambda left, right: torch.minimum(left, right, out=left),
    _Op.MAX: lambda left, right: torch.maximum(left, right, out=left),
    _Op.BAND: lambda left, right: left.bitwise_and_(right),
    _Op.BOR: lambda left, right: left.bitwise_or_(right),
    _Op.BXOR: lambda left, right: left.bitwise_xor_(right),
}


def combine_of(op: Any) -> Combine:
    """Return the function that reduces two tensors.

    Raises:
        NotImplementedError: for an operation that is not in the table; names it.
    """
    if op in _COMBINE:
        return _COMBINE[op]
    raise NotImplementedError(f'virtual ranks cannot reduce with {op}; allowed: '
                              f'{", ".join(str(known) for known in _COMBINE)}')


def finish_of(op: Any, leaves: int) -> Callable[[Tensor], Tensor]:
    """Return the function that is applied to the root: ``AVG`` divides by the number of leaves."""
    if op == _Op.AVG:
        return lambda root: root.div_(leaves)
    return lambda root: root


class ReductionTree:
    """Reduces leaves, or nodes of other trees, as they are added: ascending, gaps allowed.

    Their values belong to the tree, and ``combine`` may overwrite them.
    """

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self.nodes: list[Node] = []  # nodes that no other node covers

    def add(self, node: Node) -> None:
        """Add a node. Raises ValueError if a leaf came out of order."""
        if self.nodes and node.first < self.nodes[-1].first + (1 << self.nodes[-1].level):
            raise ValueError(f'leaf {node.first} came after {self.nodes[-1]}')
        level, index, value = node
        while self.nodes and index % 2 and self.nodes[-1][:2] == (level, index - 1):
            value = self._combine(self.nodes.pop().value, value)
            level, index = level + 1, index // 2
        self.nodes.append(Node(level, index, value))

    def add_leaf(self, number: int, value: Any) -> None:
        self.add(Node(0, number, value))

    def root(self) -> Any:
        """Return the reduction of all leaves, once all were added."""
        value = self.nodes.pop().value
        while self.nodes:
            value = self._combine(self.nodes.pop().value, value)
        return value


def nodes_of(leaves: Iterable[int]) -> list[tuple[int, int]]:
    """Return (level, index) of the nodes to which these leaves, ascending, can be reduced."""
    tree = ReductionTree(lambda left, right: None)
    for leaf in leaves:
        tree.add_leaf(leaf, None)
    return [node[:2] for node in tree.nodes]


def shares(ranks: int, processes: int) -> list[range]:
    """Return the ranks of each process: consecutive; the first processes have one more.

    >>> shares(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, more = divmod(ranks, processes)
    bounds = [process * size + min(process, more) for process in range(processes + 1)]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]
