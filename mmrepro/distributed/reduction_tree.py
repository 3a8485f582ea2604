"""Reductions in the order of a fixed binary tree, however the leaves are spread over processes.

The n leaves are the values of n ranks, in the order of the ranks. Node (level, index) covers the
``2**level`` leaves from ``index * 2**level`` on; a node whose leaves all exist is the reduction of
its left and its right half. What remains is reduced from the right:

    n = 4    (0 1) (2 3)
    n = 7    ((0 1) (2 3)) ((4 5) 6)

Each operation is rounded to the type of the values. A process that has some of the leaves reduces
the nodes of which it has all leaves, and other processes continue from these: the bits depend on n
alone. Two leaves give the same bits in any order.

This order is scheme 2 of the reductions over ranks; scheme 1, from the first rank to the last, is
in :mod:`.ordered_reduction`.
"""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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
    """Return what is applied to the root: ``AVG`` divides the sum by the number of leaves."""
    if op == _Op.AVG:
        return lambda root: root.div_(leaves)
    return lambda root: root


class ReductionTree:
    """Reduces leaves, or nodes of other trees, as they are added: ascending, gaps allowed.

    Their values belong to the tree, and ``combine`` may overwrite them.
    """

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self.nodes: list[Node] = []  # that no other node covers

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
