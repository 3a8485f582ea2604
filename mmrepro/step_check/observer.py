"""What one pass of a step computes: losses and gradients, up to where the optimizer uses them."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.unwrap import optim_wrappers, unwrap
from ..fingerprint.digest import hex_of
from ..fingerprint.snapshot import Snapshot, gradients_of

# what is compared, in causal order, and how a message calls a part of it
FIELDS = {
    'losses': 'loss {}',
    'gradients': 'gradient of {}',
    'sums': 'gradient of {}, added up over ranks and accumulated iterations',
}


class PassDigests(NamedTuple):
    """Losses as exact hexadecimal floats, digests of gradients in the order of the backward pass,
    digests of the gradients that the optimizer would get.
    """
    losses: dict[str, str]
    gradients: dict[str, str]
    sums: dict[str, str]

    def differing(self, other: PassDigests) -> dict[str, list[str]]:
        """Names by field; the nearest to the cause first."""
        found = {}
        for field in FIELDS:
            first, second = getattr(self, field), getattr(other, field)
            names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
            if names:
                found[field] = names
        return found


class replaced:
    """A context in which an object has another attribute, whatever it had of its own before."""

    def __init__(self, obj: Any, name: str, value: Any) -> None:
        self._obj, self._name, self._value = obj, name, value

    def __enter__(self) -> None:
        own = vars(self._obj)
        self._before = (own[self._name], ) if self._name in own else ()
        own[self._name] = self._value

    def __exit__(self, *error: Any) -> None:
        own = vars(self._obj)
        if self._before:
            own[self._name] = self._before[0]
        else:
            own.pop(self._name, None)


class Observer:
    """Watches one pass of a runner's step, from :meth:`start` on.

    Args:
        reached: called once with the digests, before an optimizer steps and before gradients are
            unscaled or clipped. By then nothing is watched any more.
    """

    def __init__(self, runner: Any, reached: Callable[[PassDigests], Any]) -> None:
        self._model = unwrap(runner.model)
        self._wrappers = list(optim_wrappers(runner.optim_wrapper).values())
        self._reached = reached
        self._snapshot: Snapshot | None = Snapshot()
        self._names = {id(one): name for name, one in self._model.named_parameters()}
        self._counts: Counter = Counter()
        self._changes: list[replaced] = []
        self._handles: list[Any] = []

    def start(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(partial(self._gradient, name)))
        if hasattr(self._model, 'parse_losses'):
            self._replace(self._model, 'parse_losses', self._parsed)
        for wrapper in self._wrappers:
            self._replace(wrapper, 'backward', self._backward)
            self._replace(wrapper, 'step', self._before)
            # a model may call the optimizer itself
            optimizer = wrapper.optimizer
            if hasattr(optimizer, 'register_step_pre_hook'):
                self._handles.append(optimizer.register_step_pre_hook(
                    lambda *args: self.finish()))

    def finish(self) -> None:
        """The pass has come to its end, or to the optimizer. Only the first call counts."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        self.stop()
        with _disable_current_modes():
            snapshot.add('sums', gradients_of(self._names, list(self._model.parameters())))
            found = snapshot.fetch()
        digests = [{name: hex_of(value) for name, value in found.digests.get(field, {}).items()}
                   for field in ('gradients', 'sums')]
        self._reached(PassDigests(found.floats('losses'), *digests))

    def stop(self) -> None:
        """Watch no longer."""
        self._snapshot = None
        for change in reversed(self._changes):
            change.__exit__()
        for handle in self._handles:
            handle.remove()
        self._changes, self._handles = [], []

    # ------------------------------------------------------------------- what calls come through

    def _replace(self, obj: Any, name: str, watched: Callable) -> None:
        change = replaced(obj, name, partial(watched, getattr(obj, name)))
        change.__enter__()
        self._changes.append(change)

    def _parsed(self, parse_losses: Callable, *args: Any, **kwargs: Any) -> Any:
        result = parse_losses(*args, **kwargs)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            self._losses(result[1])
        return result

    def _backward(self, backward: Callable, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._losses({'(backward)': loss})
        return backward(loss, *args, **kwargs)

    def _before(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        self.finish()
        return step(*args, **kwargs)

    def _losses(self, losses: Mapping[str, Any]) -> None:
        numbers: list[tuple[str, Any]] = [
            (self._unique('loss', name), value) for name, value in losses.items()
            if isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1)]
        if self._snapshot is not None and numbers:
            with _disable_current_modes():
                self._snapshot.add_numbers('losses', *zip(*numbers))

    def _gradient(self, name: str, gradient: torch.Tensor) -> None:
        if self._snapshot is not None:
            with _disable_current_modes():
                self._snapshot.add('gradients', [
                    (self._unique('gradient', name), gradient.detach())])

    def _unique(self, kind: str, name: str) -> str:
        # several losses in an iteration; reentrant checkpointing runs a backward pass in parts
        before = self._counts[kind, name]
        self._counts[kind, name] += 1
        return f'{name}@{before}' if before else name
