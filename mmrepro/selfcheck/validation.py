"""Compare a model before and after its validation, which must leave the training as it was."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.dist import get_world_size

from ..checkpoint.fit import differing, parts_of
from ..config import RandomnessConfig
from ..distributed.unwrap import unwrap
from ..errors import ValidationChangesError
from ..facts.known_hooks import AVERAGES_AT_EPOCH_END, AVERAGES_AT_VALIDATION, plays
from ..objects.digests import state_digest
from ..util.text import listed
from .state import Attributes

# settings of the process that are put back: how to read and set them
PUT_BACK: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    'the default dtype': (torch.get_default_dtype, torch.set_default_dtype),
    'the number of threads': (torch.get_num_threads, torch.set_num_threads),
}
STORED = re.compile(r"\._(?:parameters|buffers)\['(.*)'\]")  # in paths of attributes


class _Changes(NamedTuple):
    """Differences from before a validation: by name, the text for a message."""
    weights: Mapping[str, str]
    attributes: Mapping[str, str]

    def still(self, now: _Changes) -> _Changes:
        """Return those of ``now`` that were there before: others are changes of hooks."""
        return _Changes(*({name: text for name, text in new.items() if name in old}
                          for old, new in zip(self, now)))


class _Before:
    """The models and settings before a validation."""

    def __init__(self, runner: Any) -> None:
        model = unwrap(runner.model)
        # virtual ranks share weights: the checksums of their owner watch over these; samplers of
        # MMDetection hold the global generator
        shared = [*(model.parameters() if getattr(runner.model, 'sharing', None) else ()),
                  np.random.mtrand._rand]
        # a hook of the user's may make its average later, or keep something else by this name
        averages = [hook.ema_model for hook in runner.hooks
                    if isinstance(getattr(hook, 'ema_model', None), torch.nn.Module)]
        self._models = [Attributes(module, {}, (), shared) for module in (model, *averages)]
        self._settings = _settings(runner)
        self._process = {name: get() for name, (get, _) in PUT_BACK.items()}

    def put_back(self) -> list[str]:
        """Put settings of the process back; return those that had changed, with their values."""
        found = []
        for name, (get, set_value) in PUT_BACK.items():
            before, now = self._process[name], get()
            if now != before:
                set_value(before)
                found.append(f'{name} ({before} -> {now})')
        return found

    def changes(self, runner: Any) -> _Changes:
        weights = {path: STORED.sub(r'.\1', path)
                   for model in self._models for path in model.changed(saved=True)}
        now = _settings(runner)
        weights.update((name, f'{name} ({self._settings.get(name)} -> {now.get(name)})')
                       for name in differing(self._settings, now))
        return _Changes(weights, {path: path for model in self._models for path in model.changed()
                                  if not path.endswith('.training')})

    def made_by_train(self, runner: Any, names: Iterable[str]) -> set[str]:
        """Return those of the changes that ``model.train()`` makes without a validation.

        A backbone freezes its ``frozen_stages`` again whenever the loop calls ``train()``; a hook
        may have unfrozen them before.
        """
        parameters = {f'frozen.{name}': parameter for name, parameter in
                      unwrap(runner.model).named_parameters(remove_duplicate=False)}
        now = {name: parameters[name].requires_grad for name in names if name in parameters}
        for name in now:
            parameters[name].requires_grad_(name not in self._settings)
        if now:
            runner.model.train()
        made = {name for name, trained in now.items() if parameters[name].requires_grad == trained}
        for name, trained in now.items():
            parameters[name].requires_grad_(trained)
        return made


def _settings(runner: Any) -> dict[str, str]:
    """Return parts of the training and settings of torch that a validation may not change."""
    model = unwrap(runner.model)
    return {**parts_of(runner), **{f'the gradient of {name}': state_digest(parameter.grad)
               for name, parameter in model.named_parameters() if parameter.grad is not None}}


class ValidationCheck:
    """Compares a model before the hooks of a validation with the model that trains on.

    ``eval()`` may merge or exchange weights that ``train()`` puts back, so what has changed after a
    validation is looked at again when the training goes on. ``deterministic`` and
    ``self_checks.validation`` of the run decide: False compares nothing, 'warn' raises nothing.
    """

    def __init__(self, config: RandomnessConfig) -> None:
        wanted = (config.deterministic, config.self_checks.validation)
        self._on, self._raises = False not in wanted, 'warn' not in wanted
        self._training = False
        self._before: _Before | None = None
        self._seen: _Changes | None = None  # after the validation
        self._where = ''
        self._named: set[str] = set()  # attributes that a warning has named

    def training_begins(self) -> None:
        """Compare from here on: what follows a validation outside of a training is no training."""
        self._training, self._before, self._seen = True, None, None

    def begin(self, runner: Any) -> None:
        """Remember the model. With several ranks, stock hooks may average their statistics here."""
        synchronizes = get_world_size() > 1 and any(
            plays(type(hook), AVERAGES_AT_VALIDATION, AVERAGES_AT_EPOCH_END)
            for hook in runner.hooks)
        # of two validations without a training between them, the first counts, unless an error has
        # ended it
        if self._on and self._training and not synchronizes and self._seen is None:
            self._before = _Before(runner)

    def end(self, runner: Any) -> None:
        """Look at the model, and forget it where nothing has changed.

        Settings of the process are put back: a run without this validation has them.
        """
        if self._before is not None:
            self._where = f'the validation at iteration {runner.iter}'
            left = self._before.put_back()
            if left:
                runner.logger.warning(
                    f'{self._where} has left {listed(left)} behind; the training goes on with '
                    'what it had before, as without a validation')
            self._seen = self._before.changes(runner)
            if not any(self._seen):
                self._before = self._seen = None

    def training_goes_on(self, runner: Any) -> None:
        """Report the changes of a validation, when the loop has called ``model.train()``.

        Attributes may be caches that no training reads, so changed attributes are a warning.

        Raises:
            ValidationChangesError: parameters, buffers or parts of the training have changed.
        """
        if self._before is None or self._seen is None:
            self._before = None  # an error has ended the validation
            return
        changed = self._seen.still(self._before.changes(runner))
        made = self._before.made_by_train(runner, changed.weights)
        self._before = self._seen = None
        new = [path for path in changed.attributes if path not in self._named]
        if new:
            self._named.update(new)
            runner.logger.warning(f'{self._where} has changed {listed(new)}. If the training reads '
                                  'it, the training depends on when it is validated')
        found = [text for name, text in changed.weights.items() if name not in made]
        if found:
            text = (f'{self._where} has changed {listed(found)}, and so '
                    'the training depends on when it is validated. Look for a module in training '
                    'mode, or code that writes to the model, in predictions and in hooks of the '
                    'validation. A hook that is to react to metrics keeps them in '
                    'runner.message_hub and changes the model in before_train_epoch. To train on '
                    'without this check: '
                    'randomness.self_checks=dict(validation=False)')
            if self._raises:
                raise ValidationChangesError(text)
            runner.logger.warning(text)

    def training_ends(self, runner: Any) -> None:
        """Report the changes of the last validation, as a longer training would find them."""
        if self._seen is not None:
            runner.model.train()
            self.training_goes_on(runner)
            runner.model.eval()
        self._training = False
