"""End, kill or validate a training at a chosen iteration."""
from __future__ import annotations

import os
import signal
from typing import Any

from mmengine.hooks import Hook

from ..errors import TooShortError


class StopTraining(BaseException):
    """Raised when the requested iterations are done.

    A BaseException, so that no ``except Exception`` of a hook or a model swallows it. ``done`` is
    their number where the loop has not counted the last one yet, because its hooks still run.
    """

    def __init__(self, done: int | None = None) -> None:
        super().__init__(done)
        self.done = done


class InterruptHook(Hook):
    """Ends, kills or validates a training after a number of iterations.

    With ``whole``, a training that has fewer iterations does not begin.
    """
    priority = 100  # after the checkpoint of the iteration is written
    validated = False  # whether it has validated; recordings of an iteration say it

    def __init__(self, stop_after: int | None = None, kill_after: int | None = None,
                 validate_after: int | None = None, whole: bool = False) -> None:
        self._stop, self._kill, self._validate = stop_after, kill_after, validate_after
        self._whole = whole

    def before_train(self, runner: Any) -> None:
        if self._whole and self._stop is not None and runner.max_iters < self._stop:
            raise TooShortError(f'this config, as trained here, ends after {runner.max_iters} '
                                'iterations')

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        done = runner.iter + 1
        if done == self._validate:
            runner.val_loop.run()
            runner.model.train()
            self.validated = True
        if done == self._stop:
            raise StopTraining(done)
