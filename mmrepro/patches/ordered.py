"""Orders that follow from the content, for code that makes lists of sets."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSet
from typing import Any

import torch

from .replacements import around


class OrderedSet(MutableSet[Any]):
    """Drop-in for ``set`` whose order follows from the operations, never from hashes.

    A one-dimensional tensor is taken as its numbers. (``set`` takes it as 0-d tensors, which hash
    by address, so that no two are ever equal.)

    >>> list(OrderedSet('hash') - OrderedSet('s'))
    ['h', 'a']
    >>> list(OrderedSet(torch.tensor([5, 3, 4])) - OrderedSet(torch.tensor([3])))
    [5, 4]
    """

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items = dict.fromkeys(items.tolist() if isinstance(items, torch.Tensor) else items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f'{type(self).__name__}({list(self)})'

    def add(self, value: Any) -> None:
        """Append ``value`` unless it is already there."""
        self._items[value] = None

    def discard(self, value: Any) -> None:
        """Remove ``value`` if it is there."""
        self._items.pop(value, None)


def ordered_set(stock: type) -> type:
    """Return the replacement for the name ``set`` in a module."""
    return OrderedSet


@around
def sorted_names(stock: Any, self: Any) -> list[str]:
    """Return the stock names sorted: an order that depends on the names alone."""
    return sorted(stock(self))
