"""Attributes with another value inside a block or until a call, and swapped classes of objects.

An object whose class is swapped belongs to a subclass of its own class: attributes, ``isinstance``
and methods that are not replaced work as before. This is the one place that swaps a class.
"""
from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Callable


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of ``owner`` other values inside the block.

    An attribute that was missing, or was inherited from a class, is deleted afterwards.

    >>> import math
    >>> with replaced(math, pi=3):
    ...     math.pi
    3
    >>> round(math.pi, 2)
    3.14
    """
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not missing:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


def restore_handlers(handlers: Mapping[int, Any]) -> None:
    """Put back the handlers of signals that ``signal.signal`` has returned, by number."""
    for number, handler in handlers.items():
        # None: not installed from Python, and Python cannot put it back
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def around_next_step(model: Any, around: Callable[..., Any]) -> None:
    """Let the next ``model.train_step(...)`` be ``around(train_step, ...)``.

    The method is back in place before ``around`` runs, also a compiled method, or one that other
    code has put there.
    """
    step, change = model.train_step, ExitStack()

    def once(*args: Any, **kwargs: Any) -> Any:
        if vars(model).get('train_step') is once:
            change.close()
        return around(step, *args, **kwargs)

    change.enter_context(replaced(model, train_step=once))


_STOCK = '_mmrepro_stock'  # the class of before, unless it is given another name


def extend(obj: Any, methods: Mapping[str, Any], prefix: str = '', stock: str = _STOCK) -> None:
    """Move an object to a subclass of its own class; an object that was moved before stays.

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
