"""Run the step of an iteration twice, and stop the run if the bits differ.

On a CPU, the step runs up to where the optimizer would use its gradients. There a copy of the
process puts back what checkpoints keep and runs the step again, on a copy of the batch. The
training goes on when the copy has seen the same bits; what the copy has changed, counted or cached
is gone with it.

Where the process cannot be copied (devices, several ranks), the first pass is the one that is
thrown away. Then what checkpoints keep is put back, and the real step runs; just before the
optimizer, the attributes of the model are set to what the first pass has left: that pass began with
the state of the training, so what it counted is what the training counts.

Attributes that no checkpoint keeps are not put back between the two: a counter or a generator that
reaches the loss shows as a difference.
"""
from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Callable

from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.agreement import agree
from ..distributed.unwrap import unwrap
from ..errors import StepDiffersError
from ..fingerprint.attributes import record_attributes
from ..fingerprint.operator_recorder import OperatorRecorder
from ..fingerprint.records import Record
from ..virtual import check_shared_weights, large_blocks_apart
from .forked import Copy, CopyFailed
from .observer import Observer, PassDigests
from .state import StepState
from .step_report import report, report_unexplained

TOPIC = 'repeated step'  # what the ranks compare
CLOSURE = 'the optimizer computes the losses itself, by a closure'
LEAST, PATIENCE = 60, 20  # seconds, and times the step, that a copy has for its answer
EXPLAINING = 600  # seconds for the passes that explain a difference


class _Reached(BaseException):
    """Ends a pass where the optimizer would step; user code does not catch it."""


class StepCheck:
    """One checked step.

    Args:
        runner: Its model's step is repeated.
        paused: Contexts in which recorders do not see the passes that are thrown away.
        done: Called after the check with the runner, and why the step was not repeated, or None.
        copy_failed: Called instead, with the runner and why, if the copy gave no answer; None: the
            step is repeated in this process.
    """

    def __init__(self, runner: Any, paused: Sequence[Callable], done: Callable,
                 copy_failed: Callable | None) -> None:
        self._runner, self._paused, self._done = runner, paused, done
        self._copy_failed = copy_failed
        self._names = {id(parameter): name
                       for name, parameter in unwrap(runner.model).named_parameters()}

    @large_blocks_apart()
    def __call__(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what ``step``, the model's ``train_step``, returns.

        Raises:
            StepDiffersError: on every rank, if the bits of a pass differ on one of them.
        """
        self._step, self._args, self._kwargs = step, args, kwargs
        with _disable_current_modes():  # recorders do not see it
            problem = self._problem()
            if not problem:
                self._state = StepState(self._runner)
        if problem:
            self._done(self._runner, problem)
            return step(*args, **kwargs)
        if self._copy_failed is not None:
            return self._beside_a_copy(step, args, kwargs)
        with _disable_current_modes():
            first = self._rehearse()
        if first is None:
            self._done(self._runner, CLOSURE)
            self._forget()
            return step(*args, **kwargs)
        second: list[PassDigests] = []
        with suppress(_Reached):
            result = self._observed(partial(self._compare, first, second), args, kwargs)
            self._done(self._runner, None)
            return result
        # out of the step, so that its contexts are left and the recorded calls are the model's
        self._explain(first, second[0], self._suspects)

    def _observed(self, reached: Callable[[Any], Any], args: tuple, kwargs: dict) -> Any:
        return Observer(self._runner, reached, self._names).run(self._step, args, kwargs)

    def _problem(self) -> str:
        """Copy the batch, for further passes; return why some rank cannot, or ''.

        Models change batches in place, and datasets may hold the same objects.
        """
        try:
            self._batch = self._args, self._kwargs
            self._batch = self._copied()
            problem = ''
        except Exception as error:  # raised by whatever the user's dataset puts into a batch
            problem = f'a batch cannot be copied: {type(error).__name__}: {error}'
        return agree(TOPIC, problem, max)

    def _copied(self) -> tuple:
        wrapper = self._runner.optim_wrapper
        return copy.deepcopy(self._batch, {id(wrapper): wrapper})

    def _forget(self) -> None:
        # their memory is the optimizer's; this object lives until garbage is collected
        del self._state, self._batch, self._step, self._args, self._kwargs

    def _pass(self, recorder: OperatorRecorder | None = None,
              ending: Callable[[], None] = lambda: None) -> PassDigests:
        """Run a pass on a copy of the batch, up to where the optimizer would step."""
        computed: list[PassDigests] = []

        def reached(digests: PassDigests) -> None:
            computed.append(digests)
            ending()
            raise _Reached

        args, kwargs = self._copied()
        with ExitStack() as contexts:
            for paused in self._paused:
                contexts.enter_context(paused())
            if recorder is not None:
                contexts.enter_context(recorder)
            with suppress(_Reached):
                self._observed(reached, args, kwargs)
        return computed[0]

    # ------------------------------------------------------------ in a copy of the process

    def _beside_a_copy(self, step: Callable, args: tuple, kwargs: dict) -> Any:
        self._begun = time.monotonic()
        in_the_copy: list[tuple[Copy, PassDigests]] = []
        with suppress(_Reached):
            return self._observed(partial(self._let_repeat, in_the_copy), args, kwargs)
        process, first = in_the_copy[0]
        process.answer(partial(self._repeated, first))

    def _let_repeat(self, in_the_copy: list[tuple[Copy, PassDigests]],
                    first: PassDigests | None) -> None:
        """Let a copy of the process repeat the step, whose real pass has reached the optimizer."""
        if first is None:
            self._done(self._runner, CLOSURE)
            self._forget()
            return
        self._state.check_optimizer()
        took = time.monotonic() - self._begun
        process = Copy()
        if process.inside:
            in_the_copy.append((process, first))
            raise _Reached  # out of the contexts of the step
        try:
            second = PassDigests(**process.next(LEAST + PATIENCE * took))
            if first.differing(second):
                self._stop(process, first, second)
        except CopyFailed as error:
            self._copy_failed(self._runner, str(error))  # type: ignore[misc]
        else:
            self._done(self._runner, None)
        finally:
            process.end()
        self._forget()

    def _stop(self, process: Copy, first: PassDigests, second: PassDigests) -> None:
        try:
            text = process.next(EXPLAINING)
        except CopyFailed as error:
            report_unexplained(self._runner, first, second, f'the copy that repeats it {error}')
        raise StepDiffersError(text)

    def _repeated(self, first: PassDigests) -> Iterator[Any]:
        """Yield the digests of the second pass, then, where they differ, the message."""
        with _disable_current_modes():
            suspects = self._state.changed()
            self._state.put_back(unsaved=False)
            second = self._pass()
        yield second._asdict()
        try:
            if first.differing(second):
                self._explain(first, second, suspects)
        except StepDiffersError as error:
            yield str(error)

    # ------------------------------------------------------------------- in this process

    def _rehearse(self) -> PassDigests | None:
        """Run the pass before the step, and put back what checkpoints keep."""
        self._left: StepState | None = None
        first = self._pass(ending=self._keep_changes)
        # again: a context of the step may have changed attributes and put them back at its end
        self._suspects: list[str] = self._state.changed() if self._left is not None else []
        self._state.put_back(unsaved=False)
        return first

    def _keep_changes(self) -> None:
        """Keep what the first pass has changed, when it reaches the optimizer."""
        if self._state.changed():
            # weights as well are what the real step makes of them
            self._left = StepState(self._runner, weights=False)

    def _compare(self, first: PassDigests, differing: list[PassDigests],
                 second: PassDigests) -> None:
        """Stop the step before the optimizer if gradients or losses of the two passes differ."""
        if self._left is not None:
            # before the ranks agree: behind that, the owner of shared weights may step
            with _disable_current_modes():
                self._left.put_back()
        if self._differ(first, second):
            check_shared_weights(self._runner)  # a model that changes them itself cannot share
            differing.append(second)
            raise _Reached
        self._left = None
        self._forget()

    # ---------------------------------------------------------------------- a difference

    def _differ(self, first: PassDigests, second: PassDigests) -> bool:
        """Whether two passes differ on any rank."""
        return agree(TOPIC, bool(first.differing(second)), any)

    def _explain(self, first: PassDigests, second: PassDigests, suspects: Sequence[str]) -> None:
        """Record further passes, and stop all ranks.

        Args:
            suspects: attributes that the second pass found as the first had left them.
        """
        reaching: list[str] = []
        with _disable_current_modes():
            third = self._recorded()
            fourth = self._recorded()
            everywhere: list[str] = agree(TOPIC, list(suspects), lambda ranks: list(
                dict.fromkeys(name for rank in ranks for name in rank)))
            # passes from the same attributes agree, so these may be what differs
            if everywhere and not self._differ(third[0], fourth[0]):
                left = self._recorded(left=everywhere)
                if self._differ(third[0], left[0]):
                    fourth = left
                    reaching = self._reaching(everywhere, third[0])
            self._state.put_back()
        report(self._runner, [first, second, third[0], fourth[0]], [third[1], fourth[1]], reaching)

    def _reaching(self, names: list[str], unchanged: PassDigests) -> list[str]:
        """Return those of the attributes that change the bits when they alone are not put back.

        Others are results that the next pass writes again.
        """
        if len(names) == 1:
            return names
        half = len(names) // 2
        found = [name for part in (names[:half], names[half:])
                 if self._differ(unchanged, self._after_one_pass(part))
                 for name in self._reaching(part, unchanged)]
        return found or names

    def _after_one_pass(self, left: Sequence[str],
                        recorder: OperatorRecorder | None = None) -> PassDigests:
        """Run a pass from the state before the step, with some attributes as a pass leaves them."""
        self._state.put_back()
        if left:
            self._pass()
            self._state.put_back(left=left)
        return self._pass(recorder)

    def _recorded(self, left: Sequence[str] = ()) -> tuple[PassDigests, list[Record]]:
        if getattr(self._runner.model, 'sharding', None) is not None:
            return self._after_one_pass(left), []
        recorder = OperatorRecorder(unwrap(self._runner.model))
        record_attributes(recorder, self._runner)
        return self._after_one_pass(left, recorder), recorder.records()
