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

from dev.control import ITERATIONS, NOT_SEEN, Control, control
from mmrepro.checkpoint import files
from mmrepro.checkpoint.choosing import last_checkpoint_of, newest_good
from mmrepro.errors import ConfigError
from mmrepro.fingerprint.divergence import difference_up_to
from mmrepro.fingerprint.reader import RankLog, read_ranks
from mmrepro.report.report import plain
from mmrepro.runs.child import Training
from mmrepro.runs.config_edits import add_fingerprints, fix_seed
from mmrepro.runs.launcher import TrainingFailed, failure, launch_of

from . import moments
from .attempt import COUNTED, Attempt, Interruption, watch
from .kinds import KINDS, allowed

__all__ = ['Campaign', 'CampaignSettings', 'Kill', 'campaign_of', 'interruptible']

CONFIG = 'config.py'  # in the folder of each run


class CampaignSettings(NamedTuple):
    """Settings of a campaign."""
    work_dir: str = os.path.join('work_dirs', 'kills')  # empty; for configs, logs, checkpoints
    kills: int = 10  # number of interruptions
    seed: int = 0  # of their kinds and moments; the training has its own
    ranks: int = 1  # of each run
    kinds: Sequence[str] = ()  # keys of ``KINDS``; empty: all that are possible
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


def interruptible(cfg: Config, interval: int) -> None:
    """Let ``cfg`` write a checkpoint every ``interval`` iterations, and fix its seed."""
    hooks = cfg.setdefault('default_hooks', {})
    hook = dict(hooks.get('checkpoint') or dict(type='CheckpointHook'))
    hook.update(by_epoch=False, interval=interval)
    if hook.setdefault('max_keep_ckpts', 2) == 1:
        hook['max_keep_ckpts'] = 2  # the control resumes before the end
    hooks['checkpoint'] = hook
    fix_seed(cfg)


class Campaign:
    """Interrupts runs of one config."""

    def __init__(self, config: Config, settings: CampaignSettings,
                 on_progress: Callable[[str], Any] = print) -> None:
        self._config, self.settings, self._on_progress = config, settings, on_progress
        self._random = Random(settings.seed)
        self._processes = itertools.cycle(settings.processes or [settings.ranks])
        self._started = time.time()
        self.kills: list[Kill] = []
        self.problems: list[str] = []  # every deviation from the uninterrupted run
        self.runs = 0  # number of interrupted runs that came to their end
        self.compared = 0  # number of iterations and validations
        self.iterations = 0  # of a run
        self._gaps: dict[str, float] = {}
        self._expected: dict[int, RankLog] = {}  # of the uninterrupted run
        self._states: list[Any] = []  # of its ranks, at the end
        self._deck: list[str] = []
        self.control: Control | None = None  # None while an interrupted run differs

    def run(self) -> bool:
        """Whether all interrupted runs have the bits of the uninterrupted one.

        Raises:
            TrainingFailed: the uninterrupted run failed, and not in a self-check.
        """
        folder = self._folder('reference')
        attempt = self._start(folder, None)
        error = _failure(folder, attempt)
        if error is not None and error.finding is None:
            raise error
        if error is not None:
            self.problems.append(str(error))
            return False
        self._gaps = moments.durations(attempt.of_rank(0))
        self._expected, self._states = read_ranks(folder), self._end_states(attempt)
        self.iterations = max(self._expected[0].steps) + 1
        self._on_progress(f'uninterrupted run: {self.iterations} iterations, '
                          f'{self._gaps["step"]:.2f} s each; '
                          f'{self._gaps["save"]:.2f} s for a checkpoint')
        while len(self.kills) < self.settings.kills and not self.problems:
            self._interrupted_run(self.runs + 1)
            self.runs += 1
        if not self.problems:
            self.control = self._control(folder)
        return not self.problems

    def _control(self, reference: str) -> Control:
        """Spoil a resume of the uninterrupted run."""
        starts: dict[str, int] = {}

        def refuse(path: str) -> str | None:
            starts[path] = files.load(path, mapped=True)['meta']['iter']
            return None if starts[path] < self.iterations else 'is of the end'

        path, _ = newest_good(reference, refuse)
        if path is None:
            return Control(f'{NOT_SEEN}the uninterrupted run has no checkpoint before its end')
        training = Training(
            os.path.join(reference, CONFIG), os.path.join(os.path.dirname(reference), 'control'),
            resume=True, checkpoint=path,
            iterations=min(starts[path] + ITERATIONS, self.iterations))
        processes, *_ = self.settings.processes or [self.settings.ranks]
        return control(training, reference, processes=processes)

    def _interrupted_run(self, number: int) -> None:
        folder = self._folder(f'run_{number}')
        struck = False
        while True:
            plan = self._plan() if len(self.kills) < self.settings.kills else None
            attempt = self._start(folder, plan)
            if struck:
                resumed = next((moment.iteration for moment in attempt.of_rank(0)
                                if moment.kind == 'begin'), None)
                self.kills[-1] = self.kills[-1]._replace(resumed=resumed)
                self._on_progress(f'      resumed at {resumed}')
            self._check_files(folder, plan)
            struck = attempt.seconds_to_end is not None
            if plan is not None and struck:
                self._note_kill(number, plan, attempt, folder)
            if not any(attempt.codes):
                break  # also where it was struck too late
            if not struck:
                self.problems.append(f'run {number}: {_failure(folder, attempt)}')
                return
        self.problems += [f'run {number}: {text}' for text in self._deviations(folder, attempt)]
        self._on_progress(f'run {number}: {self.iterations} iterations, interruptions so far: '
                  f'{len(self.kills)}, {"DIFFERENT" if self.problems else "all bits equal"}')
        if not self.problems:
            shutil.rmtree(folder)

    def _deviations(self, folder: str, attempt: Attempt) -> list[str]:
        """Return how a run that came to its end differs from the uninterrupted run."""
        logs = read_ranks(folder)
        difference = difference_up_to(self._expected, logs, self.iterations)
        deviations = [f'{difference.text()} (first the uninterrupted run)'] if difference else []
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
        config.dump(os.path.join(folder, CONFIG))
        return folder

    def _start(self, folder: str, plan: Interruption | None) -> Attempt:
        training = Training(os.path.join(folder, CONFIG), resume=True,
                            attach=f'{moments.__name__}:attach')
        launch = launch_of(training, os.path.join(folder, 'rank{rank}.log'),
                           ranks=next(self._processes))
        return watch(launch, folder, plan, self._gaps, self._random)

    def _plan(self) -> Interruption:
        if not self._deck:  # every kind equally often
            self._deck = self._random.sample(self.settings.kinds, len(self.settings.kinds))
        return Interruption(self._deck.pop(), self._random.randint(1, self.settings.span),
                            self._random.random())

    def _note_kill(self, number: int, plan: Interruption, attempt: Attempt, folder: str) -> None:
        done = max((moment.iteration for moment in attempt.of_rank(0) if moment.kind in COUNTED),
                   default=0)
        expected = {*KINDS[plan.kind].codes, 0}  # 0: the run was through before the signal
        through = None not in self._end_states(attempt)
        ended = [code for number, code in enumerate(attempt.codes) if number not in attempt.killed]
        hung = attempt.killed and not (KINDS[plan.kind].waits and ended)
        if hung or not (expected.issuperset(ended) or through):
            self.problems.append(
                f'run {number}: after {plan.kind} at iteration {done} the processes ended with '
                f'{attempt.codes}, expected {sorted(expected)}; see {folder}/rank0.log')
        half = sum(name.endswith('.partial') for name in os.listdir(folder))
        seconds = attempt.seconds_to_end or 0.
        self.kills.append(Kill(number, plan.kind, len(attempt.codes), attempt.codes, done, None,
                               half, seconds, attempt.killed))
        self._on_progress(f'{len(self.kills):4d}  {plan.kind} after iteration {done}: exit codes '
                  f'{attempt.codes} after {seconds:.1f} s')

    def _end_states(self, attempt: Attempt) -> list[dict[str, str] | None]:
        """Return digests of the final state of each rank; None for a rank that was interrupted."""
        return [next((moment.state for moment in attempt.of_rank(rank) if moment.kind == 'end'),
                     None) for rank in range(self.settings.ranks)]

    def _check_files(self, folder: str, plan: Interruption | None) -> None:
        # it may name a file that MMEngine has already removed, and be cut off itself, but never
        # name one that is not whole
        named = last_checkpoint_of(folder)
        problem = files.check_file(named) if os.path.isfile(named) else None
        if problem is not None:
            self.problems.append(f'last_checkpoint names {named}, which {problem}, after '
                                 f'{plan.kind if plan else "the end"}')

    def outcome(self) -> dict[str, Any]:
        """Return the outcome, as JSON can hold it."""
        return plain(dict(
            settings=self.settings, iterations_of_a_run=self.iterations, runs=self.runs,
            compared=self.compared, equal=not self.problems, problems=self.problems,
            control=self.control, minutes=round((time.time() - self._started) / 60, 1),
            kills=self.kills))


def campaign_of(config: Config, settings: CampaignSettings,
                on_progress: Callable[[str], Any] = print) -> Campaign:
    """Return the campaign with these settings; without ``kinds``, with all that are possible.

    Raises:
        ConfigError: a kind is not possible, or the work directory is not empty.
    """
    workers = config.train_dataloader.get('num_workers', 0)
    most = max(settings.processes or [settings.ranks])
    possible = allowed(most, workers)
    for name in settings.kinds:
        if name not in possible:
            raise ConfigError(f'--kinds {name!r}: with {most} process(es) and {workers} worker(s), '
                              f'possible are {", ".join(map(repr, possible))}')
    folder = settings.work_dir
    if os.path.isdir(folder) and os.listdir(folder):
        raise ConfigError(f'--work-dir {folder}: is not empty, and a run that finds checkpoints '
                          'resumes')
    return Campaign(config, settings._replace(kinds=settings.kinds or possible), on_progress)


def _failure(folder: str, attempt: Attempt) -> TrainingFailed | None:
    return failure(attempt.codes,
                   [f'{folder}/rank{rank}.log' for rank in range(len(attempt.codes))])
