"""The report of a study of many seeds."""
from __future__ import annotations

from typing import Any

from ..exit_codes import DIFFERENT, DONE
from .plot_style import DIFFERENCE, INK, SOFT, figure, palette, png
from .report import Figure, Report
from .seed_study import Study
from .stats import MIN_PAIRS, Paired, Summary
from .table import Table


def caution(found: Study) -> list[str]:
    """What a careful reader would ask for."""
    said = []
    n = len(found.seeds)
    if n < 3:
        said.append(f'{n} seed{"s" if n > 1 else ""}: too few for a standard deviation that means '
                    'anything; run 3 at the least')
    elif n < MIN_PAIRS:
        said.append(f'{n} seeds: the interval is wide and rests on values being normal; '
                    f'{MIN_PAIRS} or more are better')
    if found.pick == 'best':
        said.append('the best validation of a run is chosen by the data that it is judged on: '
                    'means are too high, for all configs')
    return said


def plot(found: Study) -> bytes:
    """A dot per seed, mean and confidence interval; lines join the same seed of all configs."""
    labels = list(found.values)
    two = bool(found.tests)
    letters = [f'{chr(ord("A") + index)}  {label}' for index, label in enumerate(labels)]
    colors = palette(len(labels))
    with figure(1, 2 if two else 1, figsize=(10 if two else 5.6, 4), squeeze=False,
                width_ratios=[3, 2] if two else [1]) as (fig, grid):
        axes = grid[0][0]
        if two:
            for pair in zip(*found.values.values()):
                axes.plot(range(len(labels)), pair, color=SOFT, linewidth=.8, alpha=.7, zorder=1)
        for x, (label, color) in enumerate(zip(labels, colors)):
            values, one = found.values[label], found.summaries[label]
            axes.scatter([x] * len(values), values, color=color, s=34, zorder=3,
                         edgecolor='white', linewidth=.6, label='one seed' if not x else None)
            _interval(axes, x + (.16 if x else -.16), one, color)
        axes.set_xticks(range(len(labels)), letters if two else labels)
        axes.set_xlim(-.5, len(labels) - .5)
        axes.grid(False, axis='x')
        axes.set_ylabel(f'{found.metric}, {found.pick} validation')
        axes.set_title(f'{len(found.seeds)} seeds; bar: mean, 95 % interval')
        if two:
            if found.test is not None:
                _differences(grid[0][1], found, found.test)
            else:
                _intervals(grid[0][1], found)
        return png(fig)


def _interval(axes: Any, x: float, one: Summary, color: str) -> None:
    axes.plot([x - .07, x + .07], [one.mean, one.mean], color=color, linewidth=2.6)
    if one.low is not None:
        axes.plot([x, x], [one.low, one.high], color=color, linewidth=1.6)


def _differences(axes: Any, found: Study, test: Paired) -> None:
    a, b = found.values.values()
    gaps = [y - x for x, y in zip(a, b)]
    axes.axhline(0, color=INK, linewidth=1)
    axes.scatter(range(len(gaps)), gaps, color=DIFFERENCE, s=34, zorder=3, edgecolor='white')
    one = test.difference
    if one.low is not None:
        axes.axhspan(one.low, one.high, color=DIFFERENCE, alpha=.14, linewidth=0,
                     label='95 % interval of the mean')
    axes.axhline(one.mean, color=DIFFERENCE, linestyle='--', linewidth=1.4, label='mean')
    axes.set_xticks(range(len(gaps)), [str(seed) for seed in found.seeds])
    axes.grid(False, axis='x')
    axes.set_xlabel('seed')
    axes.set_ylabel(f'B − A, {found.metric}')
    axes.set_title('difference, seed by seed')
    axes.legend(loc='best')


def _intervals(axes: Any, found: Study) -> None:
    """Of several configs: the mean difference of each to the first."""
    axes.axhline(0, color=INK, linewidth=1)
    for x, one in enumerate(found.tests.values()):
        axes.scatter([x], [one.difference.mean], color=DIFFERENCE, s=44, zorder=3)
        _interval(axes, x, one.difference, DIFFERENCE)
    axes.set_xticks(range(len(found.tests)), [chr(ord('B') + x) for x in range(len(found.tests))])
    axes.set_xlim(-.5, len(found.tests) - .5)
    axes.grid(False, axis='x')
    axes.set_ylabel(f'difference to A, {found.metric}')
    axes.set_title('mean difference, 95 % interval')


def scalars(found: Study) -> list[tuple[str, float, int]]:
    """``(tag, value, step)``: a value per seed (the step is the seed), then the summary."""
    rows = []
    for label, values in found.values.items():
        tag = f'mmrepro/seeds/{label}/{found.metric}'
        rows += [(tag, value, seed) for seed, value in zip(found.seeds, values)]
        one = found.summaries[label]
        rows += [(f'{tag}/{name}', getattr(one, name), 0) for name in ('mean', 'std', 'low', 'high')
                 if getattr(one, name) is not None]
    for label, test in found.tests.items():
        tag = 'mmrepro/seeds' if found.test is not None else f'mmrepro/seeds/{label}'
        rows.append((f'{tag}/difference', test.difference.mean, 0))
        rows.append((f'{tag}/p_sign_flip', test.flip_p, 0))
        if test.t_p is not None:
            rows.append((f'{tag}/p_t', test.t_p, 0))
    return rows


def _rows(found: Study) -> tuple[list[str], list[list[str]]]:
    head = ['seed', *found.values]
    rows = [[str(seed), *(f'{values[index]:.4f}' for values in found.values.values())]
            for index, seed in enumerate(found.seeds)]
    summaries = list(found.summaries.values())
    rows.append(['mean', *(f'{one.mean:.4f}' for one in summaries)])
    rows.append(['std', *(_text(one.std) for one in summaries)])
    rows.append(['95 % interval', *('-' if one.low is None else f'{one.low:.4f} to {one.high:.4f}'
                                    for one in summaries)])
    return head, rows


def _text(value: float | None) -> str:
    return '-' if value is None else f'{value:.4g}'


def _tests(test: Paired) -> list[list[str]]:
    one = test.difference
    interval = '-' if one.low is None else f'{one.low:+.4f} to {one.high:+.4f}'
    return [
        ['mean of B - A', f'{one.mean:+.4f}', f'95 % interval {interval}'],
        ['paired t test', f'p = {_text(test.t_p)}', 'differences are normal'],
        ['sign flips', f'p = {test.flip_p:.4g}', 'no assumption on their shape; smallest possible: '
         f'{test.smallest_p:.3g}'],
        ['Wilcoxon', f'p = {_text(test.wilcoxon_p)}', 'by ranks'],
        ['can be seen', _text(test.detectable), 'difference found 4 times out of 5 with so many '
         'seeds'],
        ['correlation', _text(test.correlation), 'of A and B over the seeds; pairs help where it '
         'is above 0'],
    ]


COMPARED = ('against the first', 'difference', '95 % interval', 'p', "Holm's p", 'larger')


def _compared(found: Study) -> list[list[str]]:
    """A row for each of several configs."""
    return [[label, f'{one.difference.mean:+.4f}',
             '-' if one.difference.low is None else
             f'{one.difference.low:+.4f} to {one.difference.high:+.4f}', _text(one.t_p),
             _text(found.corrected[label]), 'yes' if found.larger[label] else 'no']
            for label, one in found.tests.items()]


def verdicts(found: Study) -> list[str]:
    """What the tests say, in words."""
    said = [found.test.verdict] if found.test is not None else []
    if len(found.tests) > 1:
        better = [label for label, larger in found.larger.items() if larger]
        said.append(f'different from {next(iter(found.values))} by more than the noise of the '
                    f'seed, with {len(found.tests)} tests corrected by Holm\'s method: '
                    f'{", ".join(better) or "none"}')
    for label, one in found.equivalences.items():
        said.append(
            f'{label}: {"the same" if one.same else "not shown to be the same"} within '
            f'{one.margin:g} (90 % interval of the difference {one.low:+.4f} to {one.high:+.4f}, '
            f'p = {one.p:.2g})')
    for label, plan in found.plans.items():
        said.append(
            f'{label}: to see a difference of {plan.difference:g} 4 times out of 5, '
            f'{plan.seeds} seeds ({plan.low} to {plan.high}, as the pilot knows its spread only '
            f'roughly: differences have a std of {plan.std:.3g})')
    return said


def report_of(found: Study) -> Report:
    """The report of a study; 1 is its exit code if what was asked for was not found."""
    head, rows = _rows(found)
    tables = [Table(head, rows, f'{found.metric}, {found.pick} validation',
                    [''] * len(found.seeds) + ['strong'] * (len(rows) - len(found.seeds)))]
    if found.test is not None:
        tables.append(Table(('test', '', ''), _tests(found.test), 'Tests'))
    elif found.tests:
        tables.append(Table(COMPARED, _compared(found), 'Tests'))
    return Report(
        f'{" and ".join(found.values)}, {len(found.seeds)} seeds', '\n'.join(verdicts(found)),
        DIFFERENT if found.answer is False else DONE, tables, caution(found),
        figures={'seeds': Figure(f'{found.metric}, {found.pick} validation', lambda: plot(found))},
        data=dict(found._asdict(), test=found.test), scalars=scalars(found))
