"""How far the numbers of two runs are apart, for runs on machines that cannot give equal bits.

The compared numbers are losses, norms of the parameters (level 'parameter') and metrics. Digests do
not count. The epoch and the samples of a batch have no tolerance: they are equal on any machine.
"""
from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from ..errors import ConfigError
from ..fingerprint.divergence import divergences
from .comparison import Comparison, columns
from .table import Table

EXACT = ('epoch', 'batch.positions', 'batch.indices')
MAX_ROWS = 20


class NumberDistance(NamedTuple):
    """One number that both runs recorded, over all iterations that they share."""
    field: str
    compared: int
    relative: float  # the largest |A - B| / max(|A|, |B|)
    at: int  # the iteration of the largest
    exceeds: int | None  # the first iteration with more than the tolerance


class Tolerance(NamedTuple):
    """Two runs, compared with a tolerance."""
    tolerance: float
    distances: list[NumberDistance]  # the farthest first
    unequal: tuple[int, str] | None  # first iteration and field with different samples

    @property
    def within(self) -> bool:
        return self.unequal is None and all(row.exceeds is None for row in self.distances)

    def verdict(self) -> str:
        if self.unequal is not None:
            return ('NOT COMPARABLE: {1} differs in iteration {0}, which is the same on every '
                    'machine: these are trainings on other data'.format(*self.unequal))
        beyond = [(row.exceeds, row.field) for row in self.distances if row.exceeds is not None]
        if not beyond:
            return (f'WITHIN {self.tolerance:g}: {len(self.distances)} numbers, at most '
                    f'{self.distances[0].relative:.2g} apart ({self.distances[0].field})')
        iteration, field = min(beyond, key=lambda pair: pair[0])
        return (f'BEYOND {self.tolerance:g}: {len(beyond)} of {len(self.distances)} numbers, first '
                f'{field} in iteration {iteration}')

    def table(self) -> Table:
        """Return the table of the numbers, those that are farthest apart first."""
        return Table(
            ('number', 'compared', 'relative', 'iteration', f'beyond {self.tolerance:g} from'),
            [(row.field, str(row.compared), f'{row.relative:.3g}', str(row.at),
              '-' if row.exceeds is None else f'iteration {row.exceeds}')
             for row in self.distances], 'Numbers that both runs recorded', shown=MAX_ROWS,
            rest='more that are nearer')


def relative(a: float, b: float) -> float:
    """Return |a - b| / max(|a|, |b|).

    >>> relative(1., 1.), relative(2., 1.), relative(float('nan'), float('nan'))
    (0.0, 0.5, 0.0)
    """
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def measure(comparison: Comparison, tolerance: float) -> Tolerance:
    """Measure the distance of every number that both runs have."""
    if not 0 < tolerance < math.inf:
        raise ConfigError(f'--tolerance {tolerance:g} is not allowed; allowed is a number above 0, '
                          'such as 1e-4')
    kinds = {'': comparison.losses, 'metric ': comparison.vals}
    if comparison.exact:
        kinds['norm of '] = columns(comparison.a.norms, comparison.b.norms)
    distances = [_distance(prefix + name, *column, tolerance)
                 for prefix, numbers in kinds.items() for name, column in numbers.items()]
    if not distances:
        raise ConfigError(f'--tolerance: {comparison.a.path} and {comparison.b.path} have no '
                          'losses, norms or metrics in common')
    distances.sort(key=lambda row: -row.relative)
    return Tolerance(tolerance, distances, _unequal(comparison))


def _distance(name: str, steps: list[int], a: list[float], b: list[float],
              tolerance: float) -> NumberDistance:
    apart = list(map(relative, a, b))
    largest = max(range(len(apart)), key=apart.__getitem__)
    return NumberDistance(
        name, len(steps), apart[largest], steps[largest],
        next((step for step, distance in zip(steps, apart) if distance > tolerance), None))


def _unequal(comparison: Comparison) -> tuple[int, str] | None:
    """Return the first iteration and field in which fingerprints show different samples."""
    for found in divergences(comparison.a.ranks, comparison.b.ranks):
        for field in itertools.chain.from_iterable(found.ranks.values()):
            if field.field in EXACT:
                return found.iteration, field.field
    return None
