"""Compare a model before and after its validation, which must leave the training as it was."""
from __future__ import annotations

from typing import Any

import torch

from ..distributed.unwrap import unwrap
from ..errors import TrainingError
from ..text import listed
from .attributes import Attributes


class ValidationChangesError(TrainingError):
    """A validation has changed what the training goes on with."""


class ValidationCheck:
    """Compares a model with itself before all hooks of a validation and behind them.

    Args:
        on: ``deterministic`` of the run; False compares nothing, ``'warn'`` raises nothing.
    """

    def __init__(self, on: bool | str) -> None:
        self._on = on
        self._before: tuple[Attributes, torch.dtype] | None = None
        self._named: set[str] = set()  # attributes that a warning has named

    def begin(self, runner: Any) -> None:
        """Remember the model."""
        if self._on:
            model = unwrap(runner.model)
            # virtual ranks share weights: the checksums of their owner watch over these
            shared = model.parameters() if getattr(runner.model, 'sharing', None) else ()
            self._before = Attributes(model, {}, (), shared), torch.get_default_dtype()

    def end(self, runner: Any) -> None:
        """Compare the model, and forget it.

        Attributes may be caches that no training reads, so changed attributes are a warning.

        Raises:
            ValidationChangesError: parameters, buffers or the default dtype have changed.
        """
        if self._before is None:
            return
        (attributes, dtype), self._before = self._before, None
        weights = attributes.changed(saved=True)
        plain = [path for path in attributes.changed() if not path.endswith('.training')]
        if torch.get_default_dtype() is not dtype:
            weights.append(f'the default dtype ({dtype} -> {torch.get_default_dtype()})')
        new = [path for path in plain if path not in self._named]
        if new:
            self._named.update(new)
            runner.logger.warning(
                f'the validation at iteration {runner.iter} has changed {listed(new)} of the '
                'model. If the training reads it, the training depends on when it is validated')
        if weights:
            text = (f'the validation at iteration {runner.iter} has changed {listed(weights)}, and '
                    'so the training depends on when it is validated. Look for a module in '
                    'training mode, or code that writes to the model, in predictions and in hooks '
                    'of the validation')
            if self._on is True:
                raise ValidationChangesError(text)
            runner.logger.warning(text)
