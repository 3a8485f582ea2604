"""Which stream of random numbers moves a metric: one varies, all others stay as they are."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..errors import DONE, SeedsError
from .plot_style import DIFFERENCE, INK, SOFT, A, apart, figure, png
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


def share(part: list[float], whole: list[float]) -> Share:
    """Return the variance of ``part`` as a share of that of ``whole``, with an interval.

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
    shares = np.where(np.ptp(drawn, axis=1) > 0, drawn.var(1, ddof=1), 0) / drawn_all.var(1, ddof=1)
    low, high = np.percentile(shares, [2.5, 97.5])
    return Share(float(variance / all_values.var(ddof=1)), float(low), float(high))


def report_of(metric: str, pick: str, label: str, seeds: list[int],
              values: dict[str, list[float]]) -> Report:
    """Report a metric of the config ``label`` while one stream, or all of them, has these seeds.

    All other streams have the first seed. ``values``: 'all' and the streams -> a value per seed.
    """
    summaries = {name: summary(sample) for name, sample in values.items()}
    try:
        shares = {name: share(sample, values[ALL])
                  for name, sample in values.items() if name != ALL}
    except SeedsError as error:
        raise SeedsError(f'{metric} of {label}, {len(seeds)} seeds: {error}') from error
    title = f'{metric}, {pick} validation'
    rows = [[name, str(row.n), f'{row.mean:.4f}', f'{row.std:.3g}', *(
        (f'{100 * shares[name].value:.0f} %',
         f'{100 * shares[name].low:.0f} to {100 * shares[name].high:.0f} %')
        if name in shares else ('100 %', ''))] for name, row in summaries.items()]
    runs = [[str(seed), *(f'{sample[index]:.4f}' for sample in values.values())]
            for index, seed in enumerate(seeds)]
    return Report(
        f'{label}: what moves {metric}', '', DONE,
        [Table(('varied', 'runs', 'mean', 'std', 'share of variance', '95 % interval'), rows,
               title), Table(['seed', *values], runs, 'Values')],
        _caution(seeds, values),
        figures={'seeds': Figure(title, lambda: _plot(title, values, summaries, shares))},
        data=dict(metric=metric, pick=pick, label=label, seeds=seeds, values=values,
                  summaries=summaries, shares=shares))


def _caution(seeds: list[int], values: dict[str, list[float]]) -> list[str]:
    """Return what restricts the shares."""
    notes = [f'all other streams keep seed {seeds[0]}; around another seed a stream may '
             'matter more or less',
             'shares need not add up to 100 %: streams act on each other, and every share is '
             'estimated']
    if len(seeds) < FEW:
        notes.append(f'{len(seeds)} seeds: the intervals are wide and rough; {FEW} or more '
                     'tell streams apart')
    still = [name for name, sample in values.items() if len(set(sample)) == 1]
    if still:
        notes.append(f'{", ".join(still)}: the metric stays exactly the same')
    return notes


def _plot(title: str, values: dict[str, list[float]], summaries: dict[str, Summary],
          shares: dict[str, Share]) -> bytes:
    """Draw the values of each stream's runs, and its share of the variance."""
    with figure(1, 2, figsize=(10, 1.6 + .5 * len(values)), width_ratios=[3, 2], sharey=True
                ) as (fig, (left, right)):
        for y, (name, sample) in enumerate(values.items()):
            color = INK if name == ALL else A
            left.scatter(sample, [y + place for place in apart(sample, .12, .5)], color=color,
                         s=30, alpha=.75, zorder=3, edgecolor='white', linewidth=.6)
            left.plot([summaries[name].mean] * 2, [y - .28, y + .28], color=color, linewidth=2)
            if name in shares:
                part = shares[name]
                high = min(part.high, FARTHEST)
                right.plot([100 * part.low, 100 * high], [y, y], color=DIFFERENCE, linewidth=1.8)
                if high < part.high:  # the table has the number
                    right.scatter([100 * high], [y], color=DIFFERENCE, s=44, marker='>')
                right.scatter([100 * min(part.value, FARTHEST)], [y], color=DIFFERENCE, s=44,
                              zorder=3, edgecolor='white')
        left.set_yticks(range(len(values)), list(values))
        left.set_ylim(len(values) - .5, -.5)
        left.grid(False, axis='y')
        left.set_xlabel(title)
        left.set_title(f'{len(values[ALL])} runs each; line: mean')
        right.axvline(100, color=SOFT, linewidth=1, linestyle='--')
        right.set_xlim(0, 110 * FARTHEST)
        right.grid(False, axis='y')
        right.set_xlabel('% of the variance with all streams varied')
        right.set_title('share, 95 % interval')
        return png(fig)
