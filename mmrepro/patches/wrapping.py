"""How a replacement is written: a function around the stock one."""
from __future__ import annotations

import functools
from typing import Any, Callable


def around(function: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn ``function(stock, *args, **kwargs)`` into what a table row names: stock -> replacement.

    >>> @around
    ... def doubled(stock, value):
    ...     return 2 * stock(value)
    >>> doubled(abs)(-3)
    6
    """

    @functools.wraps(function)
    def make(stock: Callable[..., Any]) -> Callable[..., Any]:

        @functools.wraps(stock)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            return function(stock, *args, **kwargs)

        return replacement

    return make
