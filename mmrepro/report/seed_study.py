"""One metric over seeds: configs are compared, or the share of each random stream is measured.

How sure a metric is after a few seeds, and whether two configs differ by more than their noise, is
told by tests and intervals. The tests are SciPy's.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import DIFFERENT, DONE, MissingPackageError, SeedsError
from .plots import DIFFERENCE, INK, SOFT, A, apart, figure, palette, png
from .report import Figure, Report, Table

CONFIDENCE = 0.95
LEVEL = 0.05  # of the tests
# Below, no arrangement of signs is rarer than LEVEL: 2 / 2**6 is the first that is.
MIN_PAIRS = 6
SAMPLES = 100_000  # arrangements of signs that are tried
EXACT_PAIRS = 16  # the most whose 2**16 arrangements are all among them
POWER = 0.8  # of the detectable difference
RESAMPLES = 10_000  # of a bootstrap


class Summary(NamedTuple):
    """A sample of ``n`` values."""
    n: int
    mean: float
    std: float | None  # with n - 1 in the denominator; None for one value
    low: float | None  # 95 % confidence interval of the mean, by Student's t; None for one value
    high: float | None

    def interval(self, sign: str = '') -> str:
        """Format the interval for a table; with ``'+'``, of a difference."""
        return '-' if self.low is None else f'{self.low:{sign}.4f} to {self.high:{sign}.4f}'


class Paired(NamedTuple):
    """B against A, pair by pair (the same seed)."""
    difference: Summary  # summary of B - A
    t: float | None  # paired t test, two-sided; None where the differences do not vary
    t_p: float | None
    flip_p: float  # exact sign-flip permutation test of the mean difference, two-sided
    smallest_p: float  # the smallest p that the sign-flip test can give with so many pairs
    # difference that a t test with so many pairs finds 4 times out of 5; None where the differences
    # do not vary
    detectable: float | None
    verdict: str  # in words
    larger: bool  # the difference is larger than the noise of the seed


def summary(values: Sequence[float]) -> Summary:
    """Return mean, standard deviation and 95 % confidence interval of the mean.

    >>> round(summary([1., 2., 3.]).high, 3)
    4.484
    """
    _check(values)
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return Summary(1, mean, None, None, None)
    std = statistics.stdev(values)
    half = float(_scipy().t.ppf((1 + CONFIDENCE) / 2, n - 1)) * std / math.sqrt(n)
    return Summary(n, mean, std, mean - half, mean + half)


def _differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Return B - A, all the same number where they differ by the rounding of metrics only."""
    gaps = [y - x for x, y in zip(a, b)]
    rounding = 4 * np.finfo(float).eps * max(map(abs, (*a, *b)))
    return [gaps[0]] * len(gaps) if max(gaps) - min(gaps) <= rounding else gaps


def sign_flip(differences: Sequence[float]) -> float:
    """Return P of a mean at least as far from 0 if each difference had a random sign.

    All arrangements of signs for up to ``EXACT_PAIRS`` differences, ``SAMPLES`` random ones beyond,
    the same in every call.
    """
    _check(differences)
    total = math.fsum(map(abs, differences))
    if len(differences) == 1 or not total:
        return 1.
    # sums of the same numbers with other signs differ in the last bits only by rounding
    test = _scipy().permutation_test(
        (np.asarray(differences) / total, ), lambda x, axis: x.sum(axis).round(12),
        permutation_type='samples', n_resamples=SAMPLES, vectorized=True, random_state=0)
    return float(test.pvalue)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare two configs over the same seeds."""
    _check(a)
    _check(b)
    if len(a) != len(b):
        raise SeedsError(f'{len(a)} values of A and {len(b)} of B: pairs are needed')
    differences = _differences(a, b)
    gap = summary(differences)
    t = t_p = detectable = None
    if gap.std:  # neither one pair, nor differences that are all the same
        t, t_p = map(float, _scipy().ttest_rel(b, a))
        quantile = _scipy().t.ppf
        # Cohen's approximation with t quantiles: reached with probability POWER
        detectable = float(quantile(1 - LEVEL / 2, gap.n - 1) + quantile(POWER, gap.n - 1)
                           ) * gap.std / math.sqrt(gap.n)
    flip = sign_flip(differences)
    smallest = 2 / (2**gap.n if gap.n <= EXACT_PAIRS else SAMPLES + 1)
    verdict, larger = _verdict(gap, t_p, flip, smallest, detectable)
    return Paired(gap, t, t_p, flip, smallest, detectable, verdict, larger)


def holm(p: Sequence[float]) -> list[float]:
    """Correct the p values of several tests by Holm's method.

    >>> holm([.01, .04, .03])
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p, kind='stable')
    factors = len(p) - np.arange(len(p))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(factors * np.asarray(p)[order]), 1)
    return corrected.tolist()


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


def _verdict(gap: Summary, t_p: float | None, flip: float, smallest: float,
             detectable: float | None) -> tuple[str, bool]:
    """Return the verdict, and whether the difference is larger than the noise."""
    if gap.n == 1:
        return 'one seed says nothing about noise: run at least 3, better 6 or more', False
    if not gap.std:
        return ('no difference in any seed' if not gap.mean else
                f'the same difference of {gap.mean:+.4g} for every seed: nothing varies, which '
                'no test expects; are the metrics rounded?'), bool(gap.mean) and gap.n >= 3
    assert t_p is not None  # differences that vary have a t test
    better = 'larger' if gap.mean > 0 else 'smaller'
    few = '' if gap.n >= MIN_PAIRS else (
        f'; with {gap.n} seeds the test without assumptions cannot go below p = {smallest:.3g}, '
        'so this rests on differences being normal: 6 or more seeds settle it')
    if t_p < LEVEL and (flip < LEVEL or gap.n < MIN_PAIRS):
        return f'B is {better}, by more than the noise of the seed (p = {t_p:.2g}){few}', True
    if t_p < LEVEL:
        return (f'the tests disagree (t: p = {t_p:.2g}, sign flips: p = {flip:.2g}): not enough to '
                'call it a difference'), False
    return (f'not larger than the noise of the seed (p = {t_p:.2g}); with {gap.n} seeds a '
            f'difference has to be about {detectable:.2g} to be seen'), False


def _scipy() -> Any:
    try:
        import scipy.stats
    except ModuleNotFoundError as error:
        raise MissingPackageError('confidence intervals and tests need SciPy: pip install scipy '
                                  '(or mmrepro[seeds])') from error
    return scipy.stats


def _check(values: Sequence[float]) -> None:
    if not values:
        raise SeedsError('no values')
    odd = [value for value in values if not math.isfinite(value)]
    if odd:
        raise SeedsError(f'{odd[0]} is not a finite number')


ALL = 'all'  # the name of the runs in which every stream varies
MIN_SEEDS = 3  # with which the share of a stream can be measured
FARTHEST = 2.  # share that the plot has room for
FEW = 10  # seeds; below, an interval of a variance says little


class Study(NamedTuple):
    """One metric over the seeds of configs; each other config is tested against the first."""
    metric: str
    pick: str  # the validation that counts: 'last' or 'best'
    seeds: list[int]  # seeds of every config
    values: dict[str, list[float]]  # label of the config -> a value per seed
    summaries: dict[str, Summary]  # label -> summary
    tests: dict[str, Paired]  # label of each other config -> it against the first
    corrected: dict[str, float]  # p of the t test, by Holm's method if there are several

    @property
    def test(self) -> Paired | None:
        """The test of two configs; None for another number of them."""
        return next(iter(self.tests.values())) if len(self.tests) == 1 else None

    @property
    def larger(self) -> dict[str, bool]:
        """Label of each other config -> whether its difference exceeds the noise of the seed."""
        return {label: test.larger and self.corrected[label] < LEVEL
                for label, test in self.tests.items()}


def study(metric: str, pick: str, seeds: list[int], values: dict[str, list[float]]) -> Study:
    """Summarize configs, and test each against the first by pairs."""
    first, *others = values
    tests = {label: paired(values[first], values[label]) for label in others}
    # differences that are all the same have no t test: nothing could make them noise
    p = [float(len(seeds) == 1 or not test.difference.mean) if test.t_p is None else test.t_p
         for test in tests.values()]
    return Study(metric, pick, seeds, values, {label: summary(values[label]) for label in values},
                 tests, dict(zip(tests, holm(p))))


def study_report(study: Study) -> Report:
    """Report a study; the exit code is 1 if the configs do not differ."""
    title = f'{study.metric}, {study.pick} validation'
    alike = bool(study.tests) and not any(study.larger.values())
    return Report(
        f'{" and ".join(study.values)}, {len(study.seeds)} seeds', '\n'.join(_verdicts(study)),
        DIFFERENT if alike else DONE, [_values(study, title), *_tests(study)],
        _caution(study), figures={'seeds': Figure(title, lambda: _plot(study))},
        data=dict(study._asdict(), test=study.test))


def _values(study: Study, title: str) -> Table:
    summaries = study.summaries.values()
    rows = [[str(seed), *(f'{values[index]:.4f}' for values in study.values.values())]
            for index, seed in enumerate(study.seeds)]
    rows += [['mean', *(f'{summary.mean:.4f}' for summary in summaries)],
             ['std', *(_number(summary.std) for summary in summaries)],
             ['95 % interval', *(summary.interval() for summary in summaries)]]
    return Table(['seed', *study.values], rows, title, [''] * len(study.seeds) + ['strong'] * 3)


def _tests(study: Study) -> list[Table]:
    if study.test is None:
        rows = [[label, f'{test.difference.mean:+.4f}', test.difference.interval('+'),
                 _number(test.t_p), _number(study.corrected[label]),
                 'yes' if study.larger[label] else 'no'] for label, test in study.tests.items()]
        head = ('against the first', 'difference', '95 % interval', 'p', "Holm's p", 'larger')
        return [Table(head, rows, 'Tests')] if rows else []
    test = study.test
    return [Table(('test', '', ''), [
        ['mean of B - A', f'{test.difference.mean:+.4f}',
         f'95 % interval {test.difference.interval("+")}'],
        ['paired t test', f'p = {_number(test.t_p)}', 'differences are normal'],
        ['sign flips', f'p = {test.flip_p:.4g}', 'no assumption on their shape; smallest possible: '
         f'{test.smallest_p:.3g}'],
        ['can be seen', _number(test.detectable), 'difference found 4 times out of 5 with so many '
         'seeds']], 'Tests')]


def _number(value: float | None) -> str:
    return '-' if value is None else f'{value:.4g}'


def _verdicts(study: Study) -> list[str]:
    """Return the results of the tests in words."""
    lines = [study.test.verdict] if study.test is not None else []
    if len(study.tests) > 1:
        better = [label for label, larger in study.larger.items() if larger]
        lines.append(f'different from {next(iter(study.values))} by more than the noise of the '
                     f'seed, with {len(study.tests)} tests corrected by Holm\'s method: '
                     f'{", ".join(better) or "none"}')
    return lines


def _caution(study: Study) -> list[str]:
    """Return the restrictions of the verdict."""
    notes = []
    n = len(study.seeds)
    if n < 3:
        notes.append(f'{n} seed{"s" if n > 1 else ""}: too few for a standard deviation that means '
                     'anything; run 3 at the least')
    elif n < MIN_PAIRS:
        notes.append(f'{n} seeds: the interval is wide and rests on values being normal; '
                     f'{MIN_PAIRS} or more are better')
    notes += [f'{label}: all seeds give the same {study.metric}, to the last digit: either it is '
              'constant, or the seed does not reach the training'
              for label, values in study.values.items() if n > 1 and len(set(values)) == 1]
    if study.pick == 'best':
        notes.append('the best validation of a run is chosen by the data that it is judged on: '
                     'means are too high, for all configs')
    return notes


def _plot(study: Study) -> bytes:
    """Draw a dot per seed, mean and interval; lines join the same seed of all configs."""
    labels, compared = list(study.values), bool(study.tests)
    letters = [f'{chr(ord("A") + index)}  {label}' for index, label in enumerate(labels)]
    with figure(1, 2 if compared else 1, figsize=(10 if compared else 5.6, 4), squeeze=False,
                width_ratios=[3, 2] if compared else [1]) as (fig, grid):
        axes = grid[0][0]
        offsets = {label: apart(values, .06, .2) for label, values in study.values.items()}
        if compared:
            for pair, places in zip(zip(*study.values.values()), zip(*offsets.values())):
                axes.plot([x + place for x, place in enumerate(places)], pair, color=SOFT,
                          linewidth=.8, alpha=.7, zorder=1)
            _plot_differences(grid[0][1], study)
        for x, (label, color) in enumerate(zip(labels, palette(len(labels)))):
            values, summary = study.values[label], study.summaries[label]
            axes.scatter([x + place for place in offsets[label]], values, color=color, s=34,
                         zorder=3, edgecolor='white', linewidth=.6,
                         label='one seed' if not x else None)
            middle = x + (.16 if x else -.16)
            axes.plot([middle - .07, middle + .07], [summary.mean] * 2, color=color, linewidth=2.6)
            if summary.low is not None:
                axes.plot([middle] * 2, [summary.low, summary.high], color=color, linewidth=1.6)
        axes.set_xticks(range(len(labels)), letters if compared else labels)
        axes.set_xlim(-.5, len(labels) - .5)
        axes.grid(False, axis='x')
        axes.set_ylabel(f'{study.metric}, {study.pick} validation')
        axes.set_title(f'{len(study.seeds)} seeds; bar: mean, 95 % interval')
        return png(fig)


def _plot_differences(axes: Any, study: Study) -> None:
    """Draw the differences of each other config to the first, seed by seed."""
    first, *others = study.values.values()
    several = study.test is None
    colors = palette(len(others) + 1)[1:] if several else [DIFFERENCE]
    axes.axhline(0, color=INK, linewidth=1)
    for index, (color, values, test) in enumerate(zip(colors, others, study.tests.values())):
        gaps, mean = [y - x for x, y in zip(first, values)], test.difference
        axes.scatter(range(len(gaps)), gaps, color=color, s=34, zorder=3, edgecolor='white')
        of = f' of {chr(ord("B") + index)} − A' if several else ''
        if mean.low is not None:
            axes.axhspan(mean.low, mean.high, color=color, alpha=.14, linewidth=0,
                         label=None if several else '95 % interval of the mean')
        axes.axhline(mean.mean, color=color, linestyle='--', linewidth=1.4, label=f'mean{of}')
    axes.set_xticks(range(len(study.seeds)), [str(seed) for seed in study.seeds])
    axes.grid(False, axis='x')
    axes.set_xlabel('seed')
    axes.set_ylabel(f'{"difference to" if several else "B −"} A, {study.metric}')
    axes.set_title('difference, seed by seed')
    axes.legend(loc='best')


def streams_report(metric: str, pick: str, label: str, seeds: list[int],
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
        _caution_of_streams(seeds, values),
        figures={'seeds': Figure(title, lambda: _plot_streams(title, values, summaries, shares))},
        data=dict(metric=metric, pick=pick, label=label, seeds=seeds, values=values,
                  summaries=summaries, shares=shares))


def _caution_of_streams(seeds: list[int], values: dict[str, list[float]]) -> list[str]:
    """Return the restrictions of the shares."""
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


def _plot_streams(title: str, values: dict[str, list[float]], summaries: dict[str, Summary],
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
