"""End a training early, without the training taking it for an error."""
from __future__ import annotations

from typing import Any

__all__ = ['StopTraining', 'train_until_stopped']


class StopTraining(BaseException):
    """The iterations that were asked for are done.

    A BaseException, so that no ``except Exception`` of a hook or a model swallows it.
    """


def train_until_stopped(runner: Any) -> None:
    """``runner.train()``, which :class:`StopTraining` may end."""
    try:
        runner.train()
    except StopTraining:
        pass
