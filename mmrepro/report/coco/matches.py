"""COCO's figures for any weights of the images, after the detections were matched once.

pycocotools matches detections and objects (``COCOeval.evaluate``), an image at a time: a weight of
an image cannot change a match. What depends on weights are sums over images, which are made here:

- At a threshold of IoU, the precision after a detection is *true positives so far* divided by
  *detections so far*. Its envelope (the maximum to the right) is reached at true positives only, so
  it is computed there and nowhere else.
- *Detections so far* hardly depends on the threshold. It is one running sum over the detections of
  a category, plus the few that count at some thresholds only.

An integer weight is a number of copies of the image, so the result is that of pycocotools for a
dataset with these copies, up to the order of equal scores within an image.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from .predictions import quiet

AREAS = ('all', 'small', 'medium', 'large')
MAX_DETS = (1, 10, 100)  # of an image and category, those with the highest scores
# name (of MMDetection where it has one), precision or recall, IoU, area, which number of detections
FIGURES = (
    ('mAP', True, None, 'all', 2),
    ('mAP_50', True, 0.5, 'all', 2),
    ('mAP_75', True, 0.75, 'all', 2),
    ('mAP_s', True, None, 'small', 2),
    ('mAP_m', True, None, 'medium', 2),
    ('mAP_l', True, None, 'large', 2),
    ('AR@1', False, None, 'all', 0),
    ('AR@10', False, None, 'all', 1),
    ('AR@100', False, None, 'all', 2),
    ('AR_s@100', False, None, 'small', 2),
    ('AR_m@100', False, None, 'medium', 2),
    ('AR_l@100', False, None, 'large', 2),
)


class _Precision(NamedTuple):
    """The true positives of all segments (area, category, threshold), and what lies before them.

    Running sums have a 0 in front, so a position is a number of entries before it.
    """
    images: np.ndarray  # of the true positives, by segment, in the order of scores
    segments: np.ndarray  # of the true positives
    starts: np.ndarray  # of the segments, and the end
    counted: np.ndarray  # images of the detections that count, by area and category
    until: np.ndarray  # of each true positive: how many of them, itself included
    since: np.ndarray  # of each segment: how many of them lie before it
    extra: np.ndarray  # images of detections that count at some thresholds only
    signs: np.ndarray  # of each: 1 where it counts at this threshold, -1 where it does not
    extra_until: np.ndarray
    extra_since: np.ndarray


class Matches:
    """The matches of one detector; :meth:`figures` is the result for any weights.

    Attributes:
        images: ids of the images, in the order of the weights.
    """

    def __init__(self, evaluation: Any) -> None:
        params = evaluation.params
        self.images = list(params.imgIds)
        self._recalls, self._ious = params.recThrs, params.iouThrs
        self._shape = (len(params.areaRngLbl), len(params.catIds), len(params.iouThrs))
        cells = _Cells(evaluation)
        self._objects = _concatenate([cells.objects(area, category)
                                      for area in range(self._shape[0])
                                      for category in range(self._shape[1])])
        self._precision = _precision(cells, self._shape, MAX_DETS[2])
        # of fewer detections, only how many objects are found
        self._few = [_concatenate([images for category in range(self._shape[1])
                                   for images in cells.found(0, category, count)])
                     for count in MAX_DETS[:2]]
        self._rows = [(figure, None if iou is None else int(np.argmin(abs(self._ious - iou))),
                       AREAS.index(area), which) for _, figure, iou, area, which in FIGURES]

    def figures(self, weights: np.ndarray | None = None) -> np.ndarray:
        """COCO's twelve figures (:data:`FIGURES`), from 0 to 1; NaN where nothing is to be found.

        Args:
            weights: a whole number of copies for each image; None: one each.
        """
        if weights is None:
            weights = np.ones(len(self.images), np.int64)
        weights = np.asarray(weights, np.int64)
        objects = _sums(weights, *self._objects).reshape(self._shape[:2])
        there = objects > 0
        precision, found = self._precisions(weights, objects)
        few = [_sums(weights, *one).reshape(self._shape[1:]) for one in self._few]
        result = []
        for is_precision, iou, area, which in self._rows:
            if is_precision:
                values = precision[area]
            else:
                with np.errstate(invalid='ignore', divide='ignore'):
                    values = (found[area] if which == 2 else few[which]) / objects[area][:, None]
            values = values[there[area]]
            values = values if iou is None else values[:, iou]
            result.append(values.mean() if values.size else np.nan)
        return np.array(result)

    def _precisions(self, weights: np.ndarray, objects: np.ndarray
                    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean precision over recalls and number of objects found, by area, category, threshold."""
        one = self._precision
        copies = weights[one.images]
        total = _running(copies)
        first = total[one.starts]
        before = _running(weights[one.counted])
        extra = _running(weights[one.extra] * one.signs)
        base = before[one.since] + extra[one.extra_since]
        counted = before[one.until] + extra[one.extra_until] - base[one.segments]
        # as pycocotools does, which adds it for detections that nothing precedes
        precision = np.append((total[1:] - first[one.segments]) / (counted + np.spacing(1)), 0.)
        needed = self._needed(objects).repeat(self._shape[2], 0).reshape(len(first) - 1, -1)
        found = np.diff(first)
        reached = needed <= found[:, None]
        # of every copy of a true positive, its index: the n-th copy is where n objects are found
        index_of = np.append(np.arange(len(copies)).repeat(copies), len(copies))
        at = np.where(reached, index_of[np.minimum(first[:-1, None] + needed, total[-1] + 1) - 1],
                      one.starts[1:, None])
        best = np.maximum.reduceat(precision, at.ravel()).reshape(at.shape)
        best[~reached] = 0
        best = np.maximum.accumulate(best[:, ::-1], axis=1)
        return best.mean(1).reshape(self._shape), found.reshape(self._shape)

    def _needed(self, objects: np.ndarray) -> np.ndarray:
        """Objects to be found for each recall, by area and category: at least one."""
        count = np.maximum(objects.reshape(-1, 1), 1)
        needed = np.ceil(self._recalls * count)
        # pycocotools divides, and compares the rounded quotient
        needed -= (needed - 1) / count >= self._recalls
        needed += needed / count < self._recalls
        count_needed: np.ndarray = np.maximum(needed, 1).astype(np.int64)
        return count_needed


def match(annotations: Any, predictions: Any, iou_type: str = 'bbox') -> Matches:
    """Match detections and objects, by pycocotools.

    Args:
        annotations, predictions: from :mod:`mmrepro.report.coco.predictions`.
        iou_type: 'bbox' or 'segm'.
    """
    from pycocotools.cocoeval import COCOeval
    evaluation = COCOeval(annotations, predictions, iou_type)
    evaluation.params.maxDets = list(MAX_DETS)
    with quiet():
        evaluation.evaluate()
    return Matches(evaluation)


class _Cells:
    """What pycocotools found, by area and category: arrays over all images."""

    def __init__(self, evaluation: Any) -> None:
        self._all, self._images = evaluation.evalImgs, len(evaluation.params.imgIds)
        self._areas = len(evaluation.params.areaRngLbl)
        self._thresholds = len(evaluation.params.iouThrs)

    def _of(self, area: int, category: int) -> list[tuple[int, dict[str, Any]]]:
        start = (category * self._areas + area) * self._images
        return [(number, one) for number, one in enumerate(
            self._all[start:start + self._images]) if one is not None]

    def objects(self, area: int, category: int) -> np.ndarray:
        """Image of each object that is to be found."""
        return _ints([number for number, one in self._of(area, category)
                      for ignored in one['gtIgnore'] if not ignored])

    def detections(self, area: int, category: int, most: int
                   ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Images ``(n, )`` in the order of scores; true and counted ones ``(thresholds, n)``."""
        cells = self._of(area, category)
        if not cells:
            nothing = np.zeros((self._thresholds, 0), bool)
            return _ints([]), nothing, nothing
        scores = np.concatenate([one['dtScores'][:most] for _, one in cells])
        images = np.repeat(_ints([number for number, _ in cells]),
                           [len(one['dtScores'][:most]) for _, one in cells])
        order = np.argsort(-scores, kind='mergesort')  # as pycocotools sorts
        matched = np.concatenate([one['dtMatches'][:, :most] for _, one in cells], 1)[:, order]
        counted = ~np.concatenate([one['dtIgnore'][:, :most] for _, one in cells], 1)[
            :, order].astype(bool)
        return images[order], (matched != 0) & counted, counted

    def found(self, area: int, category: int, most: int) -> list[np.ndarray]:
        """For each threshold, the images of the true positives."""
        images, true, _ = self.detections(area, category, most)
        return [images[row] for row in true]


def _precision(cells: _Cells, shape: tuple[int, int, int], most: int) -> _Precision:
    found: dict[str, list[np.ndarray]] = {name: [] for name in _Precision._fields}
    sizes, before, before_extra = [], 0, 0
    for area in range(shape[0]):
        for category in range(shape[1]):
            images, true, counted = cells.detections(area, category, most)
            usual = counted.mean(0) > .5
            behind = np.cumsum(usual)
            found['counted'].append(images[usual])
            for row in range(shape[2]):
                tp, = true[row].nonzero()
                extra, = (counted[row] != usual).nonzero()
                found['images'].append(images[tp])
                found['until'].append(before + behind[tp])
                found['since'].append(np.array([before]))
                found['extra'].append(images[extra])
                found['signs'].append(np.where(counted[row, extra], 1, -1))
                found['extra_until'].append(
                    before_extra + np.searchsorted(extra, tp, side='right'))
                found['extra_since'].append(np.array([before_extra]))
                sizes.append(len(tp))
                before_extra += len(extra)
            before += int(usual.sum())
    arrays = {name: np.concatenate(parts).astype(np.int64)
              for name, parts in found.items() if parts}
    arrays['segments'] = np.arange(len(sizes)).repeat(sizes)
    arrays['starts'] = _running(np.array(sizes))
    return _Precision(**arrays)


def _ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, np.int64)


def _running(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, 2, ... values."""
    result = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=result[1:])
    return result


def _concatenate(parts: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All parts one behind the other, and where each starts and the last ends."""
    return np.concatenate(parts), _running(np.array([len(part) for part in parts]))


def _sums(weights: np.ndarray, images: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The sum of the weights of each part."""
    return np.diff(_running(weights[images])[starts])
