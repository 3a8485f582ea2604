"""Find out by doing whether a training reads what differs when samples are loaded again.

The step is taken on the batch and on its alternative, up to where the optimizer would step; both
passes are thrown away, and their losses and gradients are compared.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, Callable

from torch.utils._python_dispatch import _disable_current_modes

from ..data.sample_check import Disputed
from ..distributed.agreement import agree
from ..distributed.unwrap import unwrap
from ..errors import SampleDiffersError
from ..virtual import large_blocks_apart
from .observer import Observer, PassDigests
from .state import StepState

TOPIC = 'step on samples that were loaded again'  # what the ranks compare


class _Reached(BaseException):
    """Ends a pass where the optimizer would step; user code does not catch it."""


class BatchComparison:
    """Takes a step on a batch and on its alternative before it is taken.

    Args:
        runner: Its model's step is taken.
        paused: Contexts in which recorders do not see the passes.
        disputed: The batch; None, if only other ranks have one.
        unread: Called if losses and gradients are equal, on ranks with a disputed batch.
        step: Called with the step and its arguments afterwards; None: the step itself is called.
    """

    def __init__(self, runner: Any, paused: Sequence[Callable], disputed: Disputed | None,
                 unread: Callable[[Disputed], None], step: Callable | None) -> None:
        self._runner, self._paused, self._disputed = runner, paused, disputed
        self._unread, self._then = unread, step

    def __call__(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what ``step``, the model's ``train_step``, returns.

        Raises:
            SampleDiffersError: on every rank, if losses or gradients differ on one of them.
        """
        if agree(TOPIC, self._disputed is not None, any):
            self._compare(step, args, kwargs)
        return step(*args, **kwargs) if self._then is None else self._then(step, *args, **kwargs)

    @large_blocks_apart()
    def _compare(self, step: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        disputed = self._disputed
        swapped = (args, kwargs) if disputed is None else disputed.swapped(args, kwargs)
        with _disable_current_modes():  # recorders do not see it
            state = StepState(self._runner)
            try:
                passes = [self._pass(step, state, *given) for given in ((args, kwargs), swapped)]
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

    def _pass(self, step: Callable, state: StepState, args: tuple, kwargs: dict[str, Any]
              ) -> PassDigests | None:
        """Run a pass up to the optimizer, on copies of its arguments, and put the run back."""
        wrapper = self._runner.optim_wrapper
        args, kwargs = copy.deepcopy((args, kwargs), {id(wrapper): wrapper})
        names = {id(parameter): name
                 for name, parameter in unwrap(self._runner.model).named_parameters()}
        computed: list[PassDigests | None] = []

        def reached(digests: PassDigests | None) -> None:
            computed.append(digests)
            raise _Reached

        with ExitStack() as contexts:
            for paused in self._paused:
                contexts.enter_context(paused())
            with suppress(_Reached):
                Observer(self._runner, reached, names).run(step, args, kwargs)
        state.put_back()
        return computed[0]
