"""Shares of variance, against their formula and SciPy's bootstrap."""
import json

import numpy as np
import pytest
from scipy import stats

from mmrepro.report.variance import report_of, share

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


def test_a_stream_that_nothing_draws_from_has_a_share_of_exactly_zero():
    assert share([.1] * 5, WHOLE) == (0, 0, 0)


def test_no_variance_at_all_is_one_clear_line():
    with pytest.raises(ValueError, match='^m of base, 3 seeds: the metric is the same whatever'):
        report_of('m', 'last', 'base', [0, 1, 2], {'all': [.3] * 3, 'init': [.3] * 3})


def test_plot_report_and_notes():
    report = report_of('coco/bbox_mAP', 'last', 'base', [0, 1, 2], {
        'all': [.30, .32, .29], 'init': [.30, .31, .30], 'step': [.30, .30, .30]})
    assert report.images['seeds'].startswith(b'\x89PNG')
    page = report.html()
    assert 'data:image/png;base64,' in page and 'http' not in page
    assert 'step: the metric stays exactly the same' in page and '10 or more' in page
    json.loads(report.json())
