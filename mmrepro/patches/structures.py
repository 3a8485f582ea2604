"""Order of the fields of MMEngine's data elements."""
from __future__ import annotations

import functools
from typing import Callable, List

__all__ = ['sorted_names']


def sorted_names(stock: Callable[..., List[str]]) -> Callable[..., List[str]]:
    """Return the stock names sorted: an order that depends on the names alone."""

    @functools.wraps(stock)
    def names(self) -> List[str]:
        return sorted(stock(self))

    return names
