"""Replace a model's ``train_step`` for one call."""
from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Callable

from torch import nn

from ..scoped import replaced


def around_next_step(model: nn.Module, around: Callable) -> None:
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
