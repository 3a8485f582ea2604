"""A control: a run that is spoiled on purpose, which a comparison of runs has to see.

A comparison that finds no difference shows nothing unless it could have found one.
"""
from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from ..data import placement_of
from ..fingerprint.divergence import Ranks, first_divergence
from ..fingerprint.reader import read_ranks
from ..fingerprint.schema import FOLDER
from ..runs.child import Training
from ..runs.launcher import plan
from ..runs.progress import run_with_progress
from ..text import listed

ITERATIONS = 2  # of a control: a lost schedule changes the second
# what a self-check or the check of a resume would refuse has to come to the comparison
SETTINGS = {'randomness.self_checks': False, 'randomness.resume_strict': False}


class Omission(NamedTuple):
    """Something that a training loses in a control."""
    plant: Callable[[Any], Any] = lambda runner: None  # lets a runner that was built lose it
    settings: dict[str, Any] = {}  # changes of the config, by dotted key


def _forget(key: str) -> Callable[[Any], None]:
    """Return a function that lets a runner resume without an entry of the checkpoint."""
    def plant(runner: Any) -> None:
        stock = runner.load_checkpoint

        def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
            checkpoint = stock(*args, **kwargs)
            checkpoint.pop(key, None)
            return checkpoint

        runner.load_checkpoint = load_checkpoint

    return plant


def _unseeded(runner: Any) -> None:
    runner.lifecycle.seed = lambda *stream: None


def _one_batch_ahead(runner: Any) -> None:
    resume = runner.lifecycle.resume
    stock = resume.seek_data

    def seek_data(runner: Any) -> None:
        stock(runner)
        placement = placement_of(runner.train_dataloader)
        if placement is not None:
            placement.skip += 1
        resume.seek_data = stock

    resume.seek_data = seek_data


# by what is lost; a later omission is planted where the comparison does not see those before it
OF_A_RUN = {
    'a run with another seed': Omission(settings={'randomness.seed': 2**31 - 1}),
    'a run without its first batch': Omission(_one_batch_ahead),
}
OF_A_RESUME = {
    'a resume without the state of the optimizer': Omission(_forget('optimizer')),
    'a resume without its random numbers': Omission(_unseeded),
    'a resume without the state of the schedules': Omission(_forget('param_schedulers')),
    'a resume without its first batch': Omission(_one_batch_ahead),
}


def attach(runner: Any, name: str) -> None:
    """Spoil a runner that is about to train."""
    {**OF_A_RUN, **OF_A_RESUME}[name].plant(runner)


class Control(NamedTuple):
    """What a comparison said of runs that were spoiled."""
    spoiled: Sequence[str]  # in order; all but the last were not seen
    iteration: int | None  # in which the last was seen as different; None if it was not
    why: str = ''  # why nothing could be spoiled

    @property
    def text(self) -> str:
        """The outcome in words."""
        if self.iteration is not None:
            return f'control: {self.spoiled[-1]} was seen as different at iteration ' \
                f'{self.iteration}'
        return 'NOT VERIFIED: all bits are equal, but the control was not seen as different: ' + (
            self.why or f'{listed(self.spoiled, len(self.spoiled))} has the same bits as well, so '
            'that a run which loses this would have passed')


def control(training: Training, folder: str, reference: str, start: int, iterations: int,
            part: Callable[[Ranks], Ranks] = lambda ranks: ranks,
            env: dict[str, str | None] = {}, processes: int = 1,
            say: Callable[[str], None] = lambda text: None) -> Control:
    """Train again with one omission after the other, until the comparison sees one.

    Args:
        training: without omission; one that resumes names its checkpoint.
        folder: work directory of the control.
        reference: work directory of the run with which it is compared.
        start: number of iterations before the first of ``training``.
        iterations: of ``reference``.
        part: reduces fingerprints to what is compared.
        env: changed variables.
        processes: number of processes.
        say: is called with a line on the progress.
    """
    spoiled: list[str] = []
    end = min(start + ITERATIONS, iterations)
    for name, omission in (OF_A_RESUME if training.resume else OF_A_RUN).items():
        spoiled.append(name)
        run = plan('control', folder, [training._replace(
            work_dir=folder, iterations=end, settings={**SETTINGS, **omission.settings},
            attach=f'{__name__}:attach', given=dict(name=name))], env, processes)
        run_with_progress([run], end - start, say)
        difference = first_divergence(*(
            part(read_ranks(os.path.join(path, FOLDER))) for path in (reference, folder)))
        if difference is not None:
            return Control(spoiled, difference.iteration)
    return Control(spoiled, None)
