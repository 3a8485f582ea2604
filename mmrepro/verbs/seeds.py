"""Train a config with several seeds, and report the spread of a metric."""
from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import DIFFERENT, RunError, SeedsError
from ..report.report import Report
from ..report.run_view import load_run
from ..report.seed_study import ALL, MIN_SEEDS, streams_report, study, study_report
from ..report.table import Table
from ..runs.config_files import find_config, setting
from ..runs.seed_runs import (
    LOG,
    SeedFailed,
    SeedJob,
    jobs_of,
    parse_seeds,
    parse_streams,
    result_of,
    run_job,
    vary_stream,
)
from ..util.text import duration

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
        metric: name of the metric; None: ``coco/bbox_mAP`` if there is one, else the first.
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
            f'{len(failed)} runs have no result, and their seeds are left out of all configs: if '
            'runs fail because they train badly, the means are too high')
    return report


def _results(jobs: list[SeedJob], report_only: bool, on_progress: OnProgress
             ) -> tuple[dict[SeedJob, dict[str, Any]], dict[SeedJob, SeedFailed]]:
    """Return the results of all jobs, after training those that have none, and what has failed."""
    # all of them before the first training: a result of another config is an error
    earlier = {job: result_of(job) for job in jobs}
    results = {job: result for job, result in earlier.items() if result is not None}
    todo = [job for job in jobs if job not in results]
    if todo and report_only:
        raise SeedsError('--report-only, and these are not finished: '
                         + ', '.join(job.name for job in todo))
    if len(todo) < len(jobs):
        on_progress(f'{len(jobs) - len(todo)} of {len(jobs)} runs are there already')
    started, failed = time.monotonic(), {}
    for number, job in enumerate(todo):
        mean = (time.monotonic() - started) / max(number, 1)
        left = f', about {duration(mean * (len(todo) - number))} left' if number else ''
        on_progress(f'run {number + 1} of {len(todo)}: {job.name}{left} '
            f'(log: {os.path.join(job.folder, "seed.log")})')
        try:
            results[job] = run_job(job, metrics_of)
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
    """Return the metric of the last validation, or (``pick='best'``) the largest of all."""
    values = [value for _, value in result['metrics'][metric]]
    return float(max(values)) if pick == 'best' else float(values[-1])
