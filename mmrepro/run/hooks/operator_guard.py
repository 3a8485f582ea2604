"""Watch some training steps for operators that are not known to repeat."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...config import is_due
from ...errors import ConfigError, UnknownOperatorError
from ...ops.guard import OperatorGuard
from ...util.scoped import around_next_step


@HOOKS.register_module()
class OperatorGuardHook(Hook):
    """Report, once each, operators that are not known to be deterministic.

    Iterations 1, 2, 4, 8, ... of the run are watched: a step that takes another path later (masks,
    a head that starts late) is still seen, and the cost vanishes. Registered by every run with
    ``deterministic=True`` or ``'warn'``; put it into ``custom_hooks`` to change its settings.

    Args:
        allow: Operators known to repeat, by the name under which they are reported.
        on_unknown: 'warn' logs; 'error' raises :class:`UnknownOperatorError` after the step.
        devices: Types of devices that count.

    Raises:
        ValueError: for another ``on_unknown``.
    """
    priority = 95  # behind everything that prepares the step

    def __init__(self, allow: Sequence[str] = (), on_unknown: str = 'warn',
                 devices: Sequence[str] = ('cuda',)) -> None:
        if on_unknown not in ('warn', 'error'):
            raise ConfigError(f"OperatorGuardHook: on_unknown={on_unknown!r}: expected 'warn' "
                              "or 'error'")
        self._allow, self._devices = tuple(allow), tuple(devices)
        self._error = on_unknown == 'error'
        self._guard: OperatorGuard | None = None
        self._done = 0

    def before_train(self, runner: Any) -> None:
        self._done = 0
        present = {parameter.device.type for parameter in runner.model.parameters()}
        if present & set(self._devices):
            self._guard = OperatorGuard(
                runner.model, self._devices, self._allow,
                None if self._error else lambda operator: runner.logger.warning(str(operator)))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._done += 1
        if self._guard is not None and is_due(self._done):
            around_next_step(runner.model, self._guard.watched)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if self._error and self._guard is not None and self._guard.findings:
            raise UnknownOperatorError('\n'.join(map(str, self._guard.findings)))
