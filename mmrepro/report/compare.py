"""The report of a comparison of two runs."""
from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, ConfigError
from ..fingerprint.divergence import divergences
from ..fingerprint.schema import is_number, number
from ..util.text import listed, page, shorten
from .comparison import (
    Column,
    Comparison,
    columns,
    compare_paths,
    differing_parts,
    has_objects,
    is_known,
)
from .plots import PLOTS
from .report import Figure, Report, Table

MAX_ROWS = 20  # of a table on a terminal
ORDER = ('Fields in the order in which an iteration computes them. The first that differs is the '
         'nearest to the cause; those below follow from it.')


def compare(run_a: str, run_b: str, *, weights: bool = True,
            tolerance: float | None = None) -> Report:
    """Compare two runs: settings and environment, where they diverge, how the difference grows.

    Runs with fingerprints are compared bit for bit, other runs by the logs of MMEngine.

    Args:
        run_a, run_b: a work directory, a time-stamped folder of MMEngine, or a ``scalars.json``.
        weights: read the checkpoints that both runs have.
        tolerance: largest relative difference of losses, norms and metrics that is accepted, for
            runs on different machines.

    Returns:
        A report whose exit code is 0 (nothing differs), 1 (something does) or 3 (there is no
        common iteration).

    Raises:
        RunError: a path holds no run, or a file of it is damaged.
        ConfigError: the tolerance is not allowed.
    """
    comparison = compare_paths(run_a, run_b, weights)
    return report_of(comparison, None if tolerance is None else measure(comparison, tolerance))


def report_of(comparison: Comparison, tolerance: Tolerance | None = None) -> Report:
    """Report a comparison; the exit code is that of ``tolerance`` if that is given."""
    passed, verdict, data = comparison.equal, comparison.verdict(), _data(comparison)
    tables = [_runs(comparison), _manifest(comparison)]
    if comparison.first is not None:
        tables.append(_first_difference(comparison, data['first']))
    if not comparison.equal:
        tables += _columns('loss', comparison.losses)
    if not comparison.equal or any(comparison.lone_vals):
        tables += _columns('metric', {name: column for name, column in comparison.vals.items()
                                      if has_objects(column)}, comparison.lone_vals)
    if comparison.weights:
        tables.append(_weights(comparison))
    if tolerance is not None:
        passed, verdict = tolerance.within, f'{verdict}\n{tolerance.verdict()}'
        data['tolerance'] = dict(tolerance._asdict(), within=passed)
        tables.append(tolerance.table())
    code = DONE if passed else DIFFERENT
    if not comparison.common:
        code = NOTHING_TO_COMPARE
    return Report(
        f'{comparison.a.name} and {comparison.b.name}', verdict, code, tables, comparison.notes,
        advice(comparison),
        {name: Figure(title, partial(draw, comparison)) for name, (title, draw) in PLOTS.items()},
        data)


def _runs(comparison: Comparison) -> Table:
    rows = [(letter, run.path, run.kind, str(len(run.iterations)),
             f'{run.iterations[0]} to {run.iterations[-1]}' if run.iterations else '-',
             str(run.starts)) for letter, run in (('A', comparison.a), ('B', comparison.b))]
    return Table(('', 'directory', 'read from', 'iterations', 'span', 'starts'), rows, code=(1, ))


def _manifest(comparison: Comparison) -> Table:
    title = 'Settings and environment'
    rows = comparison.manifest
    if not rows:
        known = is_known(comparison.a) and is_known(comparison.b)
        return Table((), (), title, text='No difference in what was recorded.' if known else
                     'The settings and environment of one run were not recorded.')
    harmless = sum(row.severity == 'harmless' for row in rows)
    shown = min(len(rows) - harmless, MAX_ROWS)
    more = len(rows) - shown
    return Table(
        ('name', 'A', 'B', 'severity', 'consequence'),
        [(row.name, shorten(row.then, 40), shorten(row.now, 40), row.severity, row.consequence)
         for row in rows], title,
        ['soft' if row.severity == 'harmless' else '' for row in rows], shown=shown, code=(0, 1, 2),
        rest=f'more difference{"" if more == 1 else "s"} in settings and environment, '
             f'{"all" if harmless == more else harmless} harmless; --all lists them')


def _first_difference(comparison: Comparison, first: Mapping[str, Any]) -> Table:
    epoch = '' if first['epoch'] is None else f', epoch {first["epoch"]}'
    text = (f'{ORDER} {comparison.differing} of {len(comparison.common)} common iterations '
            f'differ.\n{first["module"]}')
    return Table(
        ('field', 'A', 'B', '', 'which'),
        [(row['field'], row['a'], row['b'], 'same' if row['same'] else 'differs',
          listed(row['names'], 4)) for row in first['fields']],
        f'First difference: iteration {first["iteration"]}{epoch}',
        ['' if row['same'] else 'bad' for row in first['fields']], text.rstrip(),
        code=(0, 1, 2, 4))


def _first_data(comparison: Comparison) -> dict[str, Any] | None:
    """Return the first iteration that differs: its fields, from cause to effect, as text."""
    first = comparison.first
    if first is None:
        return None
    steps = comparison.a.ranks[first.rank].steps if comparison.exact else {}
    return dict(
        iteration=first.iteration, epoch=steps.get(first.iteration, {}).get('epoch'),
        rank=first.rank, field=first.field.field, names=differing_parts(first.field),
        module=next((field.call for field in comparison.fields if field.call), ''),
        fields=[dict(field=field.field, a=_text(field.a, field.names),
                     b=_text(field.b, field.names), same=field.same, names=differing_parts(field))
                for field in comparison.fields])


def _text(value: Any, names: Sequence[str]) -> str:
    """Format up to three parts of a value, those with these names if there are any."""
    if isinstance(value, dict):
        parts = {name: value.get(name) for name in names} if names else value
        return ', '.join(f'{name}={_decimal(part)}' for name, part in list(parts.items())[:3])
    return _decimal(value) if isinstance(value, float) else shorten(value)


def _decimal(value: Any) -> str:
    if isinstance(value, list):
        return ' '.join(map(_decimal, value[:2]))
    if value is None:
        return '(missing)'
    if not is_number(value) or isinstance(value, str) and not value.lstrip('-').startswith(
            ('0x', 'inf', 'nan')):
        return str(value)
    return f'{number(value):.9g}'


def _columns(kind: str, columns: Mapping[str, Column],
             lone: Sequence[Mapping[str, tuple[int, float]]] = ({}, {})) -> list[Table]:
    """Return the table of numbers by name; ``lone`` are those that one run has alone."""
    rows = [(name, str(steps[-1]), f'{a[-1]:.9g}', f'{b[-1]:.9g}', f'{_largest(a, b):.3g}')
            for name, (steps, a, b) in columns.items()]
    only_a, only_b = lone
    rows += [(name, '-', f'{value:.9g}', '-', f'A only, step {step}')
             for name, (step, value) in only_a.items()]
    rows += [(name, '-', '-', f'{value:.9g}', f'B only, step {step}')
             for name, (step, value) in only_b.items()]
    if not rows:
        return []
    title = {'loss': 'Losses', 'metric': 'Metrics'}
    return [Table((kind, 'last common', 'A', 'B', 'largest difference'), rows, title[kind],
                  shown=MAX_ROWS, rest='more')]


def _largest(a: list[float], b: list[float]) -> float:
    """Return the largest finite difference; NaN where there is none."""
    return max((abs(y - x) for x, y in zip(a, b) if math.isfinite(y - x)), default=math.nan)


def _weights(comparison: Comparison) -> Table:
    checkpoints = sorted(comparison.weights, key=lambda row: not (row.distance or row.note))
    differing = sum(bool(row.distance or row.note) for row in checkpoints)
    return Table(
        ('checkpoint', 'distance', 'relative', 'largest relative distances', 'note'),
        [(row.name, '-' if row.distance is None else f'{row.distance:.6g}',
          '-' if row.relative is None else f'{row.relative:.3g}',
          '; '.join(f'{name} {value:.2g}' for name, value in row.largest[:3]), row.note)
         for row in checkpoints],
        'Checkpoints', ['' if row.same else 'bad' for row in checkpoints], shown=differing,
        rest=f'checkpoint{"s" if len(checkpoints) > differing + 1 else ""} without a difference',
        code=(0, 3))


def advice(comparison: Comparison) -> list[str]:
    """Return the next things to do, the most useful first."""
    items = []
    changing = [row.name for row in comparison.manifest if row.severity == 'changes bits']
    if changing and not comparison.equal:
        items.append(f'First make these equal, they change bits: {listed(changing, 6)}')
    if not comparison.exact:
        items.append('Record fingerprints: mmrepro train CONFIG --fingerprint')
    elif comparison.first is not None and not changing:
        items.append(f'mmrepro localise {comparison.a.path} {comparison.b.path} names the '
                     'operator, transform or hook behind it')
    if comparison.exact and not comparison.diverged and comparison.first is not None:
        items.append('mmrepro train CONFIG --fingerprint parameter shows in which parameters it '
                     'begins')
    if not comparison.equal:
        items.append(f"{page('how-to/my-runs-differ.md')} leads from symptom to fix")
    return items


def _data(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for programs."""
    return dict(
        equal=comparison.equal, exact=comparison.exact, verdict=comparison.verdict(),
        runs=[dict(path=run.path, kind=run.kind, iterations=len(run.iterations),
                   starts=run.starts) for run in (comparison.a, comparison.b)],
        common=len(comparison.common), differing=comparison.differing,
        only=[len(extra) for extra in comparison.only],
        first=_first_data(comparison),
        manifest=comparison.manifest, diverged=comparison.diverged, weights=comparison.weights,
        losses={name: dict(iteration=steps[-1], a=a[-1], b=b[-1],
                           largest_difference=_largest(a, b))
                for name, (steps, a, b) in comparison.losses.items()})


EXACT = ('epoch', 'batch.positions', 'batch.indices')


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
            iteration, field = self.unequal
            return (f'NOT COMPARABLE: {field} differs in iteration {iteration}, and does not '
                    'depend on the machine: these are trainings on other data')
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
