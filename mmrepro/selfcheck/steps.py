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
reaches the loss shows as a difference. A step that differs ends the run with a message, and leaves
a file with the digests.
"""
from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Callable, NoReturn

from mmengine.dist import get_rank
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.agreement import agree
from ..distributed.unwrap import names_of_parameters, unwrap
from ..errors import StepDiffersError
from ..fingerprint.attributes import record_attributes
from ..fingerprint.operator_recorder import OperatorRecorder
from ..fingerprint.records import PHASES, Record
from ..fingerprint.schema import FOLDER
from ..util.text import listed
from ..virtual import check_shared_weights, large_blocks_apart
from . import Diagnosis, diagnose
from .forked import Copy, CopyFailed
from .observer import FIELDS, Observer, PassDigests, Reached, copied, rehearsed
from .state import StepState

TOPIC = 'repeated step'  # of the ranks' agreement
CLOSURE = 'the optimizer computes the losses itself, by a closure'
LEAST, PATIENCE = 60, 20  # seconds, and times the step, that a copy has for its answer
EXPLAINING = 600  # seconds for the passes that explain a difference


class StepCheck:
    """One checked step.

    Args:
        runner: Its model's step is repeated.
        paused: Contexts in which recorders do not see the passes that are thrown away.
        done: Called after the check with the runner, and why the step was not repeated, or None.
        copy_failed: Called instead, with the runner and why, if the copy gave no answer; None: the
            step is repeated in this process.
    """

    def __init__(self, runner: Any, paused: Sequence[Callable[..., Any]], done: Callable[..., Any],
                 copy_failed: Callable[..., Any] | None) -> None:
        self._runner, self._paused, self._done = runner, paused, done
        self._copy_failed = copy_failed
        self._names = names_of_parameters(unwrap(runner.model))

    @large_blocks_apart()
    def __call__(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of ``step``, the model's ``train_step``.

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
            return self._beside_a_copy()
        with _disable_current_modes():
            first = self._rehearse()
        if first is None:
            self._done(self._runner, CLOSURE)
            self._forget()
            return step(*args, **kwargs)
        second: list[PassDigests] = []
        with suppress(Reached):
            result = self._observed(partial(self._compare, first, second))
            self._done(self._runner, None)
            return result
        # out of the step, so that its contexts are left and the recorded calls are the model's
        self._explain(first, second[0], self._suspects)

    def _observed(self, reached: Callable[[Any], Any]) -> Any:
        observer = Observer(self._runner, reached, self._names)
        return observer.run(self._step, self._args, self._kwargs)

    def _problem(self) -> str:
        """Copy the batch, for further passes; return why some rank cannot, or ''.

        Models change batches in place, and datasets may hold the same objects.
        """
        try:
            self._batch = copied(self._runner, (self._args, self._kwargs))
            problem = ''
        except Exception as error:  # raised by whatever the user's dataset puts into a batch
            problem = f'a batch cannot be copied: {type(error).__name__}: {error}'
        anyone: str = agree(TOPIC, problem, max)
        return anyone

    def _forget(self) -> None:
        # their memory is the optimizer's; this object lives until garbage is collected
        del self._state, self._batch, self._step, self._args, self._kwargs

    def _pass(self, recorder: OperatorRecorder | None = None,
              ending: Callable[[], None] = lambda: None) -> PassDigests:
        contexts = [*self._paused]
        if recorder is not None:
            contexts.append(lambda: recorder)
        digests: Any = rehearsed(self._runner, self._names, self._step, self._batch, contexts,
                                 ending)
        found: PassDigests = digests  # None only in `_rehearse`, which asks
        return found

    # ------------------------------------------------------------ in a copy of the process

    def _beside_a_copy(self) -> Any:
        self._begun = time.monotonic()
        in_the_copy: list[tuple[Copy, PassDigests]] = []
        with suppress(Reached):
            return self._observed(partial(self._let_repeat, in_the_copy))
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
        try:
            with Copy() as process:
                if process.inside:
                    in_the_copy.append((process, first))
                    raise Reached  # out of the contexts of the step
                second = PassDigests(**process.next(LEAST + PATIENCE * took))
                if first.differing(second):
                    self._stop(process, first, second)
        except CopyFailed as error:
            self._copy_failed(self._runner, str(error))  # type: ignore[misc]
        else:
            self._done(self._runner, None)
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
        """Keep the changes of the first pass, when it reaches the optimizer."""
        if self._state.changed():
            # weights as well are what the real step makes of them
            self._left = StepState(self._runner, weights=False)

    def _compare(self, first: PassDigests, differing: list[PassDigests],
                 second: PassDigests) -> None:
        """Stop the step before the optimizer if gradients or losses of the two passes differ."""
        if self._left is not None:
            # before the ranks agree: after that, the owner of shared weights may step
            with _disable_current_modes():
                self._left.put_back()
        if self._differ(first, second):
            check_shared_weights(self._runner)  # a model that changes them itself cannot share
            differing.append(second)
            raise Reached
        self._left = None
        self._forget()

    # ---------------------------------------------------------------------- a difference

    def _differ(self, first: PassDigests, second: PassDigests) -> bool:
        """Whether two passes differ on any rank."""
        return bool(agree(TOPIC, bool(first.differing(second)), any))

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
        report_difference(self._runner, [first, second, third[0], fourth[0]],
                          [third[1], fourth[1]], reaching)

    def _reaching(self, names: list[str], unchanged: PassDigests) -> list[str]:
        """Return the attributes that change the bits when they alone are not put back.

        The remaining attributes are results that the next pass writes again.
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


FILE = 'step_check.iteration{}.rank{}.json'
PASSES = ('first', 'second', 'first recorded', 'second recorded')
SHOWN = 5  # names of attributes

ATTRIBUTES = (
    'The forward pass changes attributes that reach the loss and that no checkpoint keeps: {}.\n'
    'A resumed run starts without them. Compute the value from the iteration or draw it from a '
    'global generator, keep it in a buffer (register_buffer), or name it: '
    'mmrepro.keep_attributes(Class, "attribute").')
HEAD = ('The step of iteration {} (counted from 0) was repeated from the same state on the same '
        'batch, and its bits differ.')
OFF = 'To train on without this check: randomness.self_checks=dict(steps=0).'
AGAIN = ('A and B are two more passes that were recorded. Where they first differ:\n{}')
NOT_RECORDED = (
    'Operators of sharded weights are not recorded: with randomness.virtual_ranks.memory='
    "'shared', this message names the first operator that differs.")
NOT_AGAIN = (
    'Two more passes, recorded, have the same bits{}. What differs only now and then is a value '
    'that the step keeps outside of the model (in a module, a function, a closure), a race '
    'between threads, memory that is read before it is written, or hardware that computes wrongly '
    '(silent data corruption). Run it again on this machine and on another one; check the memory '
    'and the GPU (nvidia-smi -q -d ECC, dcgmi diag).')


def report_difference(runner: Any, passes: Sequence[PassDigests],
                      records: Sequence[Sequence[Record]], attributes: Sequence[str]) -> None:
    """Write the digests of this rank into the work directory and stop all ranks.

    Args:
        passes: the two that were compared, and two that were recorded.
        records: the operators of the latter; empty if they cannot be recorded.
        attributes: those that change the bits when a pass finds them as the first had left them.

    Raises:
        StepDiffersError: always, the same text on all ranks.
    """
    rank, iteration = get_rank(), runner.iter
    diagnosis = diagnose(iteration, rank, *records)
    path = os.path.join(runner.work_dir, FOLDER, FILE.format(iteration, rank))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(dict(
            kind='step check', iteration=iteration, rank=rank, attributes=list(attributes),
            diagnosis=diagnosis._asdict() if diagnosis else None,
            passes={name: digests._asdict() for name, digests in zip(PASSES, passes)}),
            file, indent=1)
    mine = dict(difference=_difference(*passes[:2]), attributes=list(attributes),
                diagnosis=_diagnosis(diagnosis, passes, any(records)), file=path,
                phase=PHASES.index(diagnosis.phase) if diagnosis else len(PHASES))
    ranks = agree('differing step', mine, lambda ranks: ranks)
    raise StepDiffersError(_text(iteration, ranks))


def report_unexplained(runner: Any, first: PassDigests, second: PassDigests,
                       problem: str) -> NoReturn:
    """Stop the run for a difference that no further pass could explain, and say why.

    Raises:
        StepDiffersError: always.
    """
    raise StepDiffersError('\n'.join([
        HEAD.format(runner.iter), _difference(first, second),
        f'Further passes, which would name the cause, failed: {problem}.', OFF]))


def _difference(first: PassDigests, second: PassDigests) -> str:
    """Return the first loss or gradient that differs, and how many do; '' for none."""
    differing = first.differing(second)
    if not differing:
        return ''
    field, names = next(iter(differing.items()))
    values = [getattr(digests, field).get(names[0]) for digests in (first, second)]
    if field == 'losses' and None not in values:
        values = [f'{float.fromhex(value)!r} ({value})' for value in values]
    counts = listed([f'{len(names)} of {len(getattr(first, field))} {field}'
                     for field, names in differing.items()])
    return (f'first difference: {FIELDS[field].format(names[0])}: {values[0]} and '
            f'{values[1]}\n'
            f'in all: {counts}')


def _diagnosis(diagnosis: Diagnosis | None, passes: Sequence[PassDigests],
               recorded: bool) -> str:
    if diagnosis is not None:
        return AGAIN.format(diagnosis.text())
    if not recorded:
        return NOT_RECORDED
    first, second, third, fourth = passes
    if third.differing(fourth):
        return ('Two more passes, recorded, differ as well, and their operators agree: what '
                "differs was computed outside of torch's operators.")
    agree = [name for name, digests in zip(PASSES, (first, second)) if not digests.differing(third)]
    return NOT_AGAIN.format(f' as the {agree[0]}' if len(agree) == 1 else '')


def _text(iteration: int, ranks: Sequence[dict[str, Any]]) -> str:
    lines = [HEAD.format(iteration)]
    several = len(ranks) > 1
    differing = [number for number, rank in enumerate(ranks) if rank['difference']]
    if several:
        lines.append(f'Ranks that differ: {", ".join(map(str, differing))} of {len(ranks)}. All '
                     'ranks have stopped; what one rank computes reaches the others.')
    for number in differing:
        head = f'rank {number}: ' if several else ''
        lines += [f'{head}{line}' for line in ranks[number]['difference'].splitlines()]
    attributes = list(dict.fromkeys(name for rank in ranks for name in rank['attributes']))
    if attributes:
        lines.append(ATTRIBUTES.format(listed(attributes, SHOWN)))
    # the earliest phase is where it began
    origin = min(differing, key=lambda number: (ranks[number]['phase'], number))
    head = f'Rank {origin}: ' if several else ''
    lines += [f'{head}{ranks[origin]["diagnosis"]}',
              f'Digests: {", ".join(ranks[number]["file"] for number in differing)}',
              OFF]
    return '\n'.join(lines)
