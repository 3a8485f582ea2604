"""Name the first thing that differs between two runs, and the likely cause."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import DIFFERENT, DONE, ConfigError
from ..localise import search
from ..localise.search import LocaliseResult
from ..report.report import Report
from ..report.table import Table
from ..runs.config_files import find_config


def localise(config: str, run_b: str | None = None, *,
             iterations: int = search.DEFAULT_ITERATIONS,
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
    folder = search.unused_folder(work_dir or os.path.join('work_dirs', 'localise'))
    os.makedirs(folder, exist_ok=True)
    if run_b is not None:
        result = search.localise_runs(config, run_b, folder, values)
    else:
        result = search.localise_config(
            find_config(config), folder, iterations, common=options, settings=settings, env=env,
            ranks=ranks, resume_b=resume_b, validate_b=validate_b, values=values)
    tables = [first_difference(result)] if result.diagnosis else []
    return Report('', result.sentence(), DONE if result.verdict == 'equal' else DIFFERENT, tables,
                  list(result.notes), data=result.as_dict())


def first_difference(result: LocaliseResult) -> Table:
    """Return the table of a difference that was localised."""
    if result.diagnosis is None:
        return Table((), (), 'cause', text=result.sentence())
    rows = result.rows()
    styles = {'cause': 'warn', 'fix': 'fix'}
    return Table((), rows, 'first difference', [styles.get(name, '') for name, _ in rows],
                 code=(1, ))
