"""Matched once and weighted: the figures are those of pycocotools, also where images repeat."""
import contextlib
import copy
import io
import json

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from support.coco_results import copied, draw_dataset, draw_results, with_masks

from mmrepro.report.coco.matches import FIGURES, match
from mmrepro.report.coco.predictions import load_annotations, load_predictions


def load(folder, dataset, results, iou_type='bbox'):
    for name, content in (('annotations', dataset), ('results', results)):
        (folder / f'{name}.json').write_text(json.dumps(content))
    annotations = load_annotations(str(folder / 'annotations.json'))
    return annotations, load_predictions(str(folder / 'results.json'), annotations,
                                         iou_type)


def of_pycocotools(annotations, predictions, iou_type='bbox'):
    evaluation = COCOeval(annotations, predictions, iou_type)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    stats = np.array(evaluation.stats)
    return np.where(stats == -1, np.nan, stats)


def agree(ours, theirs):
    # sums of the same numbers in another order: far below what anybody prints
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-13)


@pytest.mark.parametrize('images, categories, seed', [(40, 3, 0), (60, 12, 1), (5, 8, 2)])
def test_without_weights_all_figures_are_those_of_pycocotools(tmp_path, images, categories, seed):
    dataset = draw_dataset(images, categories, seed)
    annotations, predictions = load(tmp_path, dataset, draw_results(dataset, seed))
    found = match(annotations, predictions).figures()
    agree(found, of_pycocotools(annotations, predictions))
    assert len(found) == len(FIGURES) and 0.1 < found[0] < 0.9


@pytest.mark.parametrize('seed', range(4))
def test_weights_are_copies_of_images(tmp_path, seed):
    """Resampled with replacement: categories vanish, images repeat."""
    draw = np.random.RandomState(seed)
    dataset = draw_dataset(30, 10, seed, objects=3)
    results = draw_results(dataset, seed)
    matches = match(*load(tmp_path, dataset, results))
    weights = np.bincount(draw.randint(30, size=30), minlength=30)
    agree(matches.figures(weights), of_pycocotools(*load(
        tmp_path, *copied(dataset, results, weights))))


def test_more_than_a_hundred_detections_of_an_image(tmp_path):
    dataset = draw_dataset(3, 1, 3, objects=40)
    annotations, predictions = load(tmp_path, dataset, draw_results(dataset, 3, extra=200))
    agree(match(annotations, predictions).figures(), of_pycocotools(annotations, predictions))


def test_an_area_without_objects_has_no_figure(tmp_path):
    dataset = draw_dataset(20, 2, 4)
    dataset['annotations'] = [one for one in dataset['annotations'] if one['area'] < 32**2]
    annotations, predictions = load(tmp_path, dataset, draw_results(dataset, 4))
    found = match(annotations, predictions).figures()
    agree(found, of_pycocotools(annotations, predictions))
    assert np.isnan(found[5]) and found[3] > 0


@pytest.mark.parametrize('seed', range(2))
def test_masks_have_the_figures_of_pycocotools_with_and_without_weights(tmp_path, seed):
    dataset = draw_dataset(12, 4, seed, objects=5)
    for one in dataset['annotations']:  # many boxes are medium, and their masks small
        one['bbox'][2:] = [1.4 * side for side in one['bbox'][2:]]
    dataset, results = with_masks(dataset, draw_results(dataset, seed))
    annotations, predictions = load(tmp_path, dataset, results, 'segm')
    matches = match(annotations, predictions, 'segm')
    # as MMDetection does it: without boxes, areas are those of the masks
    theirs = COCO()
    theirs.dataset = copy.deepcopy(dataset)  # pycocotools writes into it
    with contextlib.redirect_stdout(io.StringIO()):
        theirs.createIndex()
        alone = theirs.loadRes([{name: one[name] for name in one if name != 'bbox'}
                                for one in results])
    expected = of_pycocotools(theirs, alone, 'segm')
    agree(matches.figures(), expected)
    assert 0.1 < expected[0] < 0.9
    boxes = match(*load(tmp_path, dataset, results)).figures()
    assert np.abs(boxes - expected).max() > .01, 'masks are compared, not their boxes'
    weights = np.bincount(np.random.RandomState(seed).randint(12, size=12), minlength=12)
    agree(matches.figures(weights), of_pycocotools(*load(
        tmp_path, *copied(dataset, results, weights), 'segm'), 'segm'))
