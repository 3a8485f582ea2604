"""How far COCO's figures depend on which images, and which seeds, happened to be tested.

Images are resampled with replacement, the same ones for all detectors, so a difference of two
detectors is that on the same images. Seeds are resampled along with them, where a detector comes
with several: both then vary as they would in another study.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, NamedTuple

import numpy as np

from ...errors import PredictionError
from ..stats import LEVEL, holm
from .matches import FIGURES, Matches

NAMES = [name for name, *_ in FIGURES]


class Interval(NamedTuple):
    """A figure (the mean over the seeds), and how far it depends on the images and seeds."""
    value: float
    low: float  # 95 % interval
    high: float
    std_images: float  # standard error of ``value``, if only the images were others
    std_seeds: float | None  # if only the seeds were others; None for a single seed


class Versus(NamedTuple):
    """A figure of a detector minus that of the first one."""
    difference: Interval
    p: float  # two-sided: as many resamples lie beyond 0
    corrected: float  # by Holm's method over the detectors
    larger: bool  # than the noise: ``corrected`` is below 0.05
    # if a margin was given: the larger p of two one-sided tests, and whether it is below 0.05
    same_p: float | None
    same: bool | None
    low_90: float  # 90 % interval: in the margin where the two detectors are the same
    high_90: float


class ImageStudy(NamedTuple):
    """COCO's figures of one or more detectors on the same images."""
    metric: str  # the figure that the answer is about
    images: int
    seeds: int  # of each detector
    resamples: int
    margin: float | None
    figures: dict[str, dict[str, Interval]]  # label of the detector -> figure
    versus: dict[str, dict[str, Versus]]  # label of each other detector -> figure

    @property
    def answer(self) -> bool | None:
        """Whether what was asked for was found; None for one detector."""
        found = [one[self.metric] for one in self.versus.values()]
        if not found:
            return None
        return (any(one.larger for one in found) if self.margin is None else
                all(one.same for one in found))


def resampled_figures(detectors: Sequence[Sequence[Matches]], resamples: int,
                      say: Callable[[str], None] = lambda text: None) -> np.ndarray:
    """The figures of all detectors and seeds for resampled images, the same ones in every call.

    Returns:
        ``(resamples, detectors, seeds, figures)``
    """
    draw = np.random.RandomState(0)
    images = len(detectors[0][0].images)
    found = np.empty((resamples, len(detectors), len(detectors[0]), len(FIGURES)))
    for number in range(resamples):
        weights = np.bincount(draw.randint(images, size=images), minlength=images)
        found[number] = [[one.figures(weights) for one in seeds] for seeds in detectors]
        if (number + 1) % max(resamples // 10, 1) == 0:
            say(f'{number + 1} of {resamples} resamples')
    return found


def study(detectors: Mapping[str, Sequence[Matches]], resamples: int = 1000, metric: str = 'mAP',
          margin: float | None = None, say: Callable[[str], None] = lambda text: None
          ) -> ImageStudy:
    """Intervals of all figures, and of the differences of each detector to the first.

    Args:
        detectors: label -> matches of each seed, for the same annotations; seeds in the same
            order for all of them.
        metric: the figure that is asked about.
        margin: test for "the same within" as well.
    """
    counts = {label: len(seeds) for label, seeds in detectors.items()}
    if len(set(counts.values())) > 1:
        raise PredictionError('the detectors have different numbers of seeds: '
                         + ', '.join(f'{label} {count}' for label, count in counts.items()))
    if metric not in NAMES:
        raise PredictionError(f'--metric {metric}: allowed are {", ".join(NAMES)}')
    if margin is not None and (not margin > 0 or len(detectors) == 1):
        raise PredictionError(f'--same-within {margin:g}: a number above 0 and two detectors are '
                              'needed')
    if resamples < 100:
        raise PredictionError(f'--resamples {resamples}: an interval of 95 % needs at least 100')
    whole = np.array([[one.figures() for one in seeds] for seeds in detectors.values()])
    if np.isnan(whole[:, :, NAMES.index(metric)]).any():
        raise PredictionError(f'--metric {metric}: the annotations have no such objects')
    drawn = resampled_figures(list(detectors.values()), resamples, say)
    count = whole.shape[1]
    chosen = np.random.RandomState(1).randint(count, size=(resamples, count))
    labels = list(detectors)
    figures = {label: _intervals(whole[index], drawn[:, index], chosen)
               for index, label in enumerate(labels)}
    gaps = {label: (whole[index] - whole[0], drawn[:, index] - drawn[:, 0])
            for index, label in enumerate(labels) if index}
    return ImageStudy(metric, len(next(iter(detectors.values()))[0].images), count, resamples,
                      margin, figures, _versus(gaps, chosen, margin))


def _both(drawn: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """``(resamples, figures)``: images and seeds resampled, the mean over the seeds."""
    mean: np.ndarray = np.take_along_axis(drawn, chosen[:, :, None], 1).mean(1)
    return mean


def _intervals(whole: np.ndarray, drawn: np.ndarray, chosen: np.ndarray) -> dict[str, Interval]:
    """Of ``(seeds, figures)`` and ``(resamples, seeds, figures)``."""
    both, images = _both(drawn, chosen), drawn.mean(1)
    several = whole.shape[0] > 1
    seeds = whole.std(0, ddof=1) / np.sqrt(len(whole)) if several else None
    result = {}
    for index, name in enumerate(NAMES):
        low, high = _percentiles(both[:, index], 2.5, 97.5)
        result[name] = Interval(
            float(whole[:, index].mean()), low, high, _std(images[:, index]),
            None if seeds is None else float(seeds[index]))
    return result


def _versus(gaps: dict[str, Any], chosen: np.ndarray, margin: float | None
            ) -> dict[str, dict[str, Versus]]:
    result: dict[str, dict[str, Versus]] = {label: {} for label in gaps}
    intervals = {label: _intervals(whole, drawn, chosen) for label, (whole, drawn) in gaps.items()}
    both = {label: _both(drawn, chosen) for label, (_, drawn) in gaps.items()}
    for index, name in enumerate(NAMES):
        columns = {label: _defined(one[:, index]) for label, one in both.items()}
        p = [_two_sided(one) for one in columns.values()]
        same_p: Sequence[float | None] = [None] * len(p) if margin is None else holm(
            [max(_below(one + margin), _below(margin - one)) for one in columns.values()])
        for label, own, adjusted, within in zip(columns, p, holm(p), same_p):
            result[label][name] = Versus(
                intervals[label][name], own, adjusted, adjusted < LEVEL, within,
                None if within is None else within < LEVEL, *_percentiles(columns[label], 5, 95))
    return result


def _defined(values: np.ndarray) -> np.ndarray:
    """Resamples may lack all objects of a size; they say nothing about its figures."""
    defined: np.ndarray = values[~np.isnan(values)]
    return defined


def _std(values: np.ndarray) -> float:
    values = _defined(values)
    return float(values.std()) if len(values) else float('nan')


def _percentiles(values: np.ndarray, low: float, high: float) -> list[float]:
    values = _defined(values)
    return [float('nan')] * 2 if not len(values) else [
        float(one) for one in np.percentile(values, [low, high])]


def _below(values: np.ndarray) -> float:
    """P of a value not above 0; never 0, as the data are one resample more."""
    return (int((values <= 0).sum()) + 1) / (len(values) + 1)


def _two_sided(values: np.ndarray) -> float:
    return min(1., 2 * min(_below(values), _below(-values)))
