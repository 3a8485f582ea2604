"""Attributes that have another value inside a block, or until a call."""
from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
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
