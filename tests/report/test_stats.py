"""Statistics against values from elsewhere, shares of variance against SciPy's bootstrap."""
import itertools
import json
import math
import sys

import numpy as np
import pytest
from scipy import stats

from mmrepro.errors import MissingPackageError
from mmrepro.report.seed_study import holm, paired, share, sign_flip, streams_report, summary

# Student (1908), "The probable error of a mean", Biometrika 6: hours of sleep gained by ten
# patients under two drugs. R's `sleep`; t.test(extra ~ group, paired = TRUE) prints
# t = -4.0621, df = 9, p-value = 0.002833, mean difference -1.58, interval -2.4598858 -0.7001142
SLEEP_1 = (0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)
SLEEP_2 = (1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)


def test_a_published_paired_t_test_and_swapping_the_two_changes_only_the_sign():
    result = paired(SLEEP_1, SLEEP_2)
    assert result.t == pytest.approx(4.0621, abs=5e-5)
    assert result.t_p == pytest.approx(0.002833, abs=5e-7)
    assert result.difference.mean == pytest.approx(1.58)
    assert result.difference.std == pytest.approx(1.229995, abs=5e-7)
    assert result.difference.low == pytest.approx(0.7001142, abs=5e-8)
    assert result.difference.high == pytest.approx(2.4598858, abs=5e-8)
    assert result.larger and 'larger' in result.verdict
    swapped = paired(SLEEP_2, SLEEP_1)
    assert (swapped.t, swapped.t_p, swapped.flip_p) == (-result.t, result.t_p, result.flip_p)
    assert 'smaller' in swapped.verdict


@pytest.mark.parametrize('differences, p', [
    ([1., 2., 3.], 2 / 8),  # +++ and --- are as extreme
    ([-1., 2., 3.], 4 / 8),  # sums with size >= 4: 6, 4 (-1 flipped) and their opposites
    ([0., 0.], 1.),
    ([.1, .2, -.3], 1.),  # in floating point 0.1 + 0.2 - 0.3 is not 0
    ([.1, .2, .3], 2 / 8)])
def test_sign_flips_by_hand_and_rounding_does_not_break_ties(differences, p):
    assert sign_flip(differences) == p


def test_many_pairs_are_sampled_and_repeat():
    differences = [math.sin(i) + 0.1 for i in range(20)]
    assert sign_flip(differences) == sign_flip(differences)
    exact = sum(abs(math.fsum(s * d for s, d in zip(signs, differences[:12])))
                >= abs(math.fsum(differences[:12])) - 1e-9
                for signs in itertools.product((1, -1), repeat=12)) / 2**12
    assert sign_flip(differences[:12]) == exact
    t_p = paired([0.] * 20, differences).t_p
    assert sign_flip(differences) == pytest.approx(t_p, abs=.05)


@pytest.mark.parametrize('n, smallest', [(2, .5), (5, .0625), (6, .03125)])
def test_few_seeds_are_called_few(n, smallest):
    result = paired([.3 + .001 * i for i in range(n)], [.4 + .0013 * i for i in range(n)])
    assert result.smallest_p == smallest and result.flip_p == smallest
    assert ('6 or more seeds' in result.verdict) == (n < 6)


def test_p_of_many_seeds_is_not_below_the_smallest_possible():
    differences = [1 + .01 * i for i in range(20)]
    result = paired([0.] * 20, differences)
    assert result.flip_p == result.smallest_p == 2 / 100_001


def test_noise_is_called_noise():
    result = paired([.30, .31, .29, .30, .32, .30], [.31, .30, .30, .29, .32, .31])
    assert not result.larger and 'not larger than the noise' in result.verdict
    assert result.detectable > abs(result.difference.mean)


def test_tests_that_disagree_are_no_difference():
    result = paired([0.] * 6, [1., 1.1, .9, 1.05, .95, -.1])
    # the sum is 4.9; with the sign of -.1 flipped it is 5.1: 4 arrangements of 64 reach it
    assert result.flip_p == 4 / 64 and result.t_p < .01
    assert not result.larger and 'disagree' in result.verdict


def test_one_seed_and_no_variation():
    single = paired([.3], [.4])
    assert single.t_p is None and not single.larger and 'one seed' in single.verdict
    assert single.difference.interval() == '-'
    same = paired([.3, .4, .5], [.3, .4, .5])
    assert same.verdict == 'no difference in any seed'
    # the second one is not exact in binary
    for a, b in ([.25, .5, 1.], [.5, .75, 1.25]), ([.3, .31, .33], [.4, .41, .43]):
        shift = paired(a, b)
        assert shift.t_p is None and 'nothing varies' in shift.verdict
    assert paired([.3, .31, .33], [.4, .41, .43 + 1e-9]).t_p is not None


@pytest.mark.parametrize('call, message', [
    *((lambda values=values: summary(values), 'no values|not a finite number')
      for values in ([], [math.nan], [1., math.inf])),
    (lambda: paired([1., 2.], [1.]), '2 values of A and 1 of B'),
    (lambda: streams_report('m', 'last', 'base', [0, 1, 2], {'all': [.3] * 3, 'init': [.3] * 3}),
     '^m of base, 3 seeds: the metric is the same whatever')])
def test_values_that_say_nothing_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_without_scipy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'scipy.stats', None)
    with pytest.raises(MissingPackageError, match='pip install scipy'):
        summary([1., 2.])


def test_holms_correction_is_that_of_r():
    # p.adjust(p, 'holm')
    assert holm([.01, .02, .03, .04, .05]) == pytest.approx([.05, .08, .09, .09, .09])
    assert holm([.05, .01, .03]) == pytest.approx([.06, .03, .06])
    assert holm([.9, .8]) == [1, 1] and holm([.02]) == [.02] and holm([]) == []


DRAW = np.random.RandomState(7)
PART, WHOLE = DRAW.normal(0, 1, 12).tolist(), DRAW.normal(0, 2, 12).tolist()


def ratio(a, b, axis=-1):
    return np.var(a, axis=axis, ddof=1) / np.var(b, axis=axis, ddof=1)


def test_share_and_interval_are_those_of_scipy():
    estimate = share(PART, WHOLE)
    assert estimate.value == pytest.approx(ratio(PART, WHOLE), rel=1e-12)
    theirs = stats.bootstrap((PART, WHOLE), ratio, n_resamples=20_000, method='percentile',
                             vectorized=True, random_state=1).confidence_interval
    # two sets of resamples: the ends differ by their noise
    assert estimate.low == pytest.approx(theirs.low, rel=.06)
    assert estimate.high == pytest.approx(theirs.high, rel=.06)
    assert share(PART, WHOLE) == estimate
    assert share([.1] * 5, WHOLE) == (0, 0, 0), 'of a stream that nothing draws from'


def test_plot_report_and_notes():
    report = streams_report('coco/bbox_mAP', 'last', 'base', [0, 1, 2], {
        'all': [.30, .32, .29], 'init': [.30, .31, .30], 'step': [.30, .30, .30]})
    assert report.images['seeds'].startswith(b'\x89PNG')
    page = report.html()
    assert 'data:image/svg+xml;base64,' in page and 'http' not in page
    assert 'step: the metric stays exactly the same' in page and '10 or more' in page
    json.loads(report.json())


def test_equal_values_are_drawn_side_by_side():
    from mmrepro.report.plots import apart
    assert apart([.3, .3, .3, .5], .1, 1.) == pytest.approx([-.1, 0, .1, 0])
    assert max(apart([.3] * 100, .1, .2)) == pytest.approx(.1)
