"""Run the step of an iteration twice, and stop the run if the bits differ.

The first pass works on a copy of the batch, under the id of another process, and ends where the
optimizer would step. Then what checkpoints keep is put back, and the real step runs; its losses and
gradients are compared with those of the first pass before the optimizer uses them. The training has
the bits that it has without the check.

Attributes that no checkpoint keeps are not put back: the step finds them as the first pass has left
them, so a counter or a generator that reaches the loss shows as a difference. When the bits agree,
everything is set to what the first pass left, just before the optimizer steps: that pass began with
the state of the training, so what it counted is what the training counts.
"""
from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Callable

from torch.utils._python_dispatch import _disable_current_modes

from ..another_process import other_ids
from ..diagnosis.attributes import record_attributes
from ..distributed.agreement import agree
from ..distributed.unwrap import unwrap
from ..distributed.virtual.heap import large_blocks_apart
from ..distributed.virtual.scheduler import current
from ..fingerprint.operator_recorder import OperatorRecorder
from ..fingerprint.records import Record
from .observer import Observer, PassDigests
from .report import report, report_lost
from .state import StartAttributes, StepState

TOPIC = 'repeated step'  # what the ranks compare


class _Reached(BaseException):
    """Ends a pass where the optimizer would step; user code does not catch it."""


class StepCheck:
    """One checked step.

    Args:
        runner: Its model's step is repeated.
        paused: Contexts in which recorders do not see the passes that are thrown away.
        done: Called after the check with the runner, and why the step was not repeated, or None.
        start: Attributes at the start of the training: the step is also taken as a resumed run
            would take it.
    """

    def __init__(self, runner: Any, paused: Sequence[Callable], done: Callable,
                 start: StartAttributes) -> None:
        self._runner, self._paused, self._done, self._start = runner, paused, done, start
        self._names = {id(parameter): name
                       for name, parameter in unwrap(runner.model).named_parameters()}
        # virtual ranks take turns within a pass, and share the numbers of a process
        self._elsewhere: Callable = other_ids if current() is None else nullcontext

    @large_blocks_apart()
    def __call__(self, step: Callable, *args: Any, **kwargs: Any) -> Any:
        """Return what ``step``, the model's ``train_step``, returns.

        Raises:
            StepDiffersError: on every rank, if the bits of a pass differ on one of them.
        """
        self._step, self._args, self._kwargs = step, args, kwargs
        with _disable_current_modes():  # recorders do not see it
            problem = self._problem()
            first = None if problem else self._rehearse()
        if first is None:
            self._done(self._runner, problem)
            return step(*args, **kwargs)
        second: list[PassDigests] = []
        with suppress(_Reached):
            result = Observer(
                self._runner, partial(self._compare, first, second), self._names).run(
                    step, args, kwargs)
            self._done(self._runner, None)
            return result
        # out of the step, so that its contexts are left and the recorded calls are the model's
        self._explain(first, second[0])

    def _rehearse(self) -> PassDigests:
        """Run the pass before the step, and put back what checkpoints keep."""
        self._state = StepState(self._runner)
        self._left: StepState | None = None
        lost = self._start.lost()
        resumed = self._as_resumed(lost) if agree(TOPIC, bool(lost), any) else None
        first = self._pass(ending=self._keep_changes, context=self._elsewhere)
        if resumed is not None and self._differ(resumed, first):
            report_lost(self._runner, resumed, first, lost)
        # again: a context of the step may have changed attributes and put them back at its end
        self._suspects: list[str] = self._state.changed() if self._left is not None else []
        self._state.put_back(unsaved=False)
        return first

    def _as_resumed(self, lost: Sequence[str]) -> PassDigests:
        """Run a pass with the attributes that a run has which resumes here."""
        with self._start.as_resumed(lost):
            self._state.put_back_saved_by_code()
            resumed = self._pass()
        self._state.put_back()
        return resumed

    def _keep_changes(self) -> None:
        """Keep what the first pass has changed, when it reaches the optimizer."""
        changed = self._state.changed()
        if changed:
            # weights as well are what the real step makes of them
            self._left = StepState(self._runner, weights=False)
        self._start.note([*changed, *self._state.changed_variables()])

    def _problem(self) -> str:
        """Return why the batch of some rank cannot be given to a second pass; '' if it can."""
        try:
            self._copied()
            problem = ''
        except Exception as error:  # raised by whatever the user's dataset puts into a batch
            problem = f'a batch cannot be copied: {type(error).__name__}: {error}'
        return agree(TOPIC, problem, max)

    def _pass(self, recorder: OperatorRecorder | None = None,
              ending: Callable[[], None] = lambda: None,
              context: Callable = nullcontext) -> PassDigests:
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
            with suppress(_Reached), context():
                Observer(self._runner, reached, self._names).run(self._step, args, kwargs)
        return computed[0]

    def _compare(self, first: PassDigests, differing: list[PassDigests],
                 second: PassDigests) -> None:
        """Stop the step before the optimizer if gradients or losses of the two passes differ."""
        if self._left is not None:
            # before the ranks agree: behind that, the owner of shared weights may step
            with _disable_current_modes():
                self._left.put_back()
        if self._differ(first, second):
            differing.append(second)
            raise _Reached
        # their memory is the optimizer's; this object lives until garbage is collected
        del self._state, self._left, self._step, self._args, self._kwargs

    def _differ(self, first: PassDigests, second: PassDigests) -> bool:
        """Whether two passes differ on any rank."""
        return agree(TOPIC, bool(first.differing(second)), any)

    def _explain(self, first: PassDigests, second: PassDigests) -> None:
        """Record two or three more passes, and stop all ranks."""
        suspects = None
        with _disable_current_modes():
            self._state.put_back()
            third = self._recorded(self._elsewhere)
            self._state.put_back()
            fourth = self._recorded()
            # passes from the same attributes agree, so these may be what differs
            if agree(TOPIC, bool(self._suspects), any) and not self._differ(third[0], fourth[0]):
                self._state.put_back(unsaved=False)
                fourth = self._recorded()
                suspects = self._suspects if self._differ(third[0], fourth[0]) else None
            self._state.put_back()
        report(self._runner, [first, second, third[0], fourth[0]], [third[1], fourth[1]], suspects)

    def _recorded(self, context: Callable = nullcontext) -> tuple[PassDigests, list[Record]]:
        if getattr(self._runner.model, 'sharding', None) is not None:
            return self._pass(context=context), []
        recorder = OperatorRecorder(unwrap(self._runner.model))
        record_attributes(recorder, self._runner)
        return self._pass(recorder, context=context), recorder.records()

    def _copied(self) -> tuple:
        """Copy the batch: models change it in place, and datasets may hold the same objects."""
        wrapper = self._runner.optim_wrapper
        return copy.deepcopy((self._args, self._kwargs), {id(wrapper): wrapper})
