"""How sure a metric is after a few seeds, and whether two configs differ by more than their noise.

The tests are SciPy's.
"""
from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple, Optional, Sequence, Tuple

import numpy as np

__all__ = ['MissingStatistics', 'Paired', 'Summary', 'paired', 'sign_flip', 'summary']

CONFIDENCE = 0.95
LEVEL = 0.05  # of the tests
# Below, no arrangement of signs is rarer than LEVEL: 2 / 2**6 is the first that is.
MIN_PAIRS = 6
SAMPLES = 100_000  # arrangements of signs that are tried
EXACT_PAIRS = 16  # the most whose 2**16 arrangements are all among them
POWER = 0.8


class MissingStatistics(RuntimeError):
    """SciPy is not installed."""


class Summary(NamedTuple):
    """A sample of ``n`` values."""
    n: int
    mean: float
    std: Optional[float]  # with n - 1 in the denominator; None for one value
    low: Optional[float]  # 95 % confidence interval of the mean, by Student's t; None for one value
    high: Optional[float]


class Paired(NamedTuple):
    """B against A, pair by pair (the same seed)."""
    difference: Summary  # summary of B - A
    t: Optional[float]  # paired t test, two-sided; None where the differences do not vary
    t_p: Optional[float]
    # Wilcoxon's signed-rank test, two-sided; None if all differences are 0
    wilcoxon_p: Optional[float]
    flip_p: float  # exact sign-flip permutation test of the mean difference, two-sided
    smallest_p: float  # the smallest p that the sign-flip test can give with so many pairs
    # difference that a t test with so many pairs finds 4 times out of 5; None where the differences
    # do not vary
    detectable: Optional[float]
    correlation: Optional[float]  # of A and B over the pairs; None where one of them does not vary
    verdict: str  # in words
    larger: bool  # the difference is larger than the noise of the seed


def summary(values: Sequence[float]) -> Summary:
    """Mean, standard deviation and 95 % confidence interval of the mean.

    Raises:
        ValueError: no values, or one that is not finite.

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


def sign_flip(differences: Sequence[float]) -> float:
    """P of a mean at least as far from 0, if the sign of each difference were a fair coin.

    All arrangements of signs for up to ``EXACT_PAIRS`` differences, ``SAMPLES`` random ones beyond,
    the same in every call.
    """
    _check(differences)
    total = math.fsum(map(abs, differences))
    if len(differences) == 1 or not total:
        return 1.
    # sums of the same numbers with other signs differ in the last bits only by rounding
    found = _scipy().permutation_test(
        (np.asarray(differences) / total, ), lambda x, axis: x.sum(axis).round(12),
        permutation_type='samples', n_resamples=SAMPLES, vectorized=True, random_state=0)
    return float(found.pvalue)


def paired(a: Sequence[float], b: Sequence[float]) -> Paired:
    """Compare two configs over the same seeds.

    Raises:
        ValueError: other numbers of values, none at all, or one that is not finite.
    """
    _check(a)
    _check(b)
    if len(a) != len(b):
        raise ValueError(f'{len(a)} values of A and {len(b)} of B: pairs are needed')
    differences = [y - x for x, y in zip(a, b)]
    found = summary(differences)
    t = t_p = detectable = None
    if found.std:  # neither one pair, nor differences that are all the same
        t, t_p = map(float, _scipy().ttest_rel(b, a))
        quantile = _scipy().t.ppf
        # Cohen's approximation with t quantiles: reached with probability POWER
        detectable = float(quantile(1 - LEVEL / 2, found.n - 1) + quantile(POWER, found.n - 1)
                           ) * found.std / math.sqrt(found.n)
    flip = sign_flip(differences)
    smallest = 2 / 2**found.n if found.n <= EXACT_PAIRS else 1 / (SAMPLES + 1)
    verdict, larger = _verdict(found, t_p, flip, smallest, detectable)
    wilcoxon = float(_scipy().wilcoxon(differences).pvalue) if any(differences) else None
    vary = len(set(a)) > 1 and len(set(b)) > 1
    correlation = float(np.corrcoef(a, b)[0, 1]) if vary else None
    return Paired(found, t, t_p, wilcoxon, flip, smallest, detectable, correlation, verdict, larger)


def _verdict(found: Summary, t_p: Optional[float], flip: float, smallest: float,
             detectable: Optional[float]) -> Tuple[str, bool]:
    """Words, and whether the difference is larger than the noise."""
    if found.n == 1:
        return 'one seed says nothing about noise: run at least 3, better 6 or more', False
    if not found.std:
        return ('no difference in any seed' if not found.mean else
                f'the same difference of {found.mean:+.4g} for every seed: nothing varies, which '
                'no test expects; are the metrics rounded?'), bool(found.mean) and found.n >= 3
    better = 'larger' if found.mean > 0 else 'smaller'
    few = '' if found.n >= MIN_PAIRS else (
        f'; with {found.n} seeds the test without assumptions cannot go below p = {smallest:.3g}, '
        'so this rests on differences being normal: 6 or more seeds settle it')
    if t_p < LEVEL and (flip < LEVEL or found.n < MIN_PAIRS):
        return f'B is {better}, by more than the noise of the seed (p = {t_p:.2g}){few}', True
    if t_p < LEVEL:
        return (f'the tests disagree (t: p = {t_p:.2g}, sign flips: p = {flip:.2g}): not enough to '
                'call it a difference'), False
    return (f'not larger than the noise of the seed (p = {t_p:.2g}); with {found.n} seeds a '
            f'difference has to be about {detectable:.2g} to be seen'), False


def _scipy() -> Any:
    try:
        import scipy.stats
    except ModuleNotFoundError as error:
        raise MissingStatistics('confidence intervals and tests need SciPy: pip install scipy '
                                '(or mmrepro[seeds])') from error
    return scipy.stats


def _check(values: Sequence[float]) -> None:
    if not values:
        raise ValueError('no values')
    odd = [value for value in values if not math.isfinite(value)]
    if odd:
        raise ValueError(f'{odd[0]} is not a finite number')
