"""The verbs that examine trainings, as functions that return a :class:`Report`.

    from mmrepro import reports
    report = reports.compare('work_dirs/monday', 'work_dirs/tuesday')
    print(report)             # what the command prints
    report.data['first']      # the same as data
    report.write('comparison', 'compare')
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .audit.auditing import audit
from .config import with_virtual_ranks
from .demo import use_data, write_dataset
from .errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, ConfigError, MMReproError
from .localise import entry
from .localise.exported import exported
from .localise.module_trace import trace
from .localise.search import LocaliseResult
from .report.compare import compare
from .report.report import Figure, Report
from .report.seeds import seeds
from .report.table import Table
from .runs.config_edits import prepare, virtual_ranks
from .runs.config_files import config_of, find_config
from .runs.launcher import TrainingFailed, jobs_at_once
from .util.text import page
from .verify import variations as verification
from .verify.variations import USUAL, VARIATIONS, VariationResult
from .verify.witnessed import verify_run

__all__ = ['Figure', 'Report', 'Table', 'audit', 'compare', 'exported', 'localise', 'seeds',
           'trace', 'verify', 'verify_run']

Say = Callable[[str], None]
# variations that are events of a run, not changes of its config: parameters of localise_config
EVENTS = {'resume': 'resume_b', 'validation': 'validate_b'}
SAME = ('SAME BITS: batches, losses, gradients, parameters, buffers, optimizer state and averages '
        'agree after every iteration')


# ---------------------------------------------------------------------------------------- verify

def verify(config: str, *, vary: Sequence[str] | None = None, iterations: int = 5,
           level: str = 'step', full: bool = False, ranks: int | None = None,
           demo_data: str | None = None, options: Mapping[str, Any] | None = None,
           jobs: int | None = None, work_dir: str = os.path.join('work_dirs', 'verify'),
           at: int | None = None, explain: bool = False,
           say: Say = lambda text: None) -> Report:
    """Train a config in fresh processes, vary what must not matter, and compare the bits.

    Args:
        config: path of a config, or ``package::path``.
        vary: names of variations (:data:`mmrepro.verify.variations.VARIATIONS`);
            None: the usual variations.
        iterations: number of iterations of each run.
        level: level of the fingerprints, ``'step'``, ``'parameter'`` or ``'module'``.
        full: images, batch and weights as in the config, instead of small ones.
        ranks: number of virtual ranks of each run; None: as in the config.
        demo_data: folder for the demonstration dataset, to train on it.
        options: dotted key -> value, changes of the config.
        jobs: runs at a time; None: as many as the machine has room for.
        work_dir: where the runs write.
        at: iterations before the resume and the validation; None: half of them.
        explain: name the cause of the first variation that differs.
        say: called with lines about the progress.

    Returns:
        A report whose exit code is 0 (same bits), 1 (different) or 3 (nothing was compared).

    Raises:
        ConfigError: the config or an option cannot be used.
        MissingDataError: a file that the config reads does not exist.
        TrainingFailed: a training ended with an error.
    """
    names = list(dict.fromkeys(USUAL if vary is None else vary))
    unknown = [name for name in names if name not in VARIATIONS]
    if unknown or not names:
        raise ConfigError(f'--vary: {", ".join(unknown) or "nothing"} is not allowed; allowed: '
                          f'{",".join(VARIATIONS)}')
    if at is not None and not 0 < at < iterations:
        raise ConfigError(f'--at {at} --iters {iterations}: 0 < K < N is needed')
    cfg = config_of(config, options)
    if ranks is not None:
        cfg.randomness = with_virtual_ranks(cfg.get('randomness'), ranks)
    if vary is None and virtual_ranks(cfg) is not None:
        names.append('ranks')
    notes = []
    if demo_data is not None:
        write_dataset(demo_data)
        use_data(cfg, os.path.abspath(demo_data))
        notes.append(f'data: the demonstration dataset in {demo_data}')
    notes += prepare(cfg, names, full)
    started, at = time.monotonic(), at or max(1, iterations // 2)
    data = dict(config=config, iterations=iterations, level=level, work_dir=work_dir)
    try:
        results = verification.verify(cfg, work_dir, names, iterations, at, jobs or jobs_at_once(),
                                      level, say)
    except TrainingFailed as error:
        if error.finding is None:
            raise
        return Report(
            config, 'DIFFERENT BITS within one run, before it was compared with others:\n'
            f'{error.finding}\nAll of its output is in {error.log}', DIFFERENT, notes=notes,
            data=dict(data, same=False, variations=[], finding=error.finding, log=error.log))
    notes.append(f'{iterations} iterations, fingerprints of level {level}, '
                 f'{time.monotonic() - started:.0f} s')
    notes += verification.changed_meanwhile(results, work_dir)
    cause = _cause(results, work_dir, iterations, at) if explain else None
    return certificate(config, results, notes, work_dir, data, cause)


def certificate(config: str, results: Sequence[VariationResult], notes: Sequence[str],
                work_dir: str, data: Mapping[str, Any] = {},
                cause: LocaliseResult | None = None) -> Report:
    """Report verified variations."""
    rows, styles = zip(*map(_row, results))
    different = [result for result in results if result.difference is not None]
    code, verdict, advice = DONE, SAME, []
    if different:
        code = DIFFERENT
        verdict = (f'DIFFERENT BITS in {len(different)} of {len(results)} variations. Both runs '
                   f'are in {work_dir}; to see them side by side:')
        advice = ['mmrepro compare '
                  f'{os.path.join(work_dir, different[0].reference)} '
                  f'{os.path.join(work_dir, different[0].name)}']
    elif not any(result.equal for result in results):
        code, verdict = NOTHING_TO_COMPARE, 'NOTHING WAS COMPARED'
    elif any(result.remark for result in results):
        verdict += '; with other instruction sets, batches do'
    tables = [Table((), rows, styles=styles)]
    if cause is not None:
        tables.append(_first_difference(cause))
    return Report(
        config, verdict, code, tables, list(notes), advice, data={
            **data, 'same': code == DONE, 'localise': cause.as_dict() if cause else None,
            'variations': [dict(
                name=result.name, title=result.title, equal=result.equal,
                skipped=result.skipped or None, remark=result.remark or None,
                difference=result.difference.as_dict() if result.difference else None)
                for result in results]})


def _row(result: VariationResult) -> tuple[tuple[str, str, str], str]:
    """Return the cells of a variation, and the style of its row."""
    if result.skipped:
        return (result.name, result.title, f'not run: {result.skipped}'), 'soft'
    if result.difference is not None:
        return (result.name, result.title, f'DIFFERENT  {result.difference.text()}'), 'bad'
    text = f'equal ({result.remark})' if result.remark else 'equal'
    return (result.name, result.title, text), 'good'


def _cause(results: Sequence[VariationResult], work_dir: str, iterations: int,
           at: int) -> LocaliseResult | None:
    """Name the cause of the first variation that differs; see :func:`localise`."""
    first = next((result for result in results if result.difference is not None), None)
    if first is None:
        return None
    name = first.name
    # both runs of a variation with `only` differ by design from iteration 0 on
    if VARIATIONS[name].prepare or VARIATIONS[name].elsewhere or VARIATIONS[name].only:
        print(f'\n{name}: mmrepro localise cannot repeat what surrounds this run; the first field '
              f"that differs says where to look ({page('how-to/my-runs-differ.md')})",
              file=sys.stderr)
        return None
    reference, run = (os.path.join(work_dir, which) for which in (first.reference, name))
    folder = entry.unused_folder(os.path.join(work_dir, 'localise'))
    os.makedirs(folder, exist_ok=True)
    try:
        if name not in EVENTS:
            print(f'\nmmrepro localise {reference} {run}', file=sys.stderr, flush=True)
            return entry.localise_runs(reference, run, folder)
        # the reference's config has no validation that run B could do
        config = os.path.join(reference if name == 'resume' else run, 'config.py')
        print(f'\nmmrepro localise {config} --{EVENTS[name].replace("_", "-")} {at} --iters '
              f'{iterations}', file=sys.stderr, flush=True)
        event: dict[str, Any] = {EVENTS[name]: at}
        return entry.localise_config(config, folder, iterations, **event)
    except MMReproError as error:
        print(error, file=sys.stderr)
        return None


# --------------------------------------------------------------------------------------- localise

def localise(config: str, run_b: str | None = None, *,
             iterations: int = entry.DEFAULT_ITERATIONS,
             options: Mapping[str, Any] = {}, settings: Sequence[Mapping[str, Any]] = ({}, {}),
             env: Sequence[Mapping[str, str]] = ({}, {}), ranks: int = 1,
             resume_b: int | None = None, validate_b: int | None = None, values: bool = True,
             work_dir: str | None = None) -> Report:
    """Name the first thing that differs between two runs, and the likely cause.

    Args:
        config: path of a config that is trained twice, or the work directory of run A.
        run_b: work directory of run B; None: ``config`` is a config.
        iterations: number of iterations to compare.
        options: dotted key -> value, settings for both runs.
        settings, env: settings and environment variables for run A and for run B.
        ranks: number of processes of each run.
        resume_b: end run B before this iteration and resume it.
        validate_b: let run B validate before this iteration.
        values: run once more to measure how far the results of the operator are apart.
        work_dir: where the runs write; None: a new folder ``work_dirs/localise``.

    Returns:
        A report whose exit code is 1 if the runs differ.

    Raises:
        ConfigError, FingerprintError: the config or a run cannot be used.
        TrainingFailed: a training ended with an error.
    """
    for name, at in (('resume', resume_b), ('validate', validate_b)):
        if at is not None and not 0 < at < iterations:
            raise ConfigError(f'--{name}-b {at} --iters {iterations}: 0 < K < N is needed')
    folder = entry.unused_folder(work_dir or os.path.join('work_dirs', 'localise'))
    os.makedirs(folder, exist_ok=True)
    if run_b is not None:
        result = entry.localise_runs(config, run_b, folder, values)
    else:
        result = entry.localise_config(
            find_config(config), folder, iterations, common=options, settings=settings, env=env,
            ranks=ranks, resume_b=resume_b, validate_b=validate_b, values=values)
    tables = [_first_difference(result)] if result.diagnosis else []
    return Report('', result.sentence(), DONE if result.verdict == 'equal' else DIFFERENT, tables,
                  list(result.notes), data=result.as_dict())


def _first_difference(result: LocaliseResult) -> Table:
    if result.diagnosis is None:
        return Table((), (), 'cause', text=result.sentence())
    rows = result.rows()
    styles = {'cause': 'warn', 'fix': 'fix'}
    return Table((), rows, 'first difference', [styles.get(name, '') for name, _ in rows],
                 code=(1, ))
