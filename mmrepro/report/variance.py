"""Which stream of random numbers moves a metric: one varies, all others stay as they are."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import SeedsError
from ..exit_codes import DONE
from .plot_style import DIFFERENCE, INK, SOFT, A, figure, png
from .report import Figure, Report
from .stats import Summary, summary
from .table import Table

ALL = 'all'  # the name of the runs in which every stream varies
RESAMPLES = 10_000
MIN_SEEDS = 3
FARTHEST = 2.  # share that the plot has room for
FEW = 10  # below, an interval of a variance says little


class Share(NamedTuple):
    """The variance of one stream's runs, divided by that of the runs in which all streams vary."""
    value: float
    low: float  # 95 % interval, by bootstrap
    high: float


class VarianceStudy(NamedTuple):
    """One metric, while one stream or all of them vary."""
    metric: str
    pick: str
    label: str  # of the config
    seeds: list[int]  # of what varies; all other streams have the first of them
    values: dict[str, list[float]]  # 'all' and the streams -> a value per seed
    summaries: dict[str, Summary]
    shares: dict[str, Share]  # stream -> its share


def share(part: list[float], whole: list[float]) -> Share:
    """The variance of ``part`` as a share of that of ``whole``, with a bootstrap interval.

    Both are resampled by themselves, the same way in every call. Resamples in which ``whole`` is
    one value over and over have no share and do not count.

    >>> share([1., 2., 3.], [1., 3., 5.]).value
    0.25
    """
    values, all_values = np.asarray(part, float), np.asarray(whole, float)
    # the rounded mean of equal numbers may differ from them
    variance = 0. if np.ptp(values) == 0 else values.var(ddof=1)
    if np.ptp(all_values) == 0:
        raise SeedsError('the metric is the same whatever all streams draw: no variance to explain')
    draw = np.random.RandomState(0)
    drawn = values[draw.randint(len(values), size=(RESAMPLES, len(values)))]
    drawn_all = all_values[draw.randint(len(all_values), size=(RESAMPLES, len(all_values)))]
    varies = np.ptp(drawn_all, axis=1) > 0
    drawn, drawn_all = drawn[varies], drawn_all[varies]
    found = np.where(np.ptp(drawn, axis=1) > 0, drawn.var(1, ddof=1), 0) / drawn_all.var(1, ddof=1)
    low, high = np.percentile(found, [2.5, 97.5])
    return Share(float(variance / all_values.var(ddof=1)), float(low), float(high))


def study(metric: str, pick: str, label: str, seeds: list[int], values: dict[str, list[float]]
          ) -> VarianceStudy:
    """Summaries and shares; ``values`` has the runs of 'all' and those of each stream."""
    if len(seeds) < MIN_SEEDS:
        raise SeedsError(f'--vary with {len(seeds)} seeds: a variance needs at least {MIN_SEEDS}')
    summaries = {name: summary(sample) for name, sample in values.items()}
    try:
        shares = {name: share(sample, values[ALL])
                  for name, sample in values.items() if name != ALL}
    except SeedsError as error:
        raise SeedsError(f'{metric} of {label}, {len(seeds)} seeds: {error}') from error
    return VarianceStudy(metric, pick, label, seeds, values, summaries, shares)


def caution(found: VarianceStudy) -> list[str]:
    """What a careful reader would ask for."""
    said = [f'all other streams keep seed {found.seeds[0]}; around another seed a stream may '
            'matter more or less',
            'shares need not add up to 100 %: streams act on each other, and every share is '
            'estimated']
    if len(found.seeds) < FEW:
        said.append(f'{len(found.seeds)} seeds: the intervals are wide and rough; {FEW} or more '
                    'tell streams apart')
    still = [name for name, values in found.values.items() if len(set(values)) == 1]
    if still:
        said.append(f'{", ".join(still)}: the metric stays exactly the same')
    return said


def plot(found: VarianceStudy) -> bytes:
    """The values of each stream's runs, and its share of the variance with the interval."""
    names = list(found.values)
    with figure(1, 2, figsize=(10, 1.6 + .5 * len(names)), width_ratios=[3, 2], sharey=True
                ) as (fig, (left, right)):
        for y, name in enumerate(names):
            values, mean = found.values[name], found.summaries[name].mean
            color = INK if name == ALL else A
            left.scatter(values, [y] * len(values), color=color, s=30, alpha=.75, zorder=3,
                         edgecolor='white', linewidth=.6)
            left.plot([mean, mean], [y - .28, y + .28], color=color, linewidth=2)
            if name in found.shares:
                part = found.shares[name]
                high = min(part.high, FARTHEST)
                right.plot([100 * part.low, 100 * high], [y, y], color=DIFFERENCE, linewidth=1.8)
                if high < part.high:  # the table has the number
                    right.scatter([100 * high], [y], color=DIFFERENCE, s=44, marker='>')
                right.scatter([100 * min(part.value, FARTHEST)], [y], color=DIFFERENCE, s=44,
                              zorder=3, edgecolor='white')
        left.set_yticks(range(len(names)), names)
        left.set_ylim(len(names) - .5, -.5)
        left.grid(False, axis='y')
        left.set_xlabel(f'{found.metric}, {found.pick} validation')
        left.set_title(f'{len(found.seeds)} runs each; line: mean')
        right.axvline(100, color=SOFT, linewidth=1, linestyle='--')
        right.set_xlim(0, 110 * FARTHEST)
        right.grid(False, axis='y')
        right.set_xlabel('% of the variance with all streams varied')
        right.set_title('share, 95 % interval')
        return png(fig)


def scalars(found: VarianceStudy) -> list[tuple[str, float, int]]:
    """``(tag, value, step)``: a value per run (the step is the seed), then the shares."""
    rows = [(f'mmrepro/seeds/{found.label}/{name}/{found.metric}', value, seed)
            for name, values in found.values.items() for seed, value in zip(found.seeds, values)]
    return rows + [(f'mmrepro/seeds/{found.label}/{name}/share', part.value, 0)
                   for name, part in found.shares.items()]


HEAD = ('varied', 'runs', 'mean', 'std', 'share of variance', '95 % interval')


def _rows(found: VarianceStudy) -> list[list[str]]:
    rows = []
    for name, row in found.summaries.items():
        part: Share | None = found.shares.get(name)
        rows.append([name, str(row.n), f'{row.mean:.4f}', f'{row.std:.3g}',
                     '100 %' if part is None else f'{100 * part.value:.0f} %',
                     '' if part is None else f'{100 * part.low:.0f} to {100 * part.high:.0f} %'])
    return rows


def report_of(found: VarianceStudy) -> Report:
    """The report of a study."""
    runs = [[str(seed), *(f'{values[index]:.4f}' for values in found.values.values())]
            for index, seed in enumerate(found.seeds)]
    title = f'{found.metric}, {found.pick} validation'
    return Report(
        f'{found.label}: what moves {found.metric}', '', DONE,
        [Table(HEAD, _rows(found), title), Table(['seed', *found.values], runs, 'Values')],
        caution(found), figures={'seeds': Figure(title, lambda: plot(found))},
        data=found._asdict(), scalars=scalars(found))
