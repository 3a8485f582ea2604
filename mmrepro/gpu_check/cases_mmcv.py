"""One row per operator of mmcv: calls of mmcv's own Python on inputs that collide.

Boxes are piled on three places, offsets pull samples together, attention looks at few points: many
sources meet in few destinations, which is where a sum that is not ordered shows.
"""
from __future__ import annotations

import functools
from typing import Any, Callable, Dict

import torch
from torch import Tensor

from .operator_cases import Case, Problem, Sizes

__all__ = ['CASES']

_STRIDE = 8


def _op(name: str) -> Callable[..., Any]:
    """A function of ``mmcv.ops``, looked up when it is called."""
    import mmcv.ops
    found = mmcv.ops
    for part in name.split('.'):
        found = getattr(found, part)
    return found


def _map(s: Sizes, channels: int = 256) -> Tensor:
    return s.feature(channels, 800 // _STRIDE, 1344 // _STRIDE)


def _roi_align(s: Sizes, mode: str = 'avg', ratio: int = 0) -> Problem:
    return Problem(dict(feature=_map(s)), dict(rois=s.rois()),
                   lambda feature, rois: _op('roi_align')(feature, rois, 7, 1 / _STRIDE, ratio,
                                                          mode, True))


def _roi_pool(s: Sizes) -> Problem:
    return Problem(dict(feature=_map(s)), dict(rois=s.rois()),
                   lambda feature, rois: _op('roi_pool')(feature, rois, 7, 1 / _STRIDE))


def _prroi_pool(s: Sizes) -> Problem:
    return Problem(dict(feature=_map(s), rois=s.rois()), {},
                   lambda feature, rois: _op('prroi_pool')(feature, rois, (7, 7), 1 / _STRIDE),
                   double=False)


def _deform_roi_pool(s: Sizes) -> Problem:
    rois = s.rois()
    return Problem(dict(feature=_map(s), offset=s.normal(len(rois), 2, 7, 7)), dict(rois=rois),
                   lambda feature, offset, rois: _op('deform_roi_pool')(
                       feature, rois, offset, 7, 1 / _STRIDE, 2, 0.1))


def _rotated(name: str, *arguments: Any) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        boxes = s.rotated(512)
        rois = torch.cat((torch.zeros(len(boxes), 1), boxes), 1)
        return Problem(dict(feature=_map(s)), dict(rois=rois),
                       lambda feature, rois: _op(name)(feature, rois, *arguments))
    return make


def _rotated_feature_align(s: Sizes) -> Problem:
    feature = _map(s)
    pixels = feature[0, 0].numel()
    # mmcv reads y before x, so the places lie where both orders are inside of the map
    middle = min(feature.shape[2:]) * _STRIDE / 2
    boxes = torch.cat((middle + s.normal(pixels, 2) * 2, 30 + s.uniform(pixels, 2) * middle / 4,
                       s.uniform(pixels, 1)), 1)
    return Problem(dict(feature=feature), dict(boxes=boxes.view(1, *feature.shape[2:], 5)),
                   lambda feature, boxes: _op('rotated_feature_align')(feature, boxes,
                                                                       1 / _STRIDE, 5))


def _bezier_align(s: Sizes) -> Problem:
    boxes = s.boxes(128, 800, 1344, 150)
    x = torch.stack([boxes[:, 0] + (boxes[:, 2] - boxes[:, 0]) * i / 3 for i in range(4)], 1)
    upper = torch.stack((x, boxes[:, 1:2].expand_as(x)), -1)
    lower = torch.stack((x.flip(1), boxes[:, 3:].expand_as(x)), -1)
    rois = torch.cat((torch.zeros(len(boxes), 1), torch.cat((upper, lower), 1).flatten(1)), 1)
    return Problem(dict(feature=_map(s)), dict(rois=rois),
                   lambda feature, rois: _op('bezier_align')(feature, rois, (8, 32), 1 / _STRIDE,
                                                             2, True))


def _border_align(s: Sizes) -> Problem:
    feature = s.feature(256, 50, 84)
    number, size = feature[0, 0].numel(), min(feature.shape[2:])
    corner = s.uniform(1, number, 2) * size / 4
    boxes = torch.cat((corner, corner + 1 + s.uniform(1, number, 2) * size / 4), 2)
    return Problem(dict(feature=feature), dict(boxes=boxes),
                   lambda feature, boxes: _op('border_align')(feature, boxes, 10))


def _deform_conv(s: Sizes, modulated: bool = False) -> Problem:
    feature = s.feature(256, 50, 84)
    channels, size = feature.shape[1], feature.shape[2:]
    leaves = dict(feature=feature, offset=s.normal(1, 18, *size) * 3,
                  weight=s.normal(channels, channels, 3, 3) * 0.05)
    if not modulated:
        return Problem(leaves, {}, lambda feature, offset, weight: _op('deform_conv2d')(
            feature, offset, weight, 1, 1, 1, 1, 1))
    leaves.update(mask=s.uniform(1, 9, *size), bias=s.normal(channels))
    return Problem(leaves, {}, lambda feature, offset, mask, weight, bias: _op(
        'modulated_deform_conv2d')(feature, offset, mask, weight, bias, 1, 1, 1, 1, 1))


def _ms_deform_attn(s: Sizes) -> Problem:
    shapes = torch.tensor([[s.count(h), s.count(w)]
                           for h, w in ((100, 168), (50, 84), (25, 42), (13, 21))])
    areas = shapes.prod(1)
    queries, keys = int(areas.sum()), int(areas.sum())
    centres = s.uniform(4, 2)[torch.arange(queries) % 4]
    step = s.normal(1, queries, 8, 4, 4, 2) * 2 / shapes.flip(1)[:, None]
    leaves = dict(value=s.normal(1, keys, 8, 32), where=centres[None, :, None, None, None] + step,
                  weights=s.uniform(1, queries, 8, 4, 4))
    return Problem(leaves, dict(shapes=shapes, starts=areas.cumsum(0) - areas),
                   lambda value, where, weights, shapes, starts: _op(
                       'multi_scale_deform_attn.MultiScaleDeformableAttnFunction').apply(
                           value, shapes, starts, where, weights, 64))


def _carafe(s: Sizes, name: str = 'carafe') -> Problem:
    feature = s.feature(256, 50, 84)
    h, w = feature.shape[2:]

    def run(feature: Tensor, masks: Tensor) -> Tensor:
        # mmcv refuses the backward of its naive form on a CPU; both compute the same
        return _op(name if feature.is_cuda else 'carafe')(feature, masks, 5, 1, 2)

    return Problem(dict(feature=feature, masks=s.uniform(1, 25, 2 * h, 2 * w)), {}, run)


def _scored(s: Sizes, number: int = 2000) -> Dict[str, Tensor]:
    """Boxes with few different scores: ties are what a device may break as it likes."""
    boxes = s.boxes(number, 800, 1344, 96)
    return dict(boxes=boxes, scores=(s.uniform(len(boxes)) * 20).round() / 20)


def _nms(s: Sizes) -> Problem:
    return Problem({}, _scored(s), lambda boxes, scores: _op('nms')(boxes, scores, 0.5),
                   double=False)


def _softnms(s: Sizes) -> Problem:
    # mmcv runs it on the CPU whatever the device
    return Problem({}, _scored(s, 400), lambda boxes, scores: _op('soft_nms')(
        boxes.cpu(), scores.cpu()), double=False)


def _nms_match(s: Sizes) -> Problem:
    return Problem({}, _scored(s, 400), lambda boxes, scores: _op('nms_match')(
        torch.cat((boxes, scores[:, None]), 1), 0.5), double=False)


def _nms_rotated(s: Sizes) -> Problem:
    boxes = s.rotated(1000)
    scores = (s.uniform(len(boxes)) * 20).round() / 20
    return Problem({}, dict(boxes=boxes, scores=scores),
                   lambda boxes, scores: _op('nms_rotated')(boxes, scores, 0.5), double=False)


def _quads(boxes: Tensor) -> Tensor:
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack((x1, y1, x2, y1, x2, y2, x1, y2), 1)


def _nms_quadri(s: Sizes) -> Problem:
    boxes = _quads(s.boxes(1000, 800, 1344, 96))
    scores = (s.uniform(len(boxes)) * 20).round() / 20
    return Problem({}, dict(boxes=boxes, scores=scores),
                   lambda boxes, scores: _op('nms_quadri')(boxes, scores, 0.5), double=False)


def _focal(name: str) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        rows = s.count(20000)
        return Problem(dict(logits=s.normal(rows, 80)),
                       dict(labels=torch.arange(rows) % 81 if 'sigmoid' in name
                            else torch.arange(rows) % 80),
                       lambda logits, labels: _op(name)(logits, labels, 2., .25, None, 'mean'))
    return make


def _overlaps(name: str, boxes: Callable[[Sizes], Tensor]) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        return Problem({}, dict(a=boxes(s), b=boxes(s)), lambda a, b: _op(name)(a, b),
                       double=name == 'bbox_overlaps')
    return make


def _diff_iou(s: Sizes) -> Problem:
    boxes = s.rotated(1000)
    return Problem(dict(a=boxes[None]), dict(b=boxes[None] + s.normal(1, len(boxes), 5)),
                   lambda a, b: _op('diff_iou_rotated_2d')(a, b), double=False)


def _points_in_polygons(s: Sizes) -> Problem:
    return Problem({}, dict(points=s.uniform(s.count(5000), 2) * 800 / s.by,
                            polygons=_quads(s.boxes(200, 800, 1344, 96))),
                   lambda points, polygons: _op('points_in_polygons')(points, polygons),
                   double=False)


def _point_sets(s: Sizes, number: int) -> Tensor:
    boxes = s.boxes(number, 800, 1344, 96)
    size = boxes[:, None, 2:] - boxes[:, None, :2] + 1
    return (boxes[:, None, :2] + s.uniform(len(boxes), 9, 2) * size).flatten(1)


def _min_area(s: Sizes) -> Problem:
    return Problem({}, dict(sets=_point_sets(s, 1000)),
                   lambda sets: _op('min_area_polygons')(sets), double=False)


def _convex(name: str) -> Callable[[Sizes], Problem]:
    def make(s: Sizes) -> Problem:
        sets, number = _point_sets(s, 800), 800 if name == 'convex_giou' else 100
        return Problem({}, dict(sets=sets, quads=_quads(s.boxes(number, 800, 1344, 96))),
                       lambda sets, quads: _op(name)(sets, quads), double=False)
    return make


def _active_rotated_filter(s: Sizes) -> Problem:
    indices = torch.stack([torch.stack([torch.randperm(9, generator=s.random) + 1
                                        for _ in range(8)], -1).view(3, 3, 8)
                           for _ in range(8)])
    weight = s.normal(s.channels(256), s.channels(256) // 8, 8, 3, 3)
    order = (indices - 1) + 9 * torch.arange(8).view(8, 1, 1, 1) + 1
    return Problem(dict(weight=weight), dict(indices=order.int().contiguous()),
                   lambda weight, indices: _op('active_rotated_filter')(weight, indices))


def _masked_conv(s: Sizes) -> Problem:
    feature = s.feature(256, 100, 168)
    channels = feature.shape[1]
    return Problem({}, dict(feature=feature, mask=(s.uniform(1, *feature.shape[2:]) > 0.7).float(),
                            weight=s.normal(channels, channels, 3, 3), bias=s.normal(channels)),
                   lambda feature, mask, weight, bias: _op('masked_conv2d')(
                       feature, mask, weight, bias, 1))


def _sync_bn(s: Sizes) -> Problem:
    feature = s.feature(256, 100, 168, batch=2)
    channels = feature.shape[1]
    fixed = dict(mean=torch.zeros(channels), var=torch.ones(channels))
    return Problem(dict(feature=feature, weight=s.normal(channels), bias=s.normal(channels)), fixed,
                   lambda feature, weight, bias, mean, var: _op(
                       'sync_bn.SyncBatchNormFunction').apply(
                           feature, mean.clone(), var.clone(), weight, bias, 0.1, 1e-5, None, 1,
                           'default'), double=False)


_ROI_ALIGN = ('roi_align_forward', 'roi_align_backward')

CASES: Dict[str, Case] = {
    'RoIAlign': Case(_ROI_ALIGN, _roi_align),
    'RoIAlign, sampling_ratio 2': Case(_ROI_ALIGN, functools.partial(_roi_align, ratio=2)),
    'RoIAlign, max': Case(_ROI_ALIGN, functools.partial(_roi_align, mode='max', ratio=2)),
    'RoIPool': Case(('roi_pool_forward', 'roi_pool_backward'), _roi_pool),
    'PrRoIPool': Case(('prroi_pool_forward', 'prroi_pool_backward', 'prroi_pool_coor_backward'),
                      _prroi_pool),
    'DeformRoIPool': Case(('deform_roi_pool_forward', 'deform_roi_pool_backward'),
                          _deform_roi_pool),
    'RoIAlignRotated': Case(('roi_align_rotated_forward', 'roi_align_rotated_backward'),
                            _rotated('roi_align_rotated', 7, 1 / _STRIDE, 2, True)),
    'RiRoIAlignRotated': Case(('riroi_align_rotated_forward', 'riroi_align_rotated_backward'),
                              _rotated('riroi_align_rotated', (7, 7), 1 / _STRIDE, 2, 8)),
    'RotatedFeatureAlign': Case(('rotated_feature_align_forward',
                                 'rotated_feature_align_backward'), _rotated_feature_align),
    'BezierAlign': Case(('bezier_align_forward', 'bezier_align_backward'), _bezier_align),
    'BorderAlign': Case(('border_align_forward', 'border_align_backward'), _border_align),
    'DCNv1': Case(('deform_conv_forward', 'deform_conv_backward_input',
                   'deform_conv_backward_parameters'), _deform_conv),
    'DCNv2': Case(('modulated_deform_conv_forward', 'modulated_deform_conv_backward'),
                  functools.partial(_deform_conv, modulated=True)),
    'MSDeformAttn': Case(('ms_deform_attn_forward', 'ms_deform_attn_backward'), _ms_deform_attn),
    'CARAFE': Case(('carafe_forward', 'carafe_backward'), _carafe),
    'CARAFENaive': Case(('carafe_naive_forward', 'carafe_naive_backward'),
                        functools.partial(_carafe, name='carafe_naive')),
    'NMS': Case(('nms',), _nms),
    'Soft-NMS': Case(('softnms',), _softnms),
    'NMS, groups': Case(('nms_match',), _nms_match),
    'NMS, rotated': Case(('nms_rotated',), _nms_rotated),
    'NMS, quadrilaterals': Case(('nms_quadri',), _nms_quadri),
    'focal loss, sigmoid': Case(('sigmoid_focal_loss_forward', 'sigmoid_focal_loss_backward'),
                                _focal('sigmoid_focal_loss')),
    'focal loss, softmax': Case(('softmax_focal_loss_forward', 'softmax_focal_loss_backward'),
                                _focal('softmax_focal_loss')),
    'overlaps': Case(('bbox_overlaps',), _overlaps('bbox_overlaps',
                                                   lambda s: s.boxes(2000, 800, 1344, 96))),
    'overlaps, rotated': Case(('box_iou_rotated',), _overlaps('box_iou_rotated',
                                                              lambda s: s.rotated(500))),
    'overlaps, quadrilaterals': Case(('box_iou_quadri',), _overlaps(
        'box_iou_quadri', lambda s: _quads(s.boxes(500, 800, 1344, 96)))),
    'overlaps, differentiable': Case(('diff_iou_rotated_sort_vertices_forward',), _diff_iou),
    'points in polygons': Case(('points_in_polygons_forward',), _points_in_polygons),
    'least rectangles': Case(('min_area_polygons',), _min_area),
    'convex IoU': Case(('convex_iou',), _convex('convex_iou')),
    'convex GIoU': Case(('convex_giou',), _convex('convex_giou')),
    'active rotated filter': Case(('active_rotated_filter_forward',
                                   'active_rotated_filter_backward'), _active_rotated_filter),
    'masked convolution': Case(('masked_im2col_forward', 'masked_col2im_forward'), _masked_conv),
    'SyncBN': Case(('sync_bn_forward_mean', 'sync_bn_forward_var', 'sync_bn_forward_output',
                    'sync_bn_backward_param', 'sync_bn_backward_data'), _sync_bn),
}
