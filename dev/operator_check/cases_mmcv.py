"""Cases of mmcv's operators: calls of mmcv's own Python.

The inputs of the check have the most write conflicts: boxes overlap in three locations, offsets
move samples together, and attention samples few points.
"""
from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from mmrepro.ops.operator_table import implementation

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES', 'active_rotated_filter', 'bezier_align', 'border_align', 'carafe',
           'deform_conv', 'deform_roi_pool', 'focal_loss', 'lanes', 'line_nms', 'masked_conv',
           'ms_deform_attn', 'nms', 'nms_match', 'nms_rotated', 'overlaps', 'prroi_pool', 'quads',
           'roi_align', 'roi_pool', 'rotated_feature_align', 'rotated_roi_align', 'soft_nms',
           'sync_bn']

_STRIDE = 8


def _op(name: str) -> Callable[..., Any]:
    """A function of ``mmcv.ops``, looked up when it is called."""
    import mmcv.ops
    found = mmcv.ops
    for part in name.split('.'):
        found = getattr(found, part)
    return found


def _extension(name: str) -> Callable[..., Any]:
    """A function of ``mmcv._ext``, or mmrepro's where this mmcv does not know it."""
    import mmcv._ext
    found = getattr(mmcv._ext, name, None)
    return found or implementation(name)


def _map(s: Inputs, stride: int = _STRIDE) -> Tensor:
    return s.feature(256, 800 // stride, 1344 // stride)


def roi_align(s: Inputs, mode: str = 'avg', ratio: int = 0, number: int = 512,
              stride: int = _STRIDE, bins: int = 7) -> OperatorCall:
    return OperatorCall(dict(feature=_map(s, stride)), dict(rois=s.rois(number)),
                        lambda feature, rois: _op('roi_align')(feature, rois, bins, 1 / stride,
                                                               ratio, mode, True))


def roi_pool(s: Inputs) -> OperatorCall:
    return OperatorCall(dict(feature=_map(s)), dict(rois=s.rois()),
                        lambda feature, rois: _op('roi_pool')(feature, rois, 7, 1 / _STRIDE))


def prroi_pool(s: Inputs) -> OperatorCall:
    return OperatorCall(dict(feature=_map(s), rois=s.rois()), {},
                        lambda feature, rois: _op('prroi_pool')(feature, rois, (7, 7), 1 / _STRIDE),
                        double=False)


def deform_roi_pool(s: Inputs) -> OperatorCall:
    rois = s.rois()
    return OperatorCall(dict(feature=_map(s), offset=s.normal(len(rois), 2, 7, 7)), dict(rois=rois),
                        lambda feature, offset, rois: _op('deform_roi_pool')(
                       feature, rois, offset, 7, 1 / _STRIDE, 2, 0.1))


def rotated_roi_align(s: Inputs, name: str, *arguments: Any) -> OperatorCall:
    boxes = s.rotated(512)
    rois = torch.cat((torch.zeros(len(boxes), 1), boxes), 1)
    return OperatorCall(dict(feature=_map(s)), dict(rois=rois),
                        lambda feature, rois: _op(name)(feature, rois, *arguments))


def rotated_feature_align(s: Inputs) -> OperatorCall:
    feature = _map(s)
    pixels = feature[0, 0].numel()
    # mmcv reads y before x, so the centres are inside the map in either order
    middle = min(feature.shape[2:]) * _STRIDE / 2
    boxes = torch.cat((middle + s.normal(pixels, 2) * 2, 30 + s.uniform(pixels, 2) * middle / 4,
                       s.uniform(pixels, 1)), 1)
    return OperatorCall(dict(feature=feature), dict(boxes=boxes.view(1, *feature.shape[2:], 5)),
                        lambda feature, boxes: _op('rotated_feature_align')(feature, boxes,
                                                                            1 / _STRIDE, 5))


def bezier_align(s: Inputs, number: int = 128) -> OperatorCall:
    boxes = s.boxes(number, 800, 1344, 150)
    x = torch.stack([boxes[:, 0] + (boxes[:, 2] - boxes[:, 0]) * i / 3 for i in range(4)], 1)
    upper = torch.stack((x, boxes[:, 1:2].expand_as(x)), -1)
    lower = torch.stack((x.flip(1), boxes[:, 3:].expand_as(x)), -1)
    rois = torch.cat((torch.zeros(len(boxes), 1), torch.cat((upper, lower), 1).flatten(1)), 1)
    return OperatorCall(dict(feature=_map(s)), dict(rois=rois),
                        lambda feature, rois: _op('bezier_align')(
                            feature, rois, (8, 32), 1 / _STRIDE, 2, True))


def border_align(s: Inputs, channels: int = 256) -> OperatorCall:
    feature = s.feature(channels, 50, 84)
    number, size = feature[0, 0].numel(), min(feature.shape[2:])
    corner = s.uniform(1, number, 2) * size / 4
    boxes = torch.cat((corner, corner + 1 + s.uniform(1, number, 2) * size / 4), 2)
    return OperatorCall(dict(feature=feature), dict(boxes=boxes),
                        lambda feature, boxes: _op('border_align')(feature, boxes, 10))


def deform_conv(s: Inputs, modulated: bool = False, channels: int = 256, height: int = 50,
                width: int = 84, groups: int = 1, deform_groups: int = 1) -> OperatorCall:
    feature = s.feature(channels, height, width)
    channels, size = feature.shape[1], feature.shape[2:]
    leaves = dict(feature=feature, offset=s.normal(1, deform_groups * 18, *size) * 3,
                  weight=s.normal(channels, channels // groups, 3, 3) * 0.05)
    options = 1, 1, 1, groups, deform_groups
    if not modulated:
        return OperatorCall(leaves, {}, lambda feature, offset, weight: _op('deform_conv2d')(
            feature, offset, weight, *options))
    leaves.update(mask=s.uniform(1, deform_groups * 9, *size), bias=s.normal(channels))
    return OperatorCall(leaves, {}, lambda feature, offset, mask, weight, bias: _op(
        'modulated_deform_conv2d')(feature, offset, mask, weight, bias, *options))


def _four_centres(s: Inputs, shapes: Tensor) -> Tensor:
    return s.uniform(4, 2)[torch.arange(int(shapes.prod(1).sum())) % 4]


def ms_deform_attn(s: Inputs, centres_of: Callable[[Inputs, Tensor], Tensor] = _four_centres
                   ) -> OperatorCall:
    """``centres_of``: the centres (Q, 2) of the queries, x and y from 0 to 1, given all shapes."""
    shapes = torch.tensor([[s.count(h), s.count(w)]
                           for h, w in ((100, 168), (50, 84), (25, 42), (13, 21))])
    areas = shapes.prod(1)
    value = s.normal(1, int(areas.sum()), 8, 32)
    centres = centres_of(s, shapes)
    step = s.normal(1, len(centres), 8, 4, 4, 2) * 2 / shapes.flip(1)[:, None]
    leaves = dict(value=value, where=centres[None, :, None, None, None] + step,
                  weights=s.uniform(1, len(centres), 8, 4, 4))
    return OperatorCall(leaves, dict(shapes=shapes, starts=areas.cumsum(0) - areas),
                        lambda value, where, weights, shapes, starts: _op(
                            'multi_scale_deform_attn.MultiScaleDeformableAttnFunction').apply(
                                value, shapes, starts, where, weights, 64))


def carafe(s: Inputs, name: str = 'carafe') -> OperatorCall:
    feature = s.feature(256, 50, 84)
    h, w = feature.shape[2:]

    def run(feature: Tensor, masks: Tensor) -> Tensor:
        # mmcv refuses the backward of its naive form on a CPU; both compute the same
        return _op(name if feature.is_cuda else 'carafe')(feature, masks, 5, 1, 2)

    return OperatorCall(dict(feature=feature, masks=s.uniform(1, 25, 2 * h, 2 * w)), {}, run)


Scored = Callable[[Inputs, int], dict[str, Tensor]]


def _scored(s: Inputs, number: int) -> dict[str, Tensor]:
    boxes = s.boxes(number, 800, 1344, 96)
    return dict(boxes=boxes, scores=s.scores(len(boxes)))


def nms(s: Inputs, number: int = 2000, scored: Scored = _scored,
        threshold: float = 0.5) -> OperatorCall:
    return OperatorCall({}, scored(s, number),
                        lambda boxes, scores: _op('nms')(boxes, scores, threshold), double=False)


def soft_nms(s: Inputs, number: int = 400, scored: Scored = _scored,
             method: str = 'linear') -> OperatorCall:
    # mmcv runs it on the CPU whatever the device
    return OperatorCall({}, scored(s, number), lambda boxes, scores: _op('soft_nms')(
        boxes.cpu(), scores.cpu(), method=method), double=False)


def nms_match(s: Inputs, number: int = 400, scored: Scored = _scored,
              threshold: float = 0.5) -> OperatorCall:
    return OperatorCall({}, scored(s, number), lambda boxes, scores: _op('nms_match')(
        torch.cat((boxes, scores[:, None]), 1), threshold), double=False)


def nms_rotated(s: Inputs, number: int = 1000, threshold: float = 0.5) -> OperatorCall:
    boxes = s.rotated(number)
    return OperatorCall({}, dict(boxes=boxes, scores=s.scores(len(boxes))),
                        lambda boxes, scores: _op('nms_rotated')(boxes, scores, threshold),
                        double=False)


def quads(boxes: Tensor) -> Tensor:
    """Axis-aligned boxes (K, 4) as quadrilaterals (K, 8)."""
    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack((x1, y1, x2, y1, x2, y2, x1, y2), 1)


def nms_quadri(s: Inputs) -> OperatorCall:
    boxes = quads(s.boxes(1000, 800, 1344, 96))
    return OperatorCall({}, dict(boxes=boxes, scores=s.scores(len(boxes))),
                        lambda boxes, scores: _op('nms_quadri')(boxes, scores, 0.5), double=False)


def lanes(s: Inputs, number: int) -> Tensor:
    """(K, 77) lanes, most of them near one of four."""
    number = s.count(number)
    start, slope = s.uniform(number, 1) * .4, (torch.arange(number) % 4)[:, None] * 2.
    xs = 100 * slope + slope * torch.arange(72) + s.normal(number, 72) * 8
    return torch.cat((s.uniform(number, 2), start, s.uniform(number, 1), 60 * (1 - start), xs), 1)


def line_nms(s: Inputs, number: int = 1000) -> OperatorCall:
    boxes = lanes(s, number)
    return OperatorCall({}, dict(boxes=boxes, scores=s.scores(len(boxes))), lambda boxes, scores:
                        _extension('line_nms_forward')(boxes, scores, 20., 50), double=False)


def focal_loss(s: Inputs, kind: str, rows: int = 20000) -> OperatorCall:
    rows = s.count(rows)
    classes = 81 if kind == 'sigmoid' else 80  # only the former has a background
    return OperatorCall(dict(logits=s.normal(rows, 80)), dict(labels=torch.arange(rows) % classes),
                        lambda logits, labels: _op(f'{kind}_focal_loss')(
                            logits, labels, 2., .25, None, 'mean'))


def overlaps(s: Inputs, name: str, boxes: Callable[[Inputs], Tensor],
             others: Callable[[Inputs], Tensor] | None = None, **options: Any) -> OperatorCall:
    return OperatorCall({}, dict(a=boxes(s), b=(others or boxes)(s)),
                        lambda a, b: _op(name)(a, b, **options), double=name == 'bbox_overlaps')


def diff_iou(s: Inputs) -> OperatorCall:
    boxes = s.rotated(1000)
    return OperatorCall(dict(a=boxes[None]), dict(b=boxes[None] + s.normal(1, len(boxes), 5)),
                        lambda a, b: _op('diff_iou_rotated_2d')(a, b), double=False)


def points_in_polygons(s: Inputs) -> OperatorCall:
    return OperatorCall({}, dict(points=s.uniform(s.count(5000), 2) * 800 / s.by,
                                 polygons=quads(s.boxes(200, 800, 1344, 96))),
                        lambda points, polygons: _op('points_in_polygons')(points, polygons),
                        double=False)


def _point_sets(s: Inputs, number: int) -> Tensor:
    boxes = s.boxes(number, 800, 1344, 96)
    size = boxes[:, None, 2:] - boxes[:, None, :2] + 1
    return (boxes[:, None, :2] + s.uniform(len(boxes), 9, 2) * size).flatten(1)


def min_area(s: Inputs) -> OperatorCall:
    return OperatorCall({}, dict(sets=_point_sets(s, 1000)),
                        lambda sets: _op('min_area_polygons')(sets), double=False)


def convex(s: Inputs, name: str, number: int) -> OperatorCall:
    return OperatorCall({}, dict(sets=_point_sets(s, 800),
                                 quads=quads(s.boxes(number, 800, 1344, 96))),
                        lambda sets, quads: _op(name)(sets, quads), double=False)


def active_rotated_filter(s: Inputs, outputs: int = 256) -> OperatorCall:
    indices = torch.stack([torch.stack([torch.randperm(9, generator=s.random) + 1
                                        for _ in range(8)], -1).view(3, 3, 8)
                           for _ in range(8)])
    weight = s.normal(s.channels(outputs), s.channels(256) // 8, 8, 3, 3)
    order = (indices - 1) + 9 * torch.arange(8).view(8, 1, 1, 1) + 1
    return OperatorCall(dict(weight=weight), dict(indices=order.int().contiguous()),
                        lambda weight, indices: _op('active_rotated_filter')(weight, indices))


def masked_conv(s: Inputs, height: int = 100, width: int = 168, share: float = 0.3
                ) -> OperatorCall:
    feature = s.feature(256, height, width)
    channels = feature.shape[1]
    mask = (s.uniform(1, *feature.shape[2:]) > 1 - share).float()
    return OperatorCall({}, dict(feature=feature, mask=mask, bias=s.normal(channels),
                                 weight=s.normal(channels, channels, 3, 3)),
                        lambda feature, mask, weight, bias: _op('masked_conv2d')(
                            feature, mask, weight, bias, 1))


def sync_bn(s: Inputs, height: int = 100, width: int = 168) -> OperatorCall:
    feature = s.feature(256, height, width, batch=2)
    channels = feature.shape[1]
    fixed = dict(mean=torch.zeros(channels), var=torch.ones(channels))
    leaves = dict(feature=feature, weight=s.normal(channels), bias=s.normal(channels))
    return OperatorCall(leaves, fixed,
                        lambda feature, weight, bias, mean, var: _op(
                       'sync_bn.SyncBatchNormFunction').apply(
                           feature, mean.clone(), var.clone(), weight, bias, 0.1, 1e-5, None, 1,
                           'default'), double=False)


def psa_mask(s: Inputs, kind: int) -> OperatorCall:
    height, width = s.count(60), s.count(60)
    size = 2 * height - 1, 2 * width - 1
    return OperatorCall(dict(masks=s.normal(1, size[0] * size[1], height, width)), {},
                        lambda masks: _op('psa_mask.psa_mask')(masks, kind, size))


def tin_shift(s: Inputs) -> OperatorCall:
    channels = s.channels(256)
    shift = torch.randint(-3, 4, (4, 4), generator=s.random, dtype=torch.int32)
    return OperatorCall(dict(frames=s.normal(4, 8, channels, s.count(784))), dict(shift=shift),
                        lambda frames, shift: _op('tin_shift')(frames, shift), double=False)


def chamfer_distance(s: Inputs) -> OperatorCall:
    """Points of RepPoints, many of them nearest to the same ones."""
    sets = (s.normal(s.count(2000), number, 2) * 40 for number in (9, 36))
    return OperatorCall(dict(zip(('one', 'two'), sets)), {},
                        lambda one, two: _op('chamfer_distance')(one, two)[:2])


def text_regions(s: Inputs, name: str) -> OperatorCall:
    """On the CPU, where mmcv's Python asks for them."""
    height, width = s.count(640), s.count(640)
    labels = (s.uniform(height, width) * 300 - 294).clamp_(min=0).int()
    mask = s.uniform(4, height, width) < .7
    if name == 'contour_expand':
        return OperatorCall({}, {}, lambda: [torch.tensor(_op(name)(
            mask.byte(), labels, 0, 6))], double=False)
    values = s.uniform(height, width), s.normal(height, width, 4)
    return OperatorCall({}, {}, lambda: [torch.tensor(region) for region in _op(name)(
        values[0], mask[0], values[1], labels, mask[1].byte(), 7, 3.)], double=False)


def _pair(name: str) -> tuple[str, str]:
    return f'{name}_forward', f'{name}_backward'


def _case(covers: tuple[str, ...], make: Callable[..., OperatorCall], *args: Any,
          **kwargs: Any) -> OperatorCase:
    return OperatorCase(covers, lambda s: make(s, *args, **kwargs))


CASES: dict[str, OperatorCase] = {
    'RoIAlign': _case(_pair('roi_align'), roi_align),
    'RoIAlign, sampling_ratio 2': _case(_pair('roi_align'), roi_align, ratio=2),
    'RoIAlign, max': _case(_pair('roi_align'), roi_align, 'max', ratio=2),
    'RoIPool': _case(_pair('roi_pool'), roi_pool),
    'PrRoIPool': _case((*_pair('prroi_pool'), 'prroi_pool_coor_backward'), prroi_pool),
    'DeformRoIPool': _case(_pair('deform_roi_pool'), deform_roi_pool),
    'RoIAlignRotated': _case(_pair('roi_align_rotated'), rotated_roi_align, 'roi_align_rotated',
                             7, 1 / _STRIDE, 2, True),
    'RiRoIAlignRotated': _case(_pair('riroi_align_rotated'), rotated_roi_align,
                               'riroi_align_rotated', (7, 7), 1 / _STRIDE, 2, 8),
    'RotatedFeatureAlign': _case(_pair('rotated_feature_align'), rotated_feature_align),
    'BezierAlign': _case(_pair('bezier_align'), bezier_align),
    'BorderAlign': _case(_pair('border_align'), border_align),
    'DCNv1': _case(('deform_conv_forward', 'deform_conv_backward_input',
                    'deform_conv_backward_parameters'), deform_conv),
    'DCNv2': _case(_pair('modulated_deform_conv'), deform_conv, modulated=True),
    'MSDeformAttn': _case(_pair('ms_deform_attn'), ms_deform_attn),
    'CARAFE': _case(_pair('carafe'), carafe),
    'CARAFENaive': _case(_pair('carafe_naive'), carafe, 'carafe_naive'),
    'NMS': _case(('nms',), nms),
    'Soft-NMS': _case(('softnms',), soft_nms),
    'NMS, groups': _case(('nms_match',), nms_match),
    'NMS, rotated': _case(('nms_rotated',), nms_rotated),
    'NMS, quadrilaterals': _case(('nms_quadri',), nms_quadri),
    'NMS, lanes': _case(('line_nms_forward',), line_nms),
    'focal loss, sigmoid': _case(_pair('sigmoid_focal_loss'), focal_loss, 'sigmoid'),
    'focal loss, softmax': _case(_pair('softmax_focal_loss'), focal_loss, 'softmax'),
    'overlaps': _case(('bbox_overlaps',), overlaps, 'bbox_overlaps',
                      lambda s: s.boxes(2000, 800, 1344, 96)),
    'overlaps, rotated': _case(('box_iou_rotated',), overlaps, 'box_iou_rotated',
                               lambda s: s.rotated(500)),
    'overlaps, quadrilaterals': _case(('box_iou_quadri',), overlaps, 'box_iou_quadri',
                                      lambda s: quads(s.boxes(500, 800, 1344, 96))),
    'overlaps, differentiable': _case(('diff_iou_rotated_sort_vertices_forward',), diff_iou),
    'points in polygons': _case(('points_in_polygons_forward',), points_in_polygons),
    'least rectangles': _case(('min_area_polygons',), min_area),
    'convex IoU': _case(('convex_iou',), convex, 'convex_iou', 100),
    'convex GIoU': _case(('convex_giou',), convex, 'convex_giou', 800),
    'active rotated filter': _case(_pair('active_rotated_filter'), active_rotated_filter),
    'masked convolution': _case(('masked_im2col_forward', 'masked_col2im_forward'), masked_conv),
    'PSAMask, collect': _case(('psamask_forward', 'psamask_backward'), psa_mask, 0),
    'PSAMask, distribute': _case(('psamask_forward', 'psamask_backward'), psa_mask, 1),
    'TIN shift': _case(_pair('tin_shift'), tin_shift),
    'chamfer distance': _case(_pair('chamfer_distance'), chamfer_distance),
    'text contours': _case(('contour_expand',), text_regions, 'contour_expand'),
    'text pixels': _case(('pixel_group',), text_regions, 'pixel_group'),
    'SyncBN': _case(('sync_bn_forward_mean', 'sync_bn_forward_var', 'sync_bn_forward_output',
                     'sync_bn_backward_param', 'sync_bn_backward_data'), sync_bn),
}
