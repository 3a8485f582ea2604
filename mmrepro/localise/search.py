"""Find the first thing that differs between two runs: two variants of a config, or trained runs.

Two fresh processes (or groups of ranks) train the same config, or one config in two ways. Both run
again up to the iteration in which their fingerprints diverge, and record it: samples, operators,
hooks.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Callable, NamedTuple

from ..checkpoint.files import load
from ..checkpoint.fit import damage
from ..errors import DIFFERENT, DONE, CheckpointError, ConfigError, FingerprintError, RunError
from ..facts.collect import is_hidden, repeated_environment
from ..fingerprint.divergence import (
    Divergence,
    first_differing_metric,
    first_divergence,
    not_compared,
)
from ..fingerprint.manifest import Manifest
from ..fingerprint.reader import RecordedRun, read_run
from ..fingerprint.records import STATES
from ..fingerprint.schema import value_of
from ..report.report import Report, Table, plain
from ..runs.config_edits import SEED, fix_seed, seed_of
from ..runs.config_files import find_config, read_config, without_mark
from ..runs.launcher import progress_line
from ..util.text import counted, duration, listed
from .compare_modules import ValueDifference
from .diagnosis import Diagnosis
from .differing_settings import (
    Variable,
    different_by_design,
    differing_variables,
    not_known_equal,
    settings_without_effect,
)
from .recording import CHANGED, RecordingPlan, RunSpec, compare_kept, diagnose_ranks, start

DEFAULT_ITERATIONS = 20
MAX_RECORDINGS = 2  # repetitions of both runs that are recorded
# causes within an operator: they are named alone only where the rest is known to be equal
OF_THE_MACHINE = ('operator', 'order of additions on the device')

NOT_REPRODUCED = 'NOT REPRODUCED: the runs were repeated twice and recorded up to iteration {}; {}.'
INTERMITTENT = (
    'Settings, code, environment, versions, data and the variables that the code reads were '
    'recorded in both runs, and are\nequal: the cause is intermittent (a race, the load of the '
    'machine, memory contents), hardware, or what is not recorded:\nfiles that the code reads by '
    'itself, pixels beyond a sample of the images.\nRun it again, longer (--iters) or several '
    'times; mmrepro verify repeats runs.')
METRICS = (
    'The weights that were validated are the same. Look at what only validation uses: the test '
    'pipeline, the metric, its annotation file,\nrandom numbers in either; recordings hold the '
    'iterations of training, so there is nothing more to name.')


class LocaliseResult(NamedTuple):
    """The outcome of a search.

    The verdict is 'equal', 'found', 'flaky' (the fingerprints differed, the recordings do not), or
    'metrics' (training agrees, a validation does not).
    """
    verdict: str
    compared: int  # number of iterations
    divergence: Any = None  # Divergence: the first iteration whose fingerprints differ
    positions: tuple[int, ...] | None = None  # of its samples, of all ranks; None: not recorded
    diagnosis: Any = None  # Diagnosis: the first difference
    values: ValueDifference | None = None  # how far the results of the operator are apart
    notes: tuple[str, ...] = ()  # remarks for the reader
    # settings, versions, data or variables that differ, or may differ, between the runs
    unequal: tuple[str, ...] = ()
    # iterations at which repetitions differed before the iteration that they recorded
    earlier: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return the verdict in words."""
        if self.verdict == 'equal':
            return f'SAME BITS: {counted(self.compared, "iteration")} compared'
        if self.verdict == 'metrics':
            return (f'DIFFERENT BITS: training agrees for {counted(self.compared, "iteration")}, '
                    f'and {self.divergence.text()}\n{METRICS}')
        order = {field.field: field.order for fields in self.divergence.ranks.values()
                 for field in fields}
        iteration = self.divergence.iteration
        fields = ', '.join(sorted(order, key=lambda name: order[name]))
        line = f'DIFFERENT BITS: the runs first differ at iteration {iteration}, in {fields}'
        if self.verdict == 'flaky':
            why = INTERMITTENT if not self.unequal else '\n  '.join([
                'Both repetitions ran in the environment of now, and the runs are not known to be '
                'equal. Look at this first:', *self.unequal])
            how = 'their recordings agree' if not self.earlier else (
                f'before what was recorded, they differed at iteration {listed(self.earlier)}')
            return f'{line}\n{NOT_REPRODUCED.format(iteration, how)}\n{why}'
        if self.diagnosis is not None and self.diagnosis.iteration != iteration:
            return (f'DIFFERENT BITS: the runs first differ at iteration '
                    f'{self.diagnosis.iteration}, in {self.diagnosis.path}; it shows in '
                    f'iteration {iteration}, in {fields}')
        return line

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of the first difference; empty where none was recorded."""
        if self.diagnosis is None:
            return []
        values = [] if self.values is None else [('values', self.values.text())]
        return [*self.diagnosis.rows(), *values]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for programs."""
        first = self.divergence
        content: dict[str, Any] = plain(dict(
            verdict=self.verdict, compared=self.compared, notes=self.notes,
            divergence=None if first is None else dict(
                iteration=first.iteration, positions=self.positions,
                fields={rank: [field.field for field in fields]
                        for rank, fields in first.ranks.items()}),
            finding=self.diagnosis, values=self.values, unequal=self.unequal))
        return content


def localise_config(config: str, work_dir: str, iterations: int = DEFAULT_ITERATIONS, *,
                    common: Mapping[str, Any] = {},
                    settings: Sequence[Mapping[str, Any]] = ({}, {}),
                    env: Sequence[Mapping[str, str]] = ({}, {}), ranks: int = 1,
                    resume_b: int | None = None, validate_b: int | None = None,
                    values: bool = True) -> LocaliseResult:
    """Train a config as run A and as run B, and find their first difference.

    The arguments are those of :func:`mmrepro.localise.search`; ``work_dir`` is an empty folder,
    and ``common`` are the settings of both runs.
    """
    specs = []
    configs = [read_config(config, {**common, **options}) for options in settings]
    if all(seed_of(cfg) is None for cfg in configs):
        print(f'{config} has no randomness.seed, and every run would draw another one: both runs '
              f'get seed {SEED}', file=sys.stderr, flush=True)
        for cfg in configs:
            fix_seed(cfg)
    for name, cfg, options, variables in zip('AB', configs, settings, env):
        if validate_b and cfg.get('val_cfg') is None:
            raise ConfigError(f'{config} has no val_cfg: run B cannot validate')
        path = os.path.join(work_dir, f'config_{name}.py')
        cfg.dump(path)
        events: dict[str, Any] = dict(
            resume_at=resume_b, validate_at=validate_b) if name == 'B' else {}
        specs.append(RunSpec(name, path, dict(variables), ranks,
                             asked={**without_mark(options), **variables}, **events))
    return _localiser(specs, work_dir).search(iterations, values)


def localise_runs(path_a: str, path_b: str, work_dir: str, values: bool = True) -> LocaliseResult:
    """Find the first difference of two trained runs: repeat them up to their divergence."""
    runs = read_run(path_a), read_run(path_b)
    _, first = first_iteration(*runs)
    specs = [_repetition(name, run, first.iteration if first else 0, work_dir)
             for name, run in zip('AB', runs)]
    localiser = _localiser(specs, work_dir)
    for line in different_by_design(runs):
        localiser.on_progress(line)
    for spec in specs:
        if spec.checkpoint:
            localiser.on_progress(f'run {spec.name} continues from {spec.checkpoint}')
    return localiser.explain(*runs, values)


def unused_folder(path: str) -> str:
    """Return ``path``, or the first of ``path.1``, ``path.2``, ... without files in it."""
    folder, number = path, 0
    while os.path.isdir(folder) and os.listdir(folder):
        number += 1
        folder = f'{path}.{number}'
    return folder


def _localiser(specs: Sequence[RunSpec], work_dir: str) -> Localiser:
    """Return a localiser that reports its progress on the standard error."""
    def launch(spec: RunSpec, folder: str, plan: RecordingPlan) -> None:
        with progress_line(sys.stderr) as tell:
            start(spec, folder, plan, tell)

    on_progress = partial(print, file=sys.stderr, flush=True)
    on_progress(CHANGED)
    return Localiser(specs, work_dir, launch, on_progress)


def _repetition(name: str, run: RecordedRun, iteration: int, work_dir: str) -> RunSpec:
    """Return how to repeat a run up to an iteration: config, variables, nearest checkpoint."""
    if not run.manifests:
        raise FingerprintError(f'{run.work_dir}: has no manifest, so the run cannot be repeated')
    manifest: dict[str, Any] = run.manifests[0]
    Manifest(f'{run.work_dir}: manifest.json', manifest).check_repeatable()
    path = os.path.join(work_dir, f'config_{name}.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest['config']['text'])
    return RunSpec(name, path, repeated_environment(manifest), manifest['processes'],
                   checkpoint=_nearest_checkpoint(run.work_dir, iteration))


def _nearest_checkpoint(folder: str, iteration: int) -> str | None:
    """Return the last checkpoint of mmrepro with at least one iteration before ``iteration``."""
    best: tuple[int, str | None] = (0, None)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            content = load(path, map_location='meta') if name.endswith('.pth') else {}
        except CheckpointError:
            continue
        meta = {} if damage(content) else content['meta']
        if 'mmrepro' in meta and best[0] < meta['iter'] < iteration:
            best = meta['iter'], path
    return best[1]


class Localiser:
    """Trains runs A and B in a new folder, and compares them; ``launch`` waits for its run."""

    def __init__(self, specs: Sequence[RunSpec], work_dir: str,
                 launch: Callable[[RunSpec, str, RecordingPlan], None],
                 on_progress: Callable[[str], None] = lambda line: None) -> None:
        self.specs, self.work_dir = specs, work_dir
        self.launch, self.on_progress = launch, on_progress

    def search(self, iterations: int, values: bool = True) -> LocaliseResult:
        """Train both runs for this many iterations, then find their first difference."""
        folders = self._run_both('fingerprints', RecordingPlan('', iterations - 1))
        return self.explain(read_run(folders[0]), read_run(folders[1]), values)

    def explain(self, run_a: RecordedRun, run_b: RecordedRun,
                values: bool = True) -> LocaliseResult:
        """Find the first difference of two runs with fingerprints.

        With ``values``, run once more to measure how far the results of the operator are apart.
        """
        runs = run_a, run_b
        compared, first = first_iteration(*runs)
        notes = [f'run {spec.name}: {note}' for spec, run in zip(self.specs, runs)
                 for note in run.notes]
        if first is not None and not any(spec.asked for spec in self.specs):
            notes += different_by_design(runs)
        notes += settings_without_effect(self.specs, runs)
        notes += not_compared(run_a.ranks, run_b.ranks)
        if first is None:
            metric = first_differing_metric(run_a.ranks, run_b.ranks)
            return LocaliseResult('metrics' if metric else 'equal', compared, metric,
                                  notes=tuple(notes))
        unequal = not_known_equal(runs)
        return self._recorded(runs, values, LocaliseResult(
            'flaky', compared, first, positions_of(*runs, first.iteration), notes=tuple(notes),
            unequal=tuple(unequal)))

    def _recorded(self, runs: tuple[RecordedRun, RecordedRun], values: bool,
                  result: LocaliseResult) -> LocaliseResult:
        """Repeat both runs and record where they diverge; a repetition may differ before that."""
        divergence, positions = result.divergence, result.positions
        for number in range(MAX_RECORDINGS):
            iteration = divergence.iteration
            self.on_progress(f'the runs diverge at iteration {iteration}; recording it')
            folders = self._run_both(f'record{number}', RecordingPlan(
                '', iteration, iteration, positions))
            repeated = read_run(folders[0]), read_run(folders[1])
            _, first = first_iteration(*repeated)
            if first is None or first.iteration >= iteration:
                diagnosis = diagnose_ranks(iteration, *folders, sorted(divergence.ranks))
                if diagnosis is not None:
                    return self._found(diagnosis, repeated, values, result._replace(
                        divergence=divergence, positions=positions))
                continue
            # missing fingerprints of an iteration are no sign of chance
            seen = all(first.iteration in log.steps for run in runs for log in run.ranks.values())
            values = values and not seen  # one more run would differ elsewhere
            why = ('the cause is intermittent' if seen else
                   'they have no fingerprints of that iteration')
            result = result._replace(
                notes=(*result.notes, 'in a repetition, the runs first differ at iteration '
                       f'{first.iteration}, not {iteration}: {why}'),
                earlier=(*result.earlier, str(first.iteration)))
            divergence, positions = first, positions_of(*repeated, first.iteration)
        return result

    def _found(self, diagnosis: Diagnosis, repeated: Sequence[RecordedRun], values: bool,
               result: LocaliseResult) -> LocaliseResult:
        """Complete a diagnosis: values, and what else differs between the runs."""
        iteration = result.divergence.iteration
        kept = self._values(diagnosis, iteration) if values else None
        # a variable that the user varies is the question, not the answer
        asked = {**self.specs[0].asked, **self.specs[1].asked}
        variables = [row for row in differing_variables(repeated) if row.name not in asked]
        if variables:
            diagnosis = self._with_variables(diagnosis, variables, iteration, repeated[0])
        elif diagnosis.cause in OF_THE_MACHINE and result.unequal:
            diagnosis = diagnosis._replace(
                sentence=f'{diagnosis.sentence} The runs are not known to be equal in what is '
                'listed; look at it first.', evidence=(*result.unequal, *diagnosis.evidence))
        return result._replace(verdict='found', diagnosis=diagnosis, values=kept)

    def _with_variables(self, diagnosis: Diagnosis, variables: Sequence[Variable], iteration: int,
                        run_a: RecordedRun) -> Diagnosis:
        """Train run B with the variables of run A: they are the cause if it has A's bits then."""
        texts = tuple(variable.text() for variable in variables)
        env = {row.name: row.a for row in variables if not is_hidden(row.a)}
        if not env:  # values that look secret are not known
            return diagnosis._replace(evidence=(*texts, *diagnosis.evidence))
        spec = self.specs[1]._replace(env={**self.specs[1].env, **env})
        folder = os.path.join(self.work_dir, spec.name, 'variables')
        os.makedirs(folder)
        values = 'value' if len(texts) == 1 else 'values'
        self.on_progress(f'{"; ".join(texts)}: training run B with the {values} of A')
        self.launch(spec, folder, RecordingPlan(folder, iteration))
        if first_iteration(run_a, read_run(folder))[1] is not None:
            return diagnosis._replace(evidence=(*diagnosis.evidence, *(
                f'{text}; with the value of A, run B differs all the same' for text in texts)))
        return diagnosis._replace(
            cause='environment variable', evidence=texts,
            sentence='Code reads what differs in the environment. With the value of run A, run B '
            'has the bits of run A.',
            fix='Set it to the same value, or put it into the config, which is recorded.')

    def _values(self, diagnosis: Diagnosis, iteration: int) -> ValueDifference | None:
        """Measure the results of the named operator in one more run of the recorded iteration."""
        rank, records = diagnosis.rank, (diagnosis.record_a, diagnosis.record_b)
        if diagnosis.kind not in ('output', 'generator') or records[0] is None \
                or not diagnosis.stack or diagnosis.operator in STATES:
            return None
        self.on_progress(f'running again for the values of {diagnosis.operator}')
        folders = self._run_both('values', RecordingPlan('', iteration, iteration, ()),
                                 [{rank: number} for number in records])
        return compare_kept(*folders, rank)

    def _run_both(self, name: str, plan: RecordingPlan,
                  keep: Sequence[Any] = (None, None)) -> tuple[str, str]:
        """Train run A, then run B, and return their folders; ``keep`` is for each of them."""
        folders: list[str] = []
        started = time.monotonic()
        for spec, kept in zip(self.specs, keep):
            folder = os.path.join(self.work_dir, spec.name, name)
            os.makedirs(folder)
            took = f' (run A took {duration(time.monotonic() - started)})' if folders else ''
            self.on_progress(f'run {spec.name}: training up to iteration {plan.stop}{took}')
            self.launch(spec, folder, plan._replace(folder=folder, keep=kept))
            folders.append(folder)
        return folders[0], folders[1]


def first_iteration(run_a: RecordedRun, run_b: RecordedRun) -> tuple[int, Divergence | None]:
    """Return the number of common iterations, and the first that differs on any rank."""
    if set(run_a.ranks) != set(run_b.ranks):
        raise RunError(f'{run_a.work_dir} has ranks {sorted(run_a.ranks)}, {run_b.work_dir} has '
                       f'ranks {sorted(run_b.ranks)}: the runs cannot be compared')
    common = set.intersection(*(set(run_a.ranks[rank].steps) & set(run_b.ranks[rank].steps)
                                for rank in run_a.ranks))
    if not common:
        raise RunError(f'{run_a.work_dir} and {run_b.work_dir} have no iteration in common')
    return len(common), first_divergence(run_a.ranks, run_b.ranks)


def positions_of(run_a: RecordedRun, run_b: RecordedRun,
                 iteration: int) -> tuple[int, ...] | None:
    """Return the positions of the samples of an iteration in both runs; None if not recorded."""
    lists = [value_of(log.steps[iteration], 'batch.positions')
             for run in (run_a, run_b) for log in run.ranks.values() if iteration in log.steps]
    if None in lists:
        return None
    return tuple(sorted({position for positions in lists for position in positions}))


def localise(config: str, run_b: str | None = None, *,
             iterations: int = DEFAULT_ITERATIONS,
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
    folder = unused_folder(work_dir or os.path.join('work_dirs', 'localise'))
    os.makedirs(folder, exist_ok=True)
    if run_b is not None:
        result = localise_runs(config, run_b, folder, values)
    else:
        result = localise_config(
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
