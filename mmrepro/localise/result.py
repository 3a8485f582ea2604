"""What a search for the first difference of two runs has found, in words and as data."""
from __future__ import annotations

from typing import Any, NamedTuple

from ..report.report import plain
from ..util.text import listed
from .module_outputs import ValueDifference

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
    notes: tuple[str, ...] = ()  # what a reader should know
    # settings, versions, data or variables that differ, or may differ, between the runs
    unequal: tuple[str, ...] = ()
    # iterations at which repetitions differed before the iteration that they recorded
    earlier: tuple[str, ...] = ()

    def sentence(self) -> str:
        """Return the verdict in words."""
        if self.verdict == 'equal':
            return f'SAME BITS: {self.compared} iterations agree'
        if self.verdict == 'metrics':
            return (f'DIFFERENT BITS: {self.compared} iterations of training agree, and '
                    f'{self.divergence.text()}\n{METRICS}')
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
        return self.diagnosis.rows() + values

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for programs."""
        first = self.divergence
        return plain(dict(
            verdict=self.verdict, compared=self.compared, notes=self.notes,
            divergence=None if first is None else dict(
                iteration=first.iteration, positions=self.positions,
                fields={rank: [field.field for field in fields]
                        for rank, fields in first.ranks.items()}),
            finding=self.diagnosis, values=self.values, unequal=self.unequal))
