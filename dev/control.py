"""A control: a training that is spoiled on purpose, which a comparison has to see as different.

A comparison that finds no difference shows something only if it could have found one.
"""
from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Callable, NamedTuple

from mmrepro.checkpoint.resuming import Restoration
from mmrepro.fingerprint.divergence import first_divergence
from mmrepro.fingerprint.reader import read_ranks
from mmrepro.runs.child import Training
from mmrepro.runs.launcher import TrainingFailed, plan, run_with_progress

__all__ = ['ITERATIONS', 'NOT_SEEN', 'Control', 'attach', 'control']

ITERATIONS = 2  # that a control trains: a lost schedule changes the second
# what a self-check, or the check of a resume, would refuse has to come to the comparison
SETTINGS = {'randomness.self_checks': False, 'randomness.resume_strict': False}
NOT_SEEN = 'NOT VERIFIED: all bits are equal, but '


def _forget(runner: Any, key: str) -> None:
    stock = runner.load_checkpoint
    runner.load_checkpoint = lambda *args, **kwargs: {
        name: value for name, value in stock(*args, **kwargs).items() if name != key}


def _misplaced(runner: Any) -> None:
    plan = runner.lifecycle.resume
    cursor = plan.point.cursor
    point = replace(plan.point, cursor=cursor._replace(batches=cursor.batches + 1))
    runner.lifecycle.resume = replace(plan, point=point)
    runner.lifecycle.restoration = Restoration(runner.lifecycle.resume)


# The first is seen in almost every training; the next is planted where it is not.
RUNS = {  # -> changed settings
    'a run with another seed': {'randomness.seed': 2**31 - 1},
    'a run with batches of three': {'train_dataloader.batch_size': 3},
}
RESUMES: dict[str, Callable[[Any], None]] = {  # -> spoils a runner that is about to resume
    'a resume without the state of the optimizer': lambda runner: _forget(runner, 'optimizer'),
    'a resume without its random numbers': lambda runner: setattr(
        runner.lifecycle, 'seed', lambda *stream: None),
    'a resume without the schedules': lambda runner: _forget(runner, 'param_schedulers'),
    'a resume that leaves a batch out': _misplaced,
}


def attach(runner: Any, name: str) -> None:
    """Spoil a runner that is about to train, if it resumes."""
    RESUMES.get(name, lambda runner: None)(runner)


class Control(NamedTuple):
    """Whether the comparison noticed a training that was spoiled on purpose."""
    text: str  # a line for the report
    iteration: int | None = None  # the first that was seen as different; None: all are the same


def control(training: Training, reference: str,
            on_progress: Callable[[str], None] = lambda text: None, **how: Any) -> Control:
    """Spoil a training in one way after the other, until it differs from the reference.

    Args:
        training: has a work directory, for a folder for each try, and names its checkpoint if it
            resumes.
        reference: work directory.
        on_progress: called with lines about the progress.
        how: arguments of :func:`~mmrepro.runs.launcher.plan`.
    """
    equal, failed = [], []
    for number, name in enumerate(RESUMES if training.resume else RUNS):
        # the checkpoints of one try are not resumed by the next
        folder = os.path.join(str(training.work_dir), str(number))
        changed = training._replace(
            work_dir=folder, settings={**SETTINGS, **RUNS.get(name, {})},
            attach=f'{__name__}:attach', given=dict(name=name))
        try:
            run_with_progress([plan('control', folder, [changed], **how)], ITERATIONS, on_progress)
        except TrainingFailed as error:
            failed.append(f'; {name} failed: {str(error).strip().splitlines()[-1]}')
            continue
        difference = first_divergence(read_ranks(reference), read_ranks(folder))
        if difference is not None:
            return Control(f'control: {name} was seen as different at iteration '
                           f'{difference.iteration}', difference.iteration)
        equal.append(name)
    why = 'no control came to its end'
    if equal:
        why = (f'so are those of {", ".join(equal)}: this training does not use any state that the '
               'control removes, so the comparison could not detect losing it')
    return Control(NOT_SEEN + why + ''.join(failed))
