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
POWER = 0.8


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
    # Wilcoxon's signed-rank test, two-sided; None if all differences are 0
    wilcoxon_p: float | None
    flip_p: float  # exact sign-flip permutation test of the mean difference, two-sided
    smallest_p: float  # the smallest p that the sign-flip test can give with so many pairs
    # difference that a t test with so many pairs finds 4 times out of 5; None where the differences
    # do not vary
    detectable: float | None
    correlation: float | None  # of A and B over the pairs; None where one of them does not vary
    verdict: str  # in words
    larger: bool  # the difference is larger than the noise of the seed


class Equivalence(NamedTuple):
    """Whether B is the same as A within a margin: two one-sided paired t tests (Schuirmann)."""
    margin: float
    low: float  # 90 % confidence interval of the mean of B - A; for p < 0.05 it is in the margin
    high: float
    p: float  # the larger one of the two
    same: bool


class Plan(NamedTuple):
    """Seeds that a paired t test needs to find a difference 4 times out of 5."""
    difference: float
    std: float  # of the differences between pairs, from the pilot
    seeds: int
    low: int  # the same for the ends of the 95 % confidence interval of ``std``
    high: int


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
    wilcoxon = float(_scipy().wilcoxon(differences).pvalue) if any(differences) else None
    vary = len(set(a)) > 1 and len(set(b)) > 1
    correlation = float(np.corrcoef(a, b)[0, 1]) if vary else None
    return Paired(gap, t, t_p, wilcoxon, flip, smallest, detectable, correlation, verdict, larger)


def equivalence(a: Sequence[float], b: Sequence[float], margin: float) -> Equivalence:
    """Test for "the same within ``margin``"; a test that finds no difference does not say it."""
    _check(a)
    _check(b)
    if not margin > 0 or not math.isfinite(margin):
        raise SeedsError(f'a margin of {margin:g} is not allowed; allowed is a number above 0')
    if len(a) != len(b) or len(a) < 2:
        raise SeedsError(f'{len(a)} values of A and {len(b)} of B: two pairs or more are needed')
    gaps = _differences(a, b)
    gap = summary(gaps)
    if not gap.std:  # nothing varies: a test has nothing to compare the mean with
        inside = abs(gap.mean) < margin
        return Equivalence(margin, gap.mean, gap.mean, 0. if inside else 1., inside)
    test = _scipy().ttest_1samp
    p = max(float(test(gaps, -margin, alternative='greater').pvalue),
            float(test(gaps, margin, alternative='less').pvalue))
    half = float(_scipy().t.ppf(1 - LEVEL, gap.n - 1)) * gap.std / math.sqrt(gap.n)
    return Equivalence(margin, gap.mean - half, gap.mean + half, p, p < LEVEL)


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


def power(effect: float, n: int) -> float:
    """Return how often a t test of ``n`` pairs finds a mean of ``effect`` standard deviations.

    >>> round(power(.5, 34), 3)
    0.808
    """
    critical = _scipy().t.ppf(1 - LEVEL / 2, n - 1)
    shift = effect * math.sqrt(n)
    nct = _scipy().nct
    return float(nct.sf(critical, n - 1, shift) + nct.cdf(-critical, n - 1, shift))


def plan(a: Sequence[float], difference: float, b: Sequence[float] | None = None) -> Plan:
    """Estimate from a pilot how many seeds it takes to find ``difference``.

    Args:
        a: the pilot's values of one config.
        b: those of the other, for the same seeds; None: supposed to vary as ``a`` does, and
            independently of it.
    """
    if not difference > 0 or not math.isfinite(difference):
        raise SeedsError(f'a difference of {difference:g} is not allowed; allowed is a number '
                         'above 0')
    pilot = summary(a if b is None else _differences(a, b))
    if not pilot.std:
        raise SeedsError('the pilot has one seed; 2 or more are needed' if pilot.n == 1 else
                         "the pilot's values do not vary: nothing can be planned from them")
    std = pilot.std * (math.sqrt(2) if b is None else 1)
    chi2 = _scipy().chi2
    ends = [std * math.sqrt((pilot.n - 1) / float(chi2.ppf(q, pilot.n - 1)))
            for q in ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)]
    return Plan(difference, std, *(_seeds_for(difference / spread) for spread in (std, *ends)))


def _seeds_for(effect: float) -> int:
    """Return the smallest number of pairs whose test has the power."""
    # SciPy's noncentral t has no tail for large shifts; two pairs are the least anyway
    high = 2
    while power(min(effect, 30), high) < POWER:
        high *= 2
    low = max(high // 2, 1)  # too few
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(min(effect, 30), middle) >= POWER else (middle, high)
    return high


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
