"""How sure a metric is after a few seeds, and whether two configs differ by more than their noise.

The tests are SciPy's.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import MissingPackageError, SeedsError

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
    smallest = 2 / 2**gap.n if gap.n <= EXACT_PAIRS else 1 / (SAMPLES + 1)
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
