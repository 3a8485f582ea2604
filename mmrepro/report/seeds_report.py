"""Tables, plot and HTML report of many seeds."""
from __future__ import annotations

from html import escape
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from .html import document, listing, picture, section, table
from .plot_style import DIFFERENCE, INK, SOFT, A, B, figure, png
from .stats import MIN_PAIRS, Paired, Summary, paired, summary

__all__ = ['Study', 'plot', 'report', 'scalars', 'show', 'study']


class Study(NamedTuple):
    """One metric over the seeds of one or two configs."""
    metric: str  # which metric, of which validation
    pick: str
    seeds: List[int]  # those of every config
    values: Dict[str, List[float]]  # label of the config -> a value per seed
    summaries: Dict[str, Summary]  # label -> summary
    test: Optional[Paired]  # the second config against the first; None for one config

    def as_dict(self) -> Dict[str, Any]:
        """Plain data for ``--json``."""
        test = None
        if self.test is not None:
            test = {**self.test._asdict(), 'difference': self.test.difference._asdict()}
        return dict(metric=self.metric, pick=self.pick, seeds=self.seeds, values=self.values,
                    summaries={label: one._asdict() for label, one in self.summaries.items()},
                    test=test)


def study(metric: str, pick: str, seeds: List[int], values: Dict[str, List[float]]) -> Study:
    """Summaries, and the paired test if there are two configs.

    Raises:
        ValueError: a value that is not a finite number.
    """
    labels = list(values)
    test = paired(values[labels[0]], values[labels[1]]) if len(labels) == 2 else None
    return Study(metric, pick, seeds, values, {label: summary(values[label]) for label in labels},
                 test)


def caution(found: Study) -> List[str]:
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
                    'means are too high, for both configs')
    return said


def plot(found: Study) -> bytes:
    """A dot per seed, mean and confidence interval; lines join the same seed of two configs."""
    labels = list(found.values)
    two = found.test is not None
    with figure(1, 2 if two else 1, figsize=(10 if two else 5.6, 4), squeeze=False,
                width_ratios=[3, 2] if two else [1]) as (fig, grid):
        axes = grid[0][0]
        if two:
            for pair in zip(*found.values.values()):
                axes.plot([0, 1], pair, color=SOFT, linewidth=.8, alpha=.7, zorder=1)
        for x, (label, colour) in enumerate(zip(labels, (A, B))):
            values, one = found.values[label], found.summaries[label]
            axes.scatter([x] * len(values), values, color=colour, s=34, zorder=3,
                         edgecolor='white', linewidth=.6, label='one seed' if not x else None)
            _interval(axes, x + (.16 if x else -.16), one, colour)
        names = [f'{letter}  {label}' for letter, label in zip('AB', labels)] if two else labels
        axes.set_xticks(range(len(labels)), names)
        axes.set_xlim(-.5, len(labels) - .5)
        axes.grid(False, axis='x')
        axes.set_ylabel(f'{found.metric}, {found.pick} validation')
        axes.set_title(f'{len(found.seeds)} seeds; bar: mean, 95 % interval')
        if two:
            _differences(grid[0][1], found)
        return png(fig)


def _interval(axes: Any, x: float, one: Summary, colour: str) -> None:
    axes.plot([x - .07, x + .07], [one.mean, one.mean], color=colour, linewidth=2.6)
    if one.low is not None:
        axes.plot([x, x], [one.low, one.high], color=colour, linewidth=1.6)


def _differences(axes: Any, found: Study) -> None:
    a, b = found.values.values()
    gaps = [y - x for x, y in zip(a, b)]
    axes.axhline(0, color=INK, linewidth=1)
    axes.scatter(range(len(gaps)), gaps, color=DIFFERENCE, s=34, zorder=3, edgecolor='white')
    one = found.test.difference
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


def scalars(found: Study) -> List[Tuple[str, float, int]]:
    """``(tag, value, step)``: a value per seed (the step is the seed), then the summary."""
    rows = []
    for label, values in found.values.items():
        tag = f'mmrepro/seeds/{label}/{found.metric}'
        rows += [(tag, value, seed) for seed, value in zip(found.seeds, values)]
        one = found.summaries[label]
        rows += [(f'{tag}/{name}', getattr(one, name), 0) for name in ('mean', 'std', 'low', 'high')
                 if getattr(one, name) is not None]
    if found.test is not None:
        rows.append(('mmrepro/seeds/difference', found.test.difference.mean, 0))
        rows.append(('mmrepro/seeds/p_sign_flip', found.test.flip_p, 0))
        if found.test.t_p is not None:
            rows.append(('mmrepro/seeds/p_t', found.test.t_p, 0))
    return rows


def _rows(found: Study) -> Tuple[List[str], List[List[str]]]:
    head = ['seed', *found.values]
    rows = [[str(seed), *(f'{values[index]:.4f}' for values in found.values.values())]
            for index, seed in enumerate(found.seeds)]
    summaries = list(found.summaries.values())
    rows.append(['mean', *(f'{one.mean:.4f}' for one in summaries)])
    rows.append(['std', *(_text(one.std) for one in summaries)])
    rows.append(['95 % interval', *('-' if one.low is None else f'{one.low:.4f} to {one.high:.4f}'
                                    for one in summaries)])
    return head, rows


def _text(value: Optional[float]) -> str:
    return '-' if value is None else f'{value:.4g}'


def _tests(found: Study) -> List[List[str]]:
    test = found.test
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


def show(found: Study, console: Any) -> None:
    """Print the tables."""
    from rich.table import Table
    from rich.text import Text
    head, rows = _rows(found)
    values = Table(*head, title=f'{found.metric}, {found.pick} validation', box=None,
                   title_justify='left')
    for index, row in enumerate(rows):
        values.add_row(*row, style='bold' if index >= len(found.seeds) else '')
    console.print(values)
    if found.test is not None:
        tests = Table('test', '', '', box=None)
        for row in _tests(found):
            tests.add_row(*row)
        console.print()
        console.print(tests)
        console.print(Text(f'\n{found.test.verdict}',
                           'bold green' if found.test.larger else 'bold'))
    for line in caution(found):
        console.print(Text(f'note: {line}', 'yellow'))


def report(found: Study, drawn: bytes) -> str:
    """One self-contained HTML document."""
    head, rows = _rows(found)
    title = f'{" and ".join(found.values)}, {len(found.seeds)} seeds'
    parts = [f'<h1>{escape(title)}</h1>']
    if found.test is not None:
        kind = 'same' if found.test.larger else 'other'
        parts.append(f'<div class="verdict {kind}">{found.test.verdict}</div>')
    parts.append(picture(f'{found.metric}, {found.pick} validation', drawn))
    parts.append(section('Values', table(head, rows)))
    if found.test is not None:
        parts.append(section('Tests', table(('test', '', 'assumes'), _tests(found))))
    parts.append(section('Notes', listing(caution(found))))
    return document(title, parts)
