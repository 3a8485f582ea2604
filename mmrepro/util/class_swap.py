"""Objects of others moved to a subclass of their own class: the one place that swaps a class.

Attributes, ``isinstance`` and methods that are not replaced work as before.
"""
from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

_STOCK = '_mmrepro_stock'  # the class of before, unless it is given another name


def extend(obj: Any, methods: Mapping[str, Any], prefix: str = '', stock: str = _STOCK) -> None:
    """Move an object to a subclass of its own class; one that was moved before stays as it is.

    Args:
        obj: the object.
        methods: of the subclass. They are plain functions, because an object can only move to a
            subclass that has its own class as single base.
        prefix: of the subclass' name, which is that of the class otherwise.
        stock: name of the attribute that is the class of before.

    Raises:
        TypeError: the class of the object cannot be extended.
    """
    cls: Any = type(obj)
    if not hasattr(cls, stock):
        obj.__class__ = _subclass(cls, tuple(methods.items()), prefix, stock)


@cache
def _subclass(cls: Any, methods: tuple[tuple[str, Any], ...], prefix: str, stock: str) -> type:
    name = f'{prefix}{cls.__name__}'
    return type(name, (cls, ), {
        **dict(methods), '__module__': cls.__module__,
        '__qualname__': cls.__qualname__.removesuffix(cls.__name__) + name, stock: cls})


def stock_class(thing: Any) -> type:
    """Return the class that an object had before it was extended."""
    cls: type = getattr(thing, _STOCK, type(thing))
    return cls
