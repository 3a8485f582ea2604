"""Runs that are interrupted and resumed until they are through, compared with one that is not."""
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
from ...exit_codes import PREEMPTED
from .attempt import COUNTED, Attempt, Interruption
from .kinds import KINDS, allowed

Key = tuple[int, str, int]  # rank, kind of event, iteration
COMPARED = ('train', 'metrics', 'end')
WITHOUT_PROGRESS = 20  # attempts that end by themselves, with an error, before we give up


class CampaignSettings(NamedTuple):
    """Of a campaign."""
    work_dir: str  # a folder for configs, logs, checkpoints
    kills: int  # how many interruptions
    seed: int  # of their kinds and moments
    ranks: int  # of each run
    workers: int  # data loader workers of each rank
    kinds: Sequence[str] = ()  # keys of ``KINDS``; empty for all that are possible
    span: int = 8  # most iterations and validation batches from a start to an interruption
    # of the uninterrupted run, and of each later start, again and again; empty: one for each rank
    processes: Sequence[int] = ()
    start_method: str = 'fork'  # of the processes; 'fork' is faster, 'spawn' is a fresh interpreter


class Kill(NamedTuple):
    """The outcome of one interruption."""
    run: int
    kind: str
    processes: int
    codes: list[int]  # of the processes
    done: int  # iterations that were finished when the processes ended
    resumed: int | None  # at which the next start began
    half_written: int  # files that lay there half written
    seconds: float  # until all processes had ended
    ended_by_us: list[int]


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
        self.problems: list[str] = []  # all that was not as in the uninterrupted run
        self.runs = 0  # interrupted, and through
        self.compared = 0  # iterations and validations
        self.iterations = 0  # of a run
        self._deck: list[str] = []

    def run(self) -> bool:
        """Whether all interrupted runs were the uninterrupted one."""
        if self.settings.start_method == 'fork':
            import torch._dynamo  # noqa: F401  the first optimizer of every process would
        folder = self._folder('reference')
        attempt = self._start(folder, None)
        if any(attempt.codes):
            raise RuntimeError(f'the uninterrupted run failed with exit codes {attempt.codes}; '
                               f'see {folder}/rank0.log')
        self._gaps = attempt.durations()
        self._expected = _records(attempt)
        self.iterations = max(iteration for _, _, iteration in self._expected)
        self._say(f'uninterrupted run: {self.iterations} iterations, {self._gaps["event"]:.2f} s '
                  f'each; {self._gaps["save"]:.2f} s for a checkpoint')
        while len(self.kills) < self.settings.kills and not self.problems:
            self._interrupted_run(self.runs + 1)
            self.runs += 1
        return not self.problems

    def _interrupted_run(self, number: int) -> None:
        folder, found = self._folder(f'run_{number}'), {}
        pending: Kill | None = None
        failures = 0
        while True:
            plan = self._plan() if len(self.kills) + bool(pending) < self.settings.kills else None
            attempt = self._start(folder, plan)
            began = [event.iteration for event in attempt.events[0] if event.kind == 'begin']
            if pending is not None:
                self._keep(pending._replace(resumed=began[0] if began else None))
            for key, content in _records(attempt).items():
                rank, kind, iteration = key
                found[key] = content
                self.compared += 1
                expected = self._expected.get(key)
                if content != expected:
                    self.problems.append(f'run {number}, rank {rank}, {kind} {iteration}: '
                                         f'{content}, uninterrupted: {expected}')
            self._check_files(folder, plan)
            pending = self._kill_of(number, plan, attempt, folder) if attempt.struck else None
            if not any(attempt.codes):
                break
            failures = 0 if attempt.struck else failures + 1
            if failures > WITHOUT_PROGRESS or (not attempt.struck and attempt.codes != [PREEMPTED]):
                self.problems.append(f'run {number} ended with {attempt.codes} by itself; see '
                                     f'{folder}/rank0.log')
                return
        if pending is not None:  # it came too late to stop the run
            self._keep(pending)
        missing = sorted(self._expected.keys() - found.keys())
        self.problems += [f'run {number} has no {kind} of iteration {iteration}, rank {rank}'
                          for rank, kind, iteration in missing]
        self._say(f'run {number}: {self.iterations} iterations, {len(self.kills)} interruptions so '
                  f'far, {"DIFFERENT" if self.problems else "all bits equal"}')
        if not self.problems:
            shutil.rmtree(folder)

    def _folder(self, name: str) -> str:
        folder = os.path.join(self.settings.work_dir, name)
        os.makedirs(folder)
        config = self._config.copy()
        config.work_dir, config.resume, config.load_from = folder, True, None
        config.dump(os.path.join(folder, 'chaos_config.py'))
        return folder

    def _start(self, folder: str, plan: Interruption | None) -> Attempt:
        settings = self.settings
        attempt = Attempt(os.path.join(folder, 'chaos_config.py'), next(self._processes),
                          settings.ranks, os.path.join(folder, 'rank{rank}.log'),
                          settings.start_method)
        return attempt.run(plan, getattr(self, '_gaps', {}), self._random)

    def _plan(self) -> Interruption:
        if not self._deck:  # every kind equally often
            self._deck = self._random.sample(self.kinds, len(self.kinds))
        return Interruption(self._deck.pop(), self._random.randint(1, self.settings.span),
                    self._random.random())

    def _kill_of(self, number: int, plan: Interruption, attempt: Attempt, folder: str) -> Kill:
        done = max((event.iteration for event in attempt.events[0] if event.kind in COUNTED),
                   default=0)
        expected = {*KINDS[plan.kind].codes, 0}  # 0: the run was through before the signal
        through = all(any(event.kind == 'end' for event in events) for events in attempt.events)
        if not (expected.issuperset(attempt.codes) or through or attempt.ended_by_us):
            self.problems.append(
                f'run {number}: after {plan.kind} at iteration {done} the processes ended with '
                f'{attempt.codes}, expected {sorted(expected)}; see {folder}/rank0.log')
        half = sum(name.endswith('.partial') for name in os.listdir(folder))
        return Kill(number, plan.kind, len(attempt.codes), attempt.codes, done, None, half,
                    attempt.seconds_to_end, attempt.ended_by_us)

    def _keep(self, kill: Kill) -> None:
        self.kills.append(kill)
        where = f' on {kill.processes} process{"es" if kill.processes > 1 else ""}' \
            if self.settings.processes else ''
        self._say(f'{len(self.kills):4d}  {kill.kind} after iteration {kill.done}{where}: '
                  f'exit codes {kill.codes} after {kill.seconds:.1f} s, resumed at {kill.resumed}')

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


def _records(attempt: Attempt) -> dict[Key, Any]:
    """What has to be equal. An iteration that was reported, but not finished, counts too."""
    return {(rank, event.kind, event.iteration): event.content
            for rank, events in enumerate(attempt.events) for event in events
            if event.kind in COMPARED}


def summary(campaign: Campaign, started: float) -> dict[str, Any]:
    """The outcome, as JSON can hold it."""
    return dict(
        settings=campaign.settings._asdict(), iterations_of_a_run=campaign.iterations,
        runs=campaign.runs, compared=campaign.compared, equal=not campaign.problems,
        problems=campaign.problems, minutes=round((time.time() - started) / 60, 1),
        kills=[kill._asdict() for kill in campaign.kills])
