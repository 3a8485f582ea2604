"""Find the first thing that differs between two runs.

Two fresh processes (or groups of ranks) train the same config, or one config in two ways. Both run
again up to the iteration in which their fingerprints diverge, and record it: samples, operators,
hooks.
"""
from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from ..diagnosis.diagnosis import Diagnosis
from ..errors import RunError
from ..fingerprint.divergence import (
    Divergence,
    first_differing_metric,
    first_divergence,
    not_compared,
)
from ..fingerprint.reader import RecordedRun, read_run
from ..fingerprint.schema import value_of
from ..report.report import plain
from ..text import duration
from .compared_runs import RunSpec, start
from .recording import RecordingPlan, diagnose_ranks
from .values import ValueDifference, compare_kept
from .variation_effect import different_by_design, settings_without_effect

MAX_RECORDINGS = 2  # repetitions of both runs that are recorded

Launch = Callable[[RunSpec, str, RecordingPlan], None]
NOT_REPRODUCED = (
    'NOT REPRODUCED: the runs were repeated twice and recorded up to iteration {iteration}; their '
    'recordings agree.\nThe cause is intermittent: a race, the load of the machine, memory '
    'contents, or hardware. Run it again, longer (--iters) or several times;\n'
    'mmrepro verify repeats runs.')


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
    notes: tuple[str, ...] = ()  # what a reader should know

    def sentence(self) -> str:
        """Return the verdict in words."""
        if self.verdict == 'equal':
            return f'SAME BITS: {self.compared} iterations agree'
        if self.verdict == 'metrics':
            return (f'DIFFERENT BITS: {self.compared} iterations of training agree, and '
                    f'{self.divergence.text()}\n{METRICS}')
        order = {field.field: field.order for fields in self.divergence.ranks.values()
                 for field in fields}
        line = (f'DIFFERENT BITS: the runs first differ at iteration {self.divergence.iteration}, '
                f'in {", ".join(sorted(order, key=lambda name: order[name]))}')
        if self.verdict == 'flaky':
            return f'{line}\n{NOT_REPRODUCED.format(iteration=self.divergence.iteration)}'
        return line

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of the first difference; empty where none was recorded."""
        if self.diagnosis is None:
            return []
        values = [] if self.values is None else [('values', self.values.text())]
        return self.diagnosis.rows() + values

    def text(self) -> str:
        """Return verdict, notes and first difference for a terminal."""
        lines = [self.sentence(), *(f'note: {note}' for note in self.notes)]
        if self.diagnosis is not None:
            lines += ['first difference:', *(f'  {name:<9} {value}' for name, value in self.rows())]
        return '\n'.join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for programs."""
        first = self.divergence
        return plain(dict(
            verdict=self.verdict, compared=self.compared, notes=self.notes,
            divergence=None if first is None else dict(
                iteration=first.iteration, positions=self.positions,
                fields={rank: [field.field for field in fields]
                        for rank, fields in first.ranks.items()}),
            finding=self.diagnosis, values=self.values))


class Localiser:
    """Trains and compares runs A and B.

    Args:
        work_dir: a new folder.
        launch: trains a run and waits for it.
        say: is called with lines about the progress.
    """

    def __init__(self, specs: Sequence[RunSpec], work_dir: str, launch: Launch = start,
                 say: Callable[[str], None] = lambda line: None) -> None:
        self.specs, self.work_dir, self.launch, self.say = specs, work_dir, launch, say

    def search(self, iterations: int, values: bool = True) -> LocaliseResult:
        """Train both runs for this many iterations, then find their first difference."""
        folders = self._run_both('fingerprints', RecordingPlan('', iterations - 1))
        return self.explain(read_run(folders[0]), read_run(folders[1]), values)

    def explain(self, run_a: RecordedRun, run_b: RecordedRun,
                values: bool = True) -> LocaliseResult:
        """Find the first difference of two runs with fingerprints.

        With ``values``, run once more to measure how far the results of the operator are apart.
        """
        compared, first = first_iteration(run_a, run_b)
        notes = tuple(f'run {spec.name}: {note}' for spec, run in zip(self.specs, (run_a, run_b))
                      for note in run.notes)
        if first is not None and not any(spec.asked for spec in self.specs):
            notes += tuple(different_by_design((run_a, run_b)))
        notes += tuple(settings_without_effect(self.specs, (run_a, run_b)))
        notes += tuple(not_compared(run_a.ranks, run_b.ranks))
        if first is None:
            metric = first_differing_metric(run_a.ranks, run_b.ranks)
            return LocaliseResult('metrics' if metric else 'equal', compared, metric, notes=notes)
        differing, positions = first, positions_of(run_a, run_b, first.iteration)
        result = LocaliseResult('flaky', compared, first, positions)
        for number in range(MAX_RECORDINGS):
            iteration = differing.iteration
            self.say(f'the runs diverge at iteration {iteration}; recording it')
            folders = self._run_both(f'record{number}', RecordingPlan(
                '', iteration, iteration, positions))
            repeated_a, repeated_b = map(read_run, folders)
            earlier = first_iteration(repeated_a, repeated_b)[1]
            if earlier is not None and earlier.iteration < iteration:
                notes += (f'in a repetition, the runs first differ at iteration '
                          f'{earlier.iteration}, not {iteration}: the cause is intermittent', )
                differing = earlier
                positions = positions_of(repeated_a, repeated_b, earlier.iteration)
                continue
            diagnosis = diagnose_ranks(iteration, folders[0], folders[1], sorted(differing.ranks))
            if diagnosis is not None:
                kept = self._values(diagnosis, iteration) if values and number == 0 else None
                result = LocaliseResult('found', compared, differing, positions, diagnosis, kept)
                break
        return result._replace(notes=notes)

    def _values(self, diagnosis: Diagnosis, iteration: int) -> ValueDifference | None:
        """Measure the results of the named operator in one more run of the recorded iteration."""
        rank, records = diagnosis.rank, (diagnosis.record_a, diagnosis.record_b)
        if diagnosis.kind not in ('output', 'generator') or records[0] is None \
                or not diagnosis.stack:
            return None
        self.say(f'running again for the values of {diagnosis.operator}')
        folders = self._run_both('values', RecordingPlan('', iteration, iteration, ()),
                                 [{rank: number} for number in records])
        return compare_kept(folders[0], folders[1], rank)

    def _run_both(self, name: str, plan: RecordingPlan,
                  keep: Sequence[Any] = (None, None)) -> list[str]:
        folders: list[str] = []
        started = time.monotonic()
        for spec, kept in zip(self.specs, keep):
            folder = os.path.join(self.work_dir, spec.name, name)
            os.makedirs(folder)
            took = f' (run A took {duration(time.monotonic() - started)})' if folders else ''
            self.say(f'run {spec.name}: training up to iteration {plan.stop}{took}')
            self.launch(spec, folder, plan._replace(folder=folder, keep=kept))
            folders.append(folder)
        return folders


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
