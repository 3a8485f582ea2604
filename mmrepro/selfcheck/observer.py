"""Digest the losses and gradients of one pass of a step, up to where the optimizer uses them.

Two passes tell whether a training reads what differs when samples are loaded again: the step is
taken on the batch and on its alternative, both passes are thrown away, and their digests are
compared.
"""
from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..data.sample_check import Disputed
from ..distributed.agreement import agree
from ..distributed.unwrap import names_of_parameters, optim_wrappers, takes_closure, unwrap
from ..errors import SampleDiffersError
from ..fingerprint.digest import Snapshot, gradients_of, hex_of
from ..fingerprint.divergence import differing_names
from ..objects.digests import local_part
from ..util.scoped import replaced
from ..virtual import large_blocks_apart
from .state import StepState

# compared fields, in causal order, and the text of a part in a message
FIELDS = {
    'losses': '{}',
    'gradients': 'gradient of {}',
    'sums': 'gradient of {}, added up over ranks and accumulated iterations',
}
ADDED = 'loss'  # MMEngine adds up what has this in its name; the rest is only logged
BACKWARD = 'loss (backward)'  # the gradient that the backward pass begins with


class PassDigests(NamedTuple):
    """Losses as exact hexadecimal floats, digests of gradients in the order of the backward pass,
    digests of the gradients that the optimizer would get.
    """
    losses: dict[str, str]
    gradients: dict[str, str]
    sums: dict[str, str]

    def differing(self, other: PassDigests) -> dict[str, list[str]]:
        """Return the names that differ, by field; the nearest to the cause first."""
        differing = {}
        for field in FIELDS:
            first, second = getattr(self, field), getattr(other, field)
            names = differing_names(first, second)
            if names:
                differing[field] = [*names]
        return differing


class Observer:
    """Watches one pass of a runner's step.

    Args:
        reached: called once with the digests, when the pass reaches the optimizer: before
            gradients are unscaled or clipped. By then nothing is watched any more. Called with
            None if the optimizer itself computes the losses, by a closure.
        names: of parameters, by id, which stay when a pass gives a parameter another name.
    """

    def __init__(self, runner: Any, reached: Callable[[PassDigests | None], Any],
                 names: Mapping[int, str]) -> None:
        self._model = unwrap(runner.model)
        self._wrappers = list(optim_wrappers(runner.optim_wrapper).values())
        self._reached = reached
        self._snapshot: Snapshot | None = Snapshot()
        self._names = {**names_of_parameters(self._model), **names}
        self._counts: Counter[Any] = Counter()
        self._watching = ExitStack()

    def run(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watch a call of ``step``, the ``train_step`` of the runner's model."""
        with self._watching:
            self._watch()
            result = step(*args, **kwargs)
            self.finish()  # an iteration that only accumulates
        return result

    def _watch(self) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(
                    partial(self._gradient, self._names[id(parameter)]))
                self._watching.callback(handle.remove)
        if hasattr(self._model, 'parse_losses'):
            self._replace(self._model, 'parse_losses', self._parse_losses)
        for wrapper in self._wrappers:
            self._replace(wrapper, 'backward', self._backward)
            self._replace(wrapper, 'step', self._step)
            # a model may call the optimizer itself
            handle = wrapper.optimizer.register_step_pre_hook(self._before_step)
            self._watching.callback(handle.remove)

    def _replace(self, owner: Any, name: str, watched: Callable[..., Any]) -> None:
        self._watching.enter_context(replaced(
            owner, **{name: partial(watched, getattr(owner, name))}))

    def finish(self) -> None:
        """Digest the losses and gradients of the pass, once: at its end or at the optimizer."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            return
        self._watching.close()
        with _disable_current_modes():
            snapshot.add('sums', [(name, local_part(gradient)) for name, gradient in gradients_of(
                self._names, list(self._model.parameters()))])
            content = snapshot.fetch()
        digests = [{name: hex_of(value) for name, value in content.bits.get(field, {}).items()}
                   for field in ('gradients', 'sums')]
        self._reached(PassDigests(content.floats('losses'), *digests))

    # ----------------------------------------------------------------------- watched calls

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
                     ) -> None:
        if not takes_closure(args, kwargs):
            self.finish()
        elif self._snapshot is not None:
            self._snapshot = None
            self._watching.close()
            self._reached(None)

    def _parse_losses(self, parse_losses: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = parse_losses(*args, **kwargs)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            self._losses(result[1])
        return result

    def _backward(self, backward: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._losses({BACKWARD: loss})
        return backward(loss, *args, **kwargs)

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.finish()
        return step(*args, **kwargs)

    def _losses(self, losses: Mapping[str, Any]) -> None:
        numbers: list[tuple[str, Any]] = [
            (self._unique('loss', name), value) for name, value in losses.items()
            if ADDED in name and (isinstance(value, (int, float)) or (
                isinstance(value, torch.Tensor) and value.numel() == 1))]
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
        seen = self._counts[kind, name]
        self._counts[kind, name] += 1
        return f'{name}@{seen}' if seen else name


TOPIC = 'step on samples that were loaded again'  # of the ranks' agreement


class Reached(BaseException):
    """Ends a pass where the optimizer would step; user code does not catch it."""


Batch = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a step


def copied(runner: Any, batch: Batch) -> Batch:
    """Return a copy of a step's arguments: models change batches in place."""
    wrapper = runner.optim_wrapper
    return copy.deepcopy(batch, {id(wrapper): wrapper})


def rehearsed(runner: Any, names: Mapping[int, str], step: Callable[..., Any], batch: Batch,
              contexts: Sequence[Callable[[], Any]], ending: Callable[[], None] = lambda: None
              ) -> PassDigests | None:
    """Run a pass on a copy of the batch, up to where the optimizer would step.

    Args:
        names: as for :class:`Observer`.
        contexts: entered around the pass.
        ending: called when the pass has come to its end.

    Returns:
        The digests; None if the optimizer itself computes the losses, by a closure.
    """
    computed: list[PassDigests | None] = []

    def reached(digests: PassDigests | None) -> None:
        computed.append(digests)
        ending()
        raise Reached

    args, kwargs = copied(runner, batch)
    with ExitStack() as entered:
        for context in contexts:
            entered.enter_context(context())
        with suppress(Reached):
            Observer(runner, reached, names).run(step, args, kwargs)
    return computed[0]


class BatchComparison:
    """Takes a step on a batch and on its alternative before it is taken.

    Args:
        runner: Its model's step is taken.
        paused: Contexts in which recorders do not see the passes.
        disputed: The batch; None, if only other ranks have one.
        unread: Called if losses and gradients are equal, on ranks with a disputed batch.
        step: Called with the step and its arguments afterwards; None: the step itself is called.
    """

    def __init__(self, runner: Any, paused: Sequence[Callable[..., Any]], disputed: Disputed | None,
                 unread: Callable[[Disputed], None], step: Callable[..., Any] | None) -> None:
        self._runner, self._paused, self._disputed = runner, paused, disputed
        self._unread, self._then = unread, step

    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what ``step``, the model's ``train_step``, returns.

        Raises:
            SampleDiffersError: on every rank, if losses or gradients differ on one of them.
        """
        if agree(TOPIC, self._disputed is not None, any):
            self._compare(step, args, kwargs)
        return step(*args, **kwargs) if self._then is None else self._then(step, *args, **kwargs)

    @large_blocks_apart()
    def _compare(self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
                 ) -> None:
        disputed = self._disputed
        swapped = (args, kwargs) if disputed is None else disputed.swapped(args, kwargs)
        with _disable_current_modes():  # recorders do not see it
            state, names = StepState(self._runner), names_of_parameters(unwrap(self._runner.model))
            passes = []
            try:
                for batch in ((args, kwargs), swapped):
                    passes.append(rehearsed(self._runner, names, step, batch, self._paused))
                    state.put_back()
            except Exception as error:
                if disputed is None:
                    raise
                # the alternative cannot be trained on, or a batch cannot be copied
                raise SampleDiffersError(disputed.message) from error
        first, second = passes
        # of an optimizer with a closure nothing can be seen
        differ = first is None or second is None or bool(first.differing(second))
        message = disputed.message if disputed is not None and differ else ''
        message = agree(TOPIC, message, max)
        if message:
            raise SampleDiffersError(message)
        if disputed is not None:
            self._unread(disputed)
