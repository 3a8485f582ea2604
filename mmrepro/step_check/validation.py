"""Compare a model before and after its validation, which must leave the training as it was."""
from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_world_size

from ..another_process import UserVariables
from ..checkpoint.fit import differing, parts_of
from ..config import RandomnessConfig
from ..digests import state_digest
from ..distributed.unwrap import unwrap
from ..distributed.virtual.scheduler import current
from ..errors import ValidationChangesError
from ..text import listed
from .attributes import Attributes

STORED = re.compile(r"\._(?:parameters|buffers)\['(.*)'\]")  # in paths of attributes


def _settings(runner: Any) -> dict[str, str]:
    """Return parts of the training and settings of torch that a validation may not change."""
    model = unwrap(runner.model)
    return {**parts_of(runner), 'the default dtype': str(torch.get_default_dtype()),
            'the number of threads': str(torch.get_num_threads()),
            **{f'the gradient of {name}': state_digest(parameter.grad)
               for name, parameter in model.named_parameters() if parameter.grad is not None}}


class ValidationCheck:
    """Compares a model before the hooks of a validation with the model after all of them.

    ``deterministic`` and ``self_checks.validation`` of the run decide: False compares nothing,
    ``'warn'`` raises nothing.
    """

    def __init__(self, config: RandomnessConfig) -> None:
        wanted = (config.deterministic, config.self_checks.validation)
        self._on, self._raises = False not in wanted, 'warn' not in wanted
        self._before: tuple[list[Attributes], UserVariables, dict[str, str]] | None = None
        self._named: set[str] = set()  # attributes that a warning has named

    def begin(self, runner: Any) -> None:
        """Remember the model. With several ranks, stock hooks may average their statistics here."""
        synchronizes = get_world_size() > 1 and any(
            type(hook).__name__ in ('SyncNormHook', 'SyncBuffersHook') for hook in runner.hooks)
        if self._on and not synchronizes:
            model = unwrap(runner.model)
            # virtual ranks share weights: the checksums of their owner watch over these; samplers
            # of MMDetection hold the global generator
            shared = [*(model.parameters() if getattr(runner.model, 'sharing', None) else ()),
                      np.random.mtrand._rand]
            averages = [hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model')]
            metrics = getattr(getattr(runner.val_loop, 'evaluator', None), 'metrics', [])
            scheduler = current()  # the ranks of a process share its variables: one looks at them
            looks = scheduler is None or scheduler.me is scheduler.ranks[0]
            users = [*model.modules(), *metrics, *runner.hooks] if looks else []
            self._before = (
                [Attributes(module, {}, (), shared) for module in (model, *averages)],
                UserVariables(users), _settings(runner))

    def end(self, runner: Any) -> None:
        """Compare the model, and forget it.

        Attributes may be caches that no training reads, so changed attributes are a warning.

        Raises:
            ValidationChangesError: parameters, buffers or the default dtype have changed.
        """
        if self._before is None:
            return
        (parts, variables, settings), self._before = self._before, None
        weights = [STORED.sub(r'.\1', path) for part in parts for path in part.changed(saved=True)]
        plain = [path for part in parts for path in part.changed()
                 if not path.endswith('.training')]
        plain += variables.changed()
        now = _settings(runner)
        weights += [f'{name} ({settings.get(name)} -> {now.get(name)})'
                    for name in differing(settings, now)]
        new = [path for path in plain if path not in self._named]
        if new:
            self._named.update(new)
            runner.logger.warning(
                f'the validation at iteration {runner.iter} has changed {listed(new)}. If the '
                'training reads it, the training depends on when it is validated')
        if weights:
            text = (f'the validation at iteration {runner.iter} has changed {listed(weights)}, and '
                    'so the training depends on when it is validated. Look for a module in '
                    'training mode, or code that writes to the model, in predictions and in hooks '
                    'of the validation')
            if self._raises:
                raise ValidationChangesError(text)
            runner.logger.warning(text)
