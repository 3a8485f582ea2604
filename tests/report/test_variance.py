"""Shares of variance, against their formula and SciPy's bootstrap."""
from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats

from mmrepro.report import variance
from mmrepro.report.variance import share, study

DRAW = np.random.RandomState(7)
PART, WHOLE = DRAW.normal(0, 1, 12).tolist(), DRAW.normal(0, 2, 12).tolist()


def ratio(a, b, axis=-1):
    return np.var(a, axis=axis, ddof=1) / np.var(b, axis=axis, ddof=1)


def test_share_and_interval_are_those_of_scipy():
    found = share(PART, WHOLE)
    assert found.value == pytest.approx(ratio(PART, WHOLE), rel=1e-12)
    theirs = stats.bootstrap((PART, WHOLE), ratio, n_resamples=20_000, method='percentile',
                             vectorized=True, random_state=1).confidence_interval
    # two sets of resamples: the ends differ by their noise
    assert found.low == pytest.approx(theirs.low, rel=.06)
    assert found.high == pytest.approx(theirs.high, rel=.06)
    assert share(PART, WHOLE) == found


def test_a_stream_that_nothing_draws_from_has_a_share_of_exactly_zero():
    assert share([.1] * 5, WHOLE) == (0, 0, 0)


def test_no_variance_at_all_is_one_clear_line():
    with pytest.raises(ValueError, match='^m of base, 3 seeds: the metric is the same whatever'):
        study('m', 'last', 'base', [0, 1, 2], {'all': [.3] * 3, 'init': [.3] * 3})
    with pytest.raises(ValueError, match='with 2 seeds: a variance needs at least 3'):
        study('m', 'last', 'base', [0, 1], {'all': [.3, .4]})


def test_plot_report_and_notes():
    found = study('coco/bbox_mAP', 'last', 'base', [0, 1, 2],
                  {'all': [.30, .32, .29], 'init': [.30, .31, .30], 'step': [.30, .30, .30]})
    drawn = variance.plot(found)
    assert drawn.startswith(b'\x89PNG')
    report = variance.report_of(found)
    text = report.html()
    assert 'data:image/png;base64,' in text and 'http' not in text
    assert 'step: the metric stays exactly the same' in text and '10 or more' in text
    assert ('mmrepro/seeds/base/init/coco/bbox_mAP', .31, 1) in report.scalars
    json.loads(report.json())
