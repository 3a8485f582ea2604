"""Train a config with several seeds, and report the spread of a metric.

Each seed is trained in a process of its own. Layout: ``WORK_DIR/CONFIG_NAME/seed_N`` is an ordinary
work directory (``STREAM_N`` where only this stream has seed N); ``result.json`` in it is written
when the seed is done, and makes it count as done the next time.
"""
from __future__ import annotations

import glob
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..config import RandomnessConfig
from ..errors import DIFFERENT, PREEMPTED, RandomnessError, RunError, SeedsError, TrainingError
from ..report.report import Report, Table
from ..report.run_view import load_run
from ..report.seed_study import ALL, MIN_SEEDS, streams_report, study, study_report
from ..runs.config_files import find_config, read_config, setting
from ..runs.launcher import Launch, PlannedRun, TrainingFailed, run_all
from ..seeds import MAX_SEED
from ..util.files import NUMBER, Rule, mismatch, read_json, write_whole
from ..util.text import counted, duration, shorten

RESULT = 'result.json'
MOST = 10_000  # seeds in a range; more are taken for a typing error
LOG = 'seed.log'
# MMDetection's metrics log this instead of reporting a number
NOTHING_FOUND = 'The testing results of the whole dataset is empty'
# settings that say where and how fast a run trains
NOT_COMPARED = ('work_dir', 'resume', 'launcher')

Metrics = dict[str, list[tuple[int, float]]]  # metric -> (step, value) of all validations
_SHAPE = {'config_digest': str, 'metrics': {str: Rule(
    lambda values: mismatch(values, [[NUMBER]]) is None
    and {*map(len, values)} == {2}, 'a list of [step, value]')}}


class SeedFailed(TrainingError):
    """A run has no result, and the study can go on.

    Attributes:
        why: the reason in a few words, for a table.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class SeedJob(NamedTuple):
    """One seed of one config."""
    label: str  # of the config, for tables
    config: str  # path of the file
    options: tuple[str, ...]  # ``KEY=VALUE`` changes, as in ``train``
    digest: str  # of the effective settings, without the seed
    seed: int
    folder: str  # work directory
    stream: str = ''  # the stream whose root is ``seed``; '': all streams
    root: int = 0  # root of the other streams

    @property
    def name(self) -> str:
        return f'{self.label}, {self.stream or "seed"} {self.seed}'


def parse_seeds(text: str) -> list[int]:
    """Parse ``'0..4'`` or ``'0,1,5..7'``; seeds stay in the order given.

    >>> parse_seeds('0..2,7')
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(','):
        low, dots, high = part.strip().partition('..')
        if not low.isdecimal() or (dots and not high.isdecimal()):
            raise SeedsError(f'--seeds {text}: {part!r} is not allowed; allowed: 3, 0..4, 0,1,5..7')
        first, last = int(low), int(high or low)
        wrong = ''
        if last < first:
            wrong = f'it counts down; write {last}..{first}'
        elif last > MAX_SEED:
            wrong = f'a seed is at most {MAX_SEED}'
        elif last - first >= MOST:
            wrong = f'at most {MOST} seeds'
        if wrong:
            raise SeedsError(f'--seeds {text}: {part.strip()!r} is not allowed: {wrong}')
        seeds += range(first, last + 1)
    double = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if double:
        raise SeedsError(f'--seeds {text}: {double[0]} is listed twice')
    return seeds


def jobs_of(config: str, label: str, seeds: Sequence[int], work_dir: str,
            options: Sequence[str] = (), changes: dict[str, Any] | None = None) -> list[SeedJob]:
    """Return the jobs of one config; ``changes`` is ``options`` parsed."""
    cfg = read_config(config, changes, imports=False)
    settings = {key: value for key, value in cfg.items() if key not in NOT_COMPARED
                and (key != 'load_from' or value)}
    randomness = dict(settings.pop('randomness', None) or {})
    randomness.pop('seed', None)
    text = Config(settings).pretty_text + repr(sorted(randomness.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return [SeedJob(label, config, tuple(options), digest, seed,
                    os.path.join(work_dir, label, f'seed_{seed}')) for seed in seeds]


def vary_stream(job: SeedJob, stream: str, seeds: Sequence[int]) -> list[SeedJob]:
    """Return jobs in which one stream has these seeds, and all other streams the first seed.

    The first job is ``job`` itself, in which all streams have the first seed.
    """
    folder = os.path.dirname(job.folder)
    return [job, *(job._replace(seed=seed, stream=stream, root=job.seed,
                                folder=os.path.join(folder, f'{stream}_{seed}'))
                   for seed in seeds[1:])]


def parse_streams(text: str, config: str, changes: dict[str, Any] | None = None) -> list[str]:
    """Parse ``'init,step'`` into a list of streams that can vary in a config."""
    cfg = read_config(config, changes, imports=False)
    randomness = dict(cfg.get('randomness') or {})
    streams = [name.strip() for name in text.split(',')]
    for name in streams:
        if streams.count(name) > 1:
            raise SeedsError(f'--vary {text}: {name} is listed twice')
        if name in (randomness.get('streams') or {}):
            raise SeedsError(f'--vary {text}: {config} fixes randomness.streams.{name}; '
                             'remove it there')
    try:
        RandomnessConfig.parse(dict(randomness, seed=0, streams={
            **(randomness.get('streams') or {}), **dict.fromkeys(streams, 0)}))
    except RandomnessError as error:
        raise SeedsError(f'--vary {text}: {error}') from error
    return streams


def result_of(job: SeedJob) -> dict[str, Any] | None:
    """Read the result of a seed; None if it is not finished."""
    path = os.path.join(job.folder, RESULT)
    if not os.path.isfile(path):
        return None
    try:
        result: dict[str, Any] = read_json(path, SeedsError, _SHAPE)
    except SeedsError as error:
        raise SeedsError(f'{error}; remove it to run this seed again') from error
    if result['config_digest'] != job.digest:
        raise SeedsError(f'{job.folder} was trained with other settings than {job.config} has now; '
                         'choose another --work-dir, or remove the folder')
    return result


def run_job(job: SeedJob) -> dict[str, Any]:
    """Train one seed in a fresh process; continue where an earlier attempt was interrupted.

    Raises:
        SeedFailed: the training has failed, or has no metrics.
        TrainingError: it was pre-empted.
    """
    options = list(job.options)
    if job.stream:
        options.append(f'randomness.streams.{job.stream}={job.seed}')
    seed = job.root if job.stream else job.seed
    command = ['mmrepro', 'train', job.config, '--seed', str(seed), '--work-dir', job.folder]
    if glob.glob(os.path.join(glob.escape(job.folder), '*.pth')):
        command.append('--resume')
    if options:
        command += ['--cfg-options', *options]
    log = os.path.join(job.folder, LOG)
    try:
        run_all([PlannedRun(job.label, job.folder, [Launch(command, log)])])
    except TrainingFailed as error:
        if error.code == PREEMPTED:
            raise TrainingError(f'{job.name}: pre-empted, with a checkpoint; the same command '
                                'continues') from error
        output, *_ = (error.finding or str(error).rpartition('\nthe training ended')[0]
                      ).strip().splitlines()[-1:] or ['']
        raise SeedFailed(f'{job.name}: {error}',
                         f'exit code {error.code}: {shorten(output, 100)}') from error
    metrics = metrics_of(job.folder)
    if not metrics:
        with open(log, encoding='utf-8', errors='replace') as file:
            found_nothing = any(NOTHING_FOUND in line for line in file)
        why, advice = 'no validation metrics', 'set val_dataloader, val_evaluator and val_interval'
        if found_nothing:
            why = 'the detector found nothing'
            advice = ('it was validated, and the detector found nothing at all, for which there is '
                      'no metric. Train longer, begin from pretrained weights, or look at the '
                      'learning rate and at score_thr of model.test_cfg')
        raise SeedFailed(
            f'{job.name}: the run has no validation metrics (log: {log}); {advice}', why)
    result = dict(seed=job.seed, stream=job.stream or None, config=job.config,
                  config_digest=job.digest, metrics=metrics)
    write_whole(os.path.join(job.folder, RESULT), json.dumps(result, indent=1))
    return result


OnProgress = Callable[[str], None]
# the default metric: the first of these that the run has
USUAL = ('coco/bbox_mAP', 'coco/segm_mAP', 'pascal_voc/mAP')


def seeds(config: str, seeds: str = '0..4', *, compare: Sequence[str] = (),
          vary: str | None = None, metric: str | None = None, pick: str = 'last',
          options: Sequence[str] = (), work_dir: str = os.path.join('work_dirs', 'seeds'),
          report_only: bool = False, on_progress: OnProgress = lambda text: None) -> Report:
    """Train a config with several seeds, each in a fresh process, and report the spread.

    Finished seeds are not trained again, interrupted ones are resumed.

    Args:
        config: path of a config, or ``package::path``.
        seeds: such as ``'0..4'`` or ``'0,1,5..7'``.
        compare: configs to test against the first, with the same seeds.
        vary: names of streams (``'init,step'``) to vary one at a time; says which share of the
            variance is whose.
        metric: name of the metric; None: one of :data:`USUAL`, else the first.
        pick: which validation of a run counts, ``'last'`` or ``'best'``.
        options: changes of all configs, as ``KEY=VALUE``.
        work_dir: where the runs write.
        report_only: train nothing.
        on_progress: called with lines about the progress.

    Returns:
        A report whose exit code is 1 if configs were compared and no difference was found, or if
        a run has no result.

    Raises:
        SeedsError: an argument cannot be used, or too few seeds have a result.
        ConfigError: a config cannot be read.
    """
    numbers = parse_seeds(seeds)
    paths = [find_config(path) for path in (config, *compare)]
    labels = [os.path.splitext(os.path.basename(path))[0] for path in paths]
    double = next((label for label in labels if labels.count(label) > 1), None)
    if double is not None:
        raise SeedsError(f'two configs are called {double}; rename one of them')
    changes = dict(map(setting, options))
    jobs = {label: jobs_of(path, label, numbers, work_dir, options, changes)
            for path, label in zip(paths, labels)}
    if vary:
        whole = jobs.pop(labels[0])
        jobs = {ALL: whole, **{stream: vary_stream(whole[0], stream, numbers)
                               for stream in parse_streams(vary, paths[0], changes)}}
        if len(numbers) < MIN_SEEDS:  # before hours of training
            raise SeedsError(f'--vary needs at least {MIN_SEEDS} seeds, and --seeds '
                             f'{seeds} has {len(numbers)}')
    # the first run of every stream is the same one
    needed = list(dict.fromkeys(sum(jobs.values(), [])))
    results, failed = _results(needed, report_only, on_progress)
    kept = [index for index in range(len(numbers))
            if all(of_name[index] in results for of_name in jobs.values())]
    least = MIN_SEEDS if vary else 1
    if len(kept) < least:
        raise SeedsError(f'{len(kept)} of {len(numbers)} seeds have a result in every run, at '
                         f'least {least} must; ' + '\n'.join(map(str, failed.values())))
    metric = choose_metric(list(results.values()), metric)
    numbers = [numbers[index] for index in kept]
    values = {name: [value_of(results[of_name[index]], metric, pick) for index in kept]
              for name, of_name in jobs.items()}
    if vary:
        report = streams_report(metric, pick, labels[0], numbers, values)
    else:
        report = study_report(study(metric, pick, numbers, values))
    return _with_failed(report, failed)


def _with_failed(report: Report, failed: Mapping[SeedJob, SeedFailed]) -> Report:
    """Add the runs that have no result to a report, a row for each."""
    report.data['failed'] = {job.name: error.why for job, error in failed.items()}
    if failed:
        report.exit_code = DIFFERENT
        report.tables.append(Table(
            ('run', 'has no result', 'log'),
            [[job.name, error.why, os.path.join(job.folder, LOG)]
             for job, error in failed.items()], 'Runs without a result'))
        report.notes.append(
            f'no result of {counted(len(failed), "run")}: their seeds are left out of all configs. '
            'If runs fail because they train badly, the means are too high')
    return report


def _results(jobs: list[SeedJob], report_only: bool, on_progress: OnProgress
             ) -> tuple[dict[SeedJob, dict[str, Any]], dict[SeedJob, SeedFailed]]:
    """Train the jobs without a result; return the results of all jobs, and the failed jobs."""
    # all of them before the first training: a result of another config is an error
    earlier = {job: result_of(job) for job in jobs}
    results = {job: result for job, result in earlier.items() if result is not None}
    todo = [job for job in jobs if job not in results]
    if todo and report_only:
        raise SeedsError('--report-only, and these are not finished: '
                         + ', '.join(job.name for job in todo))
    if len(todo) < len(jobs):
        on_progress(f'{len(jobs) - len(todo)} of {counted(len(jobs), "run")} are there already')
    started, failed = time.monotonic(), {}
    for number, job in enumerate(todo):
        mean = (time.monotonic() - started) / max(number, 1)
        left = f', about {duration(mean * (len(todo) - number))} left' if number else ''
        on_progress(f'run {number + 1} of {len(todo)}: {job.name}{left} '
                    f'(log: {os.path.join(job.folder, LOG)})')
        try:
            results[job] = run_job(job)
        except SeedFailed as error:
            failed[job] = error
            on_progress(f'{job.name} has no result: {error.why}; the study goes on')
    return results, failed


def metrics_of(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Return metric -> ``(step, value)`` of all validations, of fingerprints or else of logs."""
    try:
        run = load_run(folder)
    except RunError:
        return {}
    vals = run.vals(True) if run.ranks and run.log.vals else run.logged_vals
    metrics: dict[str, list[tuple[int, float]]] = {}
    for step in sorted(vals):
        for name, value in vals[step].items():
            metrics.setdefault(name, []).append((step, value))
    return metrics


def choose_metric(results: Sequence[dict[str, Any]], wanted: str | None) -> str:
    """Return ``wanted``; None: one of :data:`USUAL`, else the first that all results have."""
    shared = [name for name in results[0]['metrics']
              if all(name in result['metrics'] for result in results)]
    if wanted is None:
        wanted = next((name for name in USUAL if name in shared), shared[0] if shared else None)
    if wanted is None or wanted not in shared:
        raise SeedsError(f'--metric {wanted}: not every run has it; all have: '
                         f'{", ".join(shared) or "none"}')
    return wanted


def value_of(result: dict[str, Any], metric: str, pick: str = 'last') -> float:
    """Return the metric of the last validation, or (``pick='best'``) the largest of all; NaN last.
    """
    values = [float(value) for _, value in result['metrics'][metric]]
    return max(values, key=lambda value: (value == value, value)) if pick == 'best' else values[-1]
