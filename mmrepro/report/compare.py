"""The report of a comparison of two runs."""
from __future__ import annotations

import math
from functools import partial
from typing import Any

from ..exit_codes import DIFFERENT, DONE, NOTHING_TO_COMPARE
from ..text import listed, shorten
from . import tolerance as distances
from .comparison import Comparison, compare_paths, is_known
from .comparison_plots import PLOTS
from .model import Figure, Table
from .report import Report

MAX_ROWS = 20  # of a table on a terminal
ORDER = ('Fields in the order in which an iteration computes them. The first that differs is the '
         'nearest to the cause; those below follow from it.')


def compare(run_a: str, run_b: str, *, weights: bool = True,
            tolerance: float | None = None) -> Report:
    """Compare two runs: what they were made of, where they diverge, how the difference grows.

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
    found = compare_paths(run_a, run_b, weights)
    near = None if tolerance is None else distances.measure(found, tolerance)
    return report_of(found, near)


def report_of(found: Comparison, near: distances.Tolerance | None = None) -> Report:
    """Tables, verdict and figures of a comparison; with ``near``, the verdict is that of a
    comparison with tolerance."""
    passed = found.equal if near is None else near.within
    code = NOTHING_TO_COMPARE if not found.common else DONE if passed else DIFFERENT
    verdict = found.verdict() if near is None else f'{found.verdict()}\n{near.verdict()}'
    figures = {name: Figure(title, partial(draw, found)) for name, (title, draw) in PLOTS.items()}
    data = _data(found)
    if near is not None:
        data['tolerance'] = dict(near._asdict(), within=near.within)
    tables = [_runs(found), _manifest(found), *_first_difference(found), *_losses(found),
              *_weights(found), *([near.table()] if near is not None else [])]
    return Report(f'{found.a.name} and {found.b.name}', verdict, code, tables, found.notes,
                  advice(found), figures, data, _scalars(found))


def _runs(found: Comparison) -> Table:
    rows = [(letter, run.path, run.kind, str(len(run.iterations)),
             f'{run.iterations[0]} to {run.iterations[-1]}' if run.iterations else '-',
             str(run.starts)) for letter, run in (('A', found.a), ('B', found.b))]
    return Table(('', 'directory', 'read from', 'iterations', 'span', 'starts'), rows, code=(1, ))


def _manifest(found: Comparison) -> Table:
    title = 'What the runs were made of'
    rows = found.manifest
    if not rows:
        known = is_known(found.a) and is_known(found.b)
        return Table((), (), title, text='No difference in what was recorded.' if known else
                     'Nothing was recorded of what one of the runs was made of.')
    harmless = sum(row.severity == 'harmless' for row in rows)
    shown = min(len(rows) - harmless, MAX_ROWS)
    more = len(rows) - shown
    return Table(
        ('made of', 'A', 'B', 'severity', 'consequence'),
        [(row.name, shorten(row.then, 40), shorten(row.now, 40), row.severity, row.consequence)
         for row in rows], title,
        ['soft' if row.severity == 'harmless' else '' for row in rows], shown=shown, code=(0, 1, 2),
        rest=f'{more} more difference{"" if more == 1 else "s"} in what they were made of, '
             f'{"all" if harmless == more else harmless} harmless; --all lists them')


def _first_difference(found: Comparison) -> list[Table]:
    first = found.first
    if first is None:
        return []
    epoch = '' if first.epoch is None else f', epoch {first.epoch}'
    text = f'{ORDER} {found.differing} of {len(found.common)} common iterations differ.'
    return [Table(
        ('field', 'A', 'B', '', 'which'),
        [(field.field, field.a, field.b, 'same' if field.same else 'differs',
          listed(field.names, 4)) for field in first.fields],
        f'First difference: iteration {first.iteration}{epoch}',
        ['' if field.same else 'bad' for field in first.fields],
        f'{text}\n{first.module}' if first.module else text, code=(0, 1, 2, 4))]


def _losses(found: Comparison) -> list[Table]:
    if found.first is None or not found.losses:
        return []
    return [Table(
        ('loss', 'last common', 'A', 'B', 'largest difference'),
        [(name, str(steps[-1]), f'{a[-1]:.9g}', f'{b[-1]:.9g}', f'{_largest(a, b):.3g}')
         for name, (steps, a, b) in found.losses.items()], 'Losses', shown=MAX_ROWS)]


def _largest(a: list[float], b: list[float]) -> float:
    """The largest finite difference; NaN where there is none."""
    return max((abs(y - x) for x, y in zip(a, b) if math.isfinite(y - x)), default=math.nan)


def _weights(found: Comparison) -> list[Table]:
    rows = sorted(found.weights, key=lambda row: not (row.distance or row.note))
    differing = sum(bool(row.distance or row.note) for row in rows)
    if not rows:
        return []
    return [Table(
        ('checkpoint', 'distance', 'relative', 'largest relative distances', 'note'),
        [(row.name, *row.as_text(), '; '.join(
            f'{name} {value:.2g}' for name, value in row.largest[:3]), row.note) for row in rows],
        'Checkpoints', ['bad' if row.distance else '' for row in rows], shown=differing,
        rest=f'{len(rows) - differing} checkpoint{"s" if len(rows) > differing + 1 else ""} '
             'without a difference', code=(0, 3))]


def advice(found: Comparison) -> list[str]:
    """What to do with this outcome, the most useful first."""
    items = []
    changing = [row.name for row in found.manifest if row.severity == 'changes bits']
    if changing and not found.equal:
        items.append(f'First make these equal, they change bits: {listed(changing, 6)}')
    if not found.exact:
        items.append('Record fingerprints: mmrepro train CONFIG --fingerprint')
    elif found.first is not None and not changing:
        items.append(f'mmrepro localise {found.a.path} {found.b.path} names the operator, '
                     'transform or hook behind it')
    if found.exact and not found.diverged and found.first is not None:
        items.append('mmrepro train CONFIG --fingerprint parameter shows in which parameters it '
                     'begins')
    if not found.equal:
        items.append('docs/how-to/my-runs-differ.md leads from symptom to fix')
    return items


def _data(found: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    first = found.first
    return dict(
        equal=found.equal, exact=found.exact, verdict=found.verdict(),
        runs=[dict(path=run.path, kind=run.kind, iterations=len(run.iterations),
                   starts=run.starts) for run in (found.a, found.b)],
        common=len(found.common), differing=found.differing,
        only=[len(extra) for extra in found.only],
        first=None if first is None else dict(
            iteration=first.iteration, epoch=first.epoch, rank=first.rank,
            field=first.field.field, names=first.field.names, module=first.module,
            fields=first.fields),
        manifest=found.manifest, diverged=found.diverged, weights=found.weights,
        losses={name: dict(iteration=steps[-1], a=a[-1], b=b[-1],
                           largest_difference=_largest(a, b))
                for name, (steps, a, b) in found.losses.items()})


def _scalars(found: Comparison) -> list[tuple[str, float, int]]:
    """The verdict, and the difference of every loss at every iteration."""
    rows = [('mmrepro/compare/equal', float(found.equal), 0)]
    if found.first is not None:
        rows.append(('mmrepro/compare/first_difference', float(found.first.iteration), 0))
    for name, (steps, losses_a, losses_b) in found.losses.items():
        rows += [(f'mmrepro/compare/{name}_difference', b - a, i)
                 for i, a, b in zip(steps, losses_a, losses_b) if math.isfinite(b - a)]
    return rows
