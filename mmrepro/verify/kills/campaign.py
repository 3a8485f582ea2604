"""Runs that are interrupted and resumed to their end, compared with an uninterrupted run."""
from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Sequence
from random import Random
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ...checkpoint import files
from ...errors import TrainingError
from ...exit_codes import PREEMPTED
from ...fingerprint.divergence import compare_logs, first_missing
from ...fingerprint.reader import RankLog, read_ranks
from ...fingerprint.schema import FOLDER
from ...runs.child import Training
from ...runs.config_edits import add_fingerprints
from ...runs.launcher import launch_of
from . import moments
from .attempt import COUNTED, Attempt, Interruption
from .kinds import KINDS, allowed

WITHOUT_PROGRESS = 20  # attempts that end by themselves, with an error, before the run is given up


class CampaignSettings(NamedTuple):
    """Settings of a campaign."""
    work_dir: str  # a folder for configs, logs, checkpoints
    kills: int  # number of interruptions
    seed: int  # of their kinds and moments
    ranks: int  # of each run
    workers: int  # data loader workers of each rank
    kinds: Sequence[str] = ()  # keys of ``KINDS``; empty for all that are possible
    span: int = 8  # most iterations and validation batches from a start to an interruption
    # numbers of processes: of the uninterrupted run, then of each later start in turn; empty: one
    # process for each rank
    processes: Sequence[int] = ()


class Kill(NamedTuple):
    """The outcome of one interruption."""
    run: int
    kind: str
    processes: int
    codes: list[int | None]  # of the processes
    done: int  # iterations that were finished when the processes ended
    resumed: int | None  # at which the next start began
    half_written: int  # number of partial files that were left behind
    seconds: float  # until all processes had ended
    ended_by_us: list[int]  # processes that did not end by themselves


class Campaign:
    """Interrupts runs of one config."""

    def __init__(self, config: Config, settings: CampaignSettings,
                 say: Callable[[str], Any] = print) -> None:
        self._config, self.settings, self._say = config, settings, say
        self._random = Random(settings.seed)
        self._processes = itertools.cycle(settings.processes or [settings.ranks])
        self.kinds = list(settings.kinds) or allowed(
            max(settings.processes or [settings.ranks]), settings.workers)
        self.kills: list[Kill] = []
        self.problems: list[str] = []  # every deviation from the uninterrupted run
        self.runs = 0  # number of interrupted runs that came to their end
        self.compared = 0  # number of iterations and validations
        self.iterations = 0  # of a run
        self._gaps: dict[str, float] = {}
        self._expected: dict[int, RankLog] = {}  # of the uninterrupted run
        self._states: list[Any] = []  # of its ranks, at the end
        self._deck: list[str] = []

    def run(self) -> bool:
        """Whether all interrupted runs have the bits of the uninterrupted one."""
        folder = self._folder('reference')
        attempt = self._start(folder, None)
        if any(attempt.codes):
            raise TrainingError(f'the uninterrupted run failed with exit codes {attempt.codes}; '
                                f'see {folder}/rank0.log')
        self._gaps = moments.durations(attempt.of_rank(0))
        self._expected, self._states = _logs(folder), self._end_states(attempt)
        self.iterations = max(self._expected[0].steps) + 1
        self._say(f'uninterrupted run: {self.iterations} iterations, {self._gaps["step"]:.2f} s '
                  f'each; {self._gaps["save"]:.2f} s for a checkpoint')
        while len(self.kills) < self.settings.kills and not self.problems:
            self._interrupted_run(self.runs + 1)
            self.runs += 1
        return not self.problems

    def _interrupted_run(self, number: int) -> None:
        folder = self._folder(f'run_{number}')
        pending: Kill | None = None
        failures = 0
        while True:
            plan = self._plan() if len(self.kills) + bool(pending) < self.settings.kills else None
            attempt = self._start(folder, plan)
            if pending is not None:
                self._keep(pending._replace(resumed=next((
                    moment.iteration for moment in attempt.of_rank(0) if moment.kind == 'begin'),
                    None)))
            self._check_files(folder, plan)
            pending = None
            if plan is not None and attempt.struck:
                pending = self._kill_of(number, plan, attempt, folder)
            if not any(attempt.codes):
                break
            failures = 0 if attempt.struck else failures + 1
            if failures > WITHOUT_PROGRESS or (not attempt.struck and attempt.codes != [PREEMPTED]):
                self.problems.append(f'run {number} ended with {attempt.codes} by itself; see '
                                     f'{folder}/rank0.log')
                return
        if pending is not None:  # it came too late to stop the run
            self._keep(pending)
        self.problems += [f'run {number}: {text}' for text in self._deviations(folder, attempt)]
        self._say(f'run {number}: {self.iterations} iterations, {len(self.kills)} interruptions so '
                  f'far, {"DIFFERENT" if self.problems else "all bits equal"}')
        if not self.problems:
            shutil.rmtree(folder)

    def _deviations(self, folder: str, attempt: Attempt) -> list[str]:
        """Return how a run that came to its end differs from the uninterrupted run."""
        logs = _logs(folder)
        deviations = [f'{difference.text()} (first the uninterrupted run)' for difference in (
            compare_logs(self._expected, logs, self.iterations),
            first_missing(self._expected, logs, self.iterations)) if difference is not None]
        for rank, expected in self._expected.items():
            vals = logs[rank].vals
            self.compared += len(logs[rank].steps) + len(vals) + 1
            deviations += [f'iteration {i}, rank {rank}, was trained again to different bits'
                           for i in logs[rank].changed]
            missing = sorted({val['iteration'] for val in expected.vals if val['iteration']}
                             - {val['iteration'] for val in vals})
            if missing:
                deviations.append(f'the validation after {missing[0]} iterations, rank {rank}, is '
                             'missing')
        for rank, states in enumerate(zip(self._end_states(attempt), self._states)):
            if states[0] != states[1]:
                deviations.append(f'rank {rank} ends with {states[0]}, uninterrupted: {states[1]}')
        return deviations

    def _folder(self, name: str) -> str:
        folder = os.path.abspath(os.path.join(self.settings.work_dir, name))
        os.makedirs(folder)
        config = self._config.copy()
        config.work_dir = folder
        add_fingerprints(config, 'step')
        config.dump(os.path.join(folder, 'chaos_config.py'))
        return folder

    def _start(self, folder: str, plan: Interruption | None) -> Attempt:
        training = Training(
            os.path.join(folder, 'chaos_config.py'), resume=True,
            prepare=f'{moments.__name__}:skip_config_layout', attach=f'{moments.__name__}:attach')
        launch = launch_of(training, os.path.join(folder, 'rank{rank}.log'),
                           ranks=next(self._processes))
        return Attempt(launch, folder).run(plan, self._gaps, self._random)

    def _plan(self) -> Interruption:
        if not self._deck:  # every kind equally often
            self._deck = self._random.sample(self.kinds, len(self.kinds))
        return Interruption(self._deck.pop(), self._random.randint(1, self.settings.span),
                            self._random.random())

    def _kill_of(self, number: int, plan: Interruption, attempt: Attempt, folder: str) -> Kill:
        done = max((moment.iteration for moment in attempt.of_rank(0) if moment.kind in COUNTED),
                   default=0)
        expected = {*KINDS[plan.kind].codes, 0}  # 0: the run was through before the signal
        through = None not in self._end_states(attempt)
        if not (expected.issuperset(attempt.codes) or through or attempt.killed):
            self.problems.append(
                f'run {number}: after {plan.kind} at iteration {done} the processes ended with '
                f'{attempt.codes}, expected {sorted(expected)}; see {folder}/rank0.log')
        half = sum(name.endswith('.partial') for name in os.listdir(folder))
        return Kill(number, plan.kind, len(attempt.codes), attempt.codes, done, None, half,
                    attempt.seconds_to_end, attempt.killed)

    def _keep(self, kill: Kill) -> None:
        self.kills.append(kill)
        where = f' on {kill.processes} process{"es" if kill.processes > 1 else ""}' \
            if self.settings.processes else ''
        self._say(f'{len(self.kills):4d}  {kill.kind} after iteration {kill.done}{where}: '
                  f'exit codes {kill.codes} after {kill.seconds:.1f} s, resumed at {kill.resumed}')

    def _end_states(self, attempt: Attempt) -> list[dict[str, str] | None]:
        """Return digests of the final state of each rank; None for a rank that was interrupted."""
        return [next((moment.state for moment in attempt.of_rank(rank) if moment.kind == 'end'),
                     None) for rank in range(self.settings.ranks)]

    def _check_files(self, folder: str, plan: Interruption | None) -> None:
        pointer = os.path.join(folder, 'last_checkpoint')
        if not os.path.exists(pointer):
            return
        with open(pointer) as file:
            named = file.read().strip()
        # it may name a file that MMEngine has already removed, and be cut off itself, but never
        # name one that is not whole
        if os.path.isfile(named) and files.check_file(named) is not None:
            self.problems.append(f'last_checkpoint names {named}, which '
                                 f'{files.check_file(named)}, after {plan}')


def _logs(folder: str) -> dict[int, RankLog]:
    return read_ranks(os.path.join(folder, FOLDER))


def summary(campaign: Campaign, started: float) -> dict[str, Any]:
    """Return the outcome, as JSON can hold it."""
    return dict(
        settings=campaign.settings._asdict(), iterations_of_a_run=campaign.iterations,
        runs=campaign.runs, compared=campaign.compared, equal=not campaign.problems,
        problems=campaign.problems, minutes=round((time.time() - started) / 60, 1),
        kills=[kill._asdict() for kill in campaign.kills])
