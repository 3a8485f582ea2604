"""Saved predictions of a detector: what ``test --out`` writes, or COCO's JSON of results."""
from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import PredictionError


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """pycocotools prints what it does."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def load_annotations(path: str) -> Any:
    """The annotations, as ``pycocotools.coco.COCO``."""
    from pycocotools.coco import COCO
    content = _read(path, 'annotations')
    lacking = [key for key in ('images', 'categories', 'annotations')
               if not isinstance(content, dict) or not content.get(key)]
    if lacking:
        raise PredictionError(f'{path}: not annotations in the format of COCO: no {lacking[0]}')
    found = COCO()
    found.dataset = content
    with quiet():
        found.createIndex()
    return found


def load_predictions(path: str, annotations: Any, iou_type: str = 'bbox') -> Any:
    """The predictions for these annotations, as ``pycocotools.coco.COCO``.

    Labels of a pickle file count categories in the order of the annotations, as MMDetection's
    CocoMetric does.

    Args:
        path: a pickle file that ``mmrepro test --out`` (MMDetection's DumpDetResults) has written,
            or a JSON file of results in the format of COCO.
        annotations: from :func:`load_annotations`.
        iou_type: 'bbox' or 'segm'.
    """
    if path.endswith(('.pkl', '.pickle')):
        results = _of_pickle(path, annotations, iou_type)
    else:
        results = _read(path, 'predictions')
        if not isinstance(results, list) or any(
                not isinstance(one, dict) or not {'image_id', 'category_id', 'score'} <= set(one)
                for one in results):
            raise PredictionError(f'{path}: not results in the format of COCO: a list of objects '
                                  'with image_id, category_id, score and bbox is expected')
    if not results:
        raise PredictionError(f'{path}: no predictions at all')
    key = 'bbox' if iou_type == 'bbox' else 'segmentation'
    for name, known, what in (('image_id', annotations.imgs, 'an image'),
                              ('category_id', annotations.cats, 'a category')):
        unknown = next((one[name] for one in results if one[name] not in known), None)
        if unknown is not None:
            raise PredictionError(f'{path}: {name} {unknown!r} is not {what} of the annotations; '
                                  'are these the annotations that it was tested on?')
    if any(key not in one for one in results):
        raise PredictionError(f'{path}: a prediction has no {key}; allowed --iou-type: bbox, segm')
    if iou_type == 'segm':
        # pycocotools would take small, medium and large from the boxes
        results = [{name: one[name] for name in one if name != 'bbox'} for one in results]
    with quiet():
        return annotations.loadRes(results)


def _of_pickle(path: str, annotations: Any, iou_type: str) -> list[dict[str, Any]]:
    content = _read(path, 'predictions', pickle.load)
    if not isinstance(content, list) or any(
            not isinstance(one, dict) or not {'img_id', 'pred_instances'} <= set(one)
            for one in content):
        raise PredictionError(f'{path}: not written by `test --out`: a list of dicts with img_id '
                              'and pred_instances is expected')
    tested = {one['img_id'] for one in content}
    lacking = sorted(set(annotations.imgs) - tested)
    if lacking:
        raise PredictionError(f'{path}: {len(lacking)} of {len(annotations.imgs)} images of the '
                              f'annotations were not tested, for example id {lacking[0]}')
    categories = annotations.getCatIds()
    results = []
    for image in content:
        found = image['pred_instances']
        labels = np.asarray(found['labels']).tolist()
        if labels and not 0 <= max(labels) < len(categories):
            raise PredictionError(f'{path}: label {max(labels)}, but the annotations have '
                                  f'{len(categories)} categories')
        if iou_type == 'segm' and 'masks' not in found:
            raise PredictionError(f'{path}: no masks; allowed --iou-type for it: bbox')
        scores = np.asarray(found['scores']).tolist()
        for index, (x1, y1, x2, y2) in enumerate(np.asarray(found['bboxes']).tolist()):
            one = dict(image_id=image['img_id'], category_id=categories[labels[index]],
                       score=scores[index])
            if iou_type == 'segm':
                one['segmentation'] = found['masks'][index]
            else:
                one['bbox'] = [x1, y1, x2 - x1, y2 - y1]
            results.append(one)
    return results


def _read(path: str, what: str, load: Any = json.load) -> Any:
    if os.path.isdir(path) or not os.path.exists(path):
        raise PredictionError(f'{path}: no such file of {what}')
    try:
        with open(path, 'rb') as file:
            return load(file)
    except (ValueError, EOFError, pickle.UnpicklingError, UnicodeDecodeError, AttributeError,
            ImportError, IndexError, OSError) as error:
        raise PredictionError(f'{path}: cannot be read as {what}: {error}') from error
