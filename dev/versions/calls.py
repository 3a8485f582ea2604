"""Calls that MMDetection makes, or a transform may make, of NumPy, SciPy and other libraries."""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import inputs
from .digests import digest

UNSTABLE = ' of stock MMDetection'  # follows an output
Found = Iterator[tuple[str, str, dict[str, Any], str]]


def streams(arrays: Any) -> Found:
    """Yield digests of random numbers of NumPy."""
    legacy = ('rand randn standard_normal uniform normal exponential gamma beta poisson binomial '
              'permutation choice randint dirichlet multinomial standard_gamma laplace wald '
              'vonmises geometric logseries zipf').split()
    modern = ('random standard_normal normal uniform exponential gamma beta poisson binomial '
              'permutation choice integers dirichlet multinomial laplace wald multivariate_normal '
              'hypergeometric geometric triangular vonmises').split()
    arguments: dict[str, tuple[Any, ...]] = {
        'rand': (999, ), 'randn': (999, ), 'standard_normal': (999, ), 'random': (999, ),
        'uniform': (-3., 5., 999), 'normal': (1., 2., 999), 'exponential': (2., 999),
        'gamma': (.7, 2., 999), 'standard_gamma': (2.5, 999), 'beta': (1.5, 1.5, 999),
        'poisson': (12., 999), 'binomial': (40, .3, 999), 'permutation': (999, ),
        'choice': (50, 20, False), 'randint': (0, 77, 999), 'integers': (0, 77, 999),
        'dirichlet': ((.05, 1., 3.), 99), 'multinomial': (20, [.2, .3, .5], 99),
        'laplace': (0., 1., 999), 'wald': (3., 2., 999), 'vonmises': (.5, 4., 999),
        'geometric': (.2, 999), 'logseries': (.6, 999), 'zipf': (2., 999),
        'multivariate_normal': ([1., 2.], [[2., .3], [.3, 1.]], 99),
        'hypergeometric': (20, 30, 12, 999), 'triangular': (0., 1., 3., 999)}
    for kind, names, make in (('RandomState', legacy, np.random.RandomState),
                              ('Generator', modern, np.random.default_rng)):
        for name in names:
            found = digest(getattr(make(1234), name)(*arguments[name]))
            yield f'numpy.random.{kind}.{name}', 'numbers', {}, found


def assigners(arrays: Any) -> Found:
    """Yield digests of matchings, by SciPy's ``linear_sum_assignment``."""
    from scipy.optimize import linear_sum_assignment
    matrix = np.random.RandomState(0)
    for output, costs in (
            ('distinct costs', [matrix.rand(30, n) for n in (1, 7, 30, 50)]),
            ('tied costs', [matrix.randint(0, 3, (30, n)).astype(float) for n in (1, 7, 30, 50)]),
            ('equal rows', [np.repeat(matrix.rand(5, 7), 6, 0) for _ in range(3)])):
        found = digest([linear_sum_assignment(cost) for cost in costs])
        for name in ('HungarianAssigner', 'TopkHungarianAssigner'):
            yield name, output, {}, found


def mixtures(arrays: Any) -> Found:
    """Yield digests of what PAA asks scikit-learn's mixture for, as ``paa_reassign`` does."""
    import sklearn.mixture
    state = np.random.RandomState(0)
    classes, scores = [], []
    for _ in range(60):
        losses = np.sort(np.concatenate([state.gamma(2., .5, 12), state.gamma(9., .4, 15)]))
        losses = losses.astype(np.float32)[:, None]
        means = np.array([losses.min(), losses.max()]).reshape(2, 1)
        mixture = sklearn.mixture.GaussianMixture(
            2, weights_init=np.array([.5, .5]), means_init=means,
            precisions_init=np.array([1., 1.]).reshape(2, 1), covariance_type='diag')
        mixture.fit(losses)
        classes.append(mixture.predict(losses))
        scores.append(mixture.score_samples(losses))
    chosen = [score[cluster == 0].argmax() for score, cluster in zip(scores, classes)
              if (cluster == 0).any()]
    for name in ('PAAHead', 'LADHead'):
        covers = dict(covariance_type=['diag'])
        yield name, 'classes', covers, digest(classes)
        yield name, 'thresholds', covers, digest(chosen)
        yield name, 'scores', covers, digest(scores)


def coco(arrays: Any) -> Found:
    """Yield digests of COCO's figures for detections with and without tied scores."""
    import contextlib
    import io

    from pycocotools import mask as tools
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval
    state = np.random.RandomState(0)
    truth: dict[str, Any] = dict(
        info={}, images=[dict(id=i, width=200, height=200) for i in range(20)],
        categories=[dict(id=i, name=str(i)) for i in range(3)], annotations=[])
    found = []
    for image in range(20):
        for _ in range(6):
            x, y, w, h = (int(value) for value in state.randint(4, 90, 4))
            kind = int(state.randint(3))
            corners = [float(value) for value in
                       (x, y, x + w, y + h / 3, x + w, y + h, x + w / 3, y + h)]
            truth['annotations'].append(dict(
                id=len(truth['annotations']) + 1, image_id=image, category_id=kind, area=w * h,
                bbox=[x, y, w, h], iscrowd=0, segmentation=[corners]))
            dx, dy = (int(value) for value in state.randint(-9, 9, 2))
            found.append(dict(image_id=image, category_id=kind, bbox=[x + dx, y + dy, w, h],
                              score=float(state.rand()), segmentation=[
                                  [value + dx for value in corners]]))
    # one box of each category, and one detection that finds it
    single = dict(truth, images=truth['images'][:1], annotations=[
        dict(truth['annotations'][kind], image_id=0, category_id=kind) for kind in range(3)])
    hits = [dict(image_id=0, category_id=kind, score=.9, bbox=one['bbox'],
                 segmentation=one['segmentation'])
            for kind, one in enumerate(single['annotations'])]
    covers: dict[str, list[Any]] = dict(metric=['bbox', 'segm'])
    with contextlib.redirect_stdout(io.StringIO()):
        for output, objects, detections in (
                ('distinct scores', truth, found),
                ('tied scores', truth, [dict(one, score=round(one['score'], 1)) for one in found]),
                ('single hits', single, hits)):
            data = COCO()
            data.dataset = objects
            data.createIndex()
            for kind in ('bbox', 'segm'):
                if kind == 'segm':
                    detections = [
                        {key: value for key, value in one.items() if key != 'bbox'} | dict(
                            segmentation=tools.merge(tools.frPyObjects(
                                one['segmentation'], 200, 200))) for one in detections]
                evaluation = COCOeval(data, data.loadRes(copy.deepcopy(detections)), kind)
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
                yield 'CocoMetric', f'{kind}, {output}', covers, digest(evaluation.stats)
    polygons = [[one.tolist() for one in polygon] for polygon in inputs.polygons()]
    codes = [tools.merge(tools.frPyObjects(polygon, 191, 271)) for polygon in polygons]
    yield 'pycocotools.mask', 'decoded', {}, digest(tools.decode(codes))
    yield 'pycocotools.mask', 'area', {}, digest(tools.area(codes))
    yield 'pycocotools.mask', 'iou', {}, digest(tools.iou(codes, codes, [0] * len(codes)))
    yield 'pycocotools.mask', 'toBbox', {}, digest(tools.toBbox(codes))


def voc(arrays: Any) -> Found:
    """Yield digests of VOC's mean AP; its order of tied scores is NumPy's."""
    from mmdet.evaluation.functional import eval_map

    from mmrepro import patches
    state = np.random.RandomState(0)
    boxes = [state.randint(0, 90, (6, 4)).astype(np.float32) for _ in range(20)]
    for one in boxes:
        one[:, 2:] += one[:, :2] + 5
    truth = [dict(bboxes=one, labels=np.arange(6) % 2) for one in boxes]
    outputs = {}
    for output, digits in (('distinct scores', 9), ('tied scores', 1)):
        outputs[output] = [[np.hstack([np.repeat(one[kind::2], 3, 0) + np.tile(
            [[0.], [9.], [40.]], (3, 1)).astype(np.float32),
            state.rand(9, 1).round(digits)]).astype(np.float32) for kind in range(2)]
            for one in boxes]
    for sorting in (UNSTABLE, ''):
        if not sorting:  # mmrepro sorts stably
            patches.apply()
        for output, found in outputs.items():
            for mode in ('area', '11points'):
                mean, classes = eval_map(found, truth, logger='silent', nproc=1, eval_mode=mode)
                yield f'VOCMetric(eval_mode={mode})', output + sorting, dict(
                    metric=['mAP'], eval_mode=[mode]), digest(mean, [one['ap'] for one in classes])


def lvis(arrays: Any) -> Found:
    """Yield the digest of LVIS's figures for detections with tied scores."""
    yield 'LVISMetric', 'figures', dict(metric=['bbox', 'segm']), _figures('LVISMetric')


def cityscapes(arrays: Any) -> Found:
    """Yield the digest of Cityscapes' figures for instances with tied scores."""
    yield 'CityScapesMetric', 'figures', {}, _figures('CityScapesMetric')


def _figures(metric: str) -> str:
    """Return the digest of what a metric of MMDetection says of the predictions of its test."""
    import contextlib
    import io
    import tempfile

    import metrics_of_mmdet as small
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        found = small.METRICS[metric](small.Data(0), folder)
    return digest(sorted(found.items()))


def backbones(arrays: Any) -> Found:
    """Yield digests of backbones as ``TIMMBackbone`` of MMPretrain makes them."""
    import torch

    # PyPI's torchvision asks for CUDA; no backbone calls its compiled operators
    operators = torch.library.Library('torchvision', 'DEF')
    for name in ('nms', 'qnms'):
        operators.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')
    import timm
    for name, features in (('resnet18', True), ('efficientnet_b1', True),
                           ('mobilenetv3_large_100', True), ('convnext_tiny', True),
                           ('vit_tiny_patch16_224', False),
                           ('swin_tiny_patch4_window7_224', False)):
        part = f'TIMMBackbone(model_name={name})'
        covers = dict(model_name=[name], pretrained=[False], features_only=[features])
        torch.manual_seed(0)
        model = timm.create_model(name, features_only=features, pretrained=False, in_chans=3)
        weights = model.state_dict()
        yield part, 'names of weights', covers, digest(sorted(weights))
        yield part, 'initial weights', covers, digest(list(weights.values()))
        image = torch.from_numpy(arrays['image'][:160, :160].copy()).permute(2, 0, 1)[None] / 255
        image = torch.nn.functional.interpolate(image, (224, 224))
        found = model.train()(image.repeat(2, 1, 1, 1))
        if not features:
            found = [found]
        sum(one.square().mean() for one in found).backward()
        yield part, 'features', covers, digest(list(found))
        yield part, 'gradients', covers, digest(
            [one.grad for one in model.parameters() if one.grad is not None])
        yield part, 'random numbers', covers, digest(torch.rand(4))
