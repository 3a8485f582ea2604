"""Cases of mmcv's operators: calls of mmcv's own Python.

The inputs of the check have the most write conflicts: boxes overlap in three locations, offsets
move samples together, and attention samples few points.
"""
from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES', 'active_rotated_filter', 'bezier_align', 'carafe', 'contour_expand',
           'deform_conv', 'deform_roi_pool', 'focal_loss', 'masked_conv', 'ms_deform_attn', 'nms',
           'nms_match', 'nms_quadri', 'nms_rotated', 'overlaps', 'pixel_group', 'points_in_boxes',
           'psa_mask', 'quads', 'roi_align', 'roi_align_rotated', 'roi_pool',
           'rotated_feature_align', 'soft_nms', 'sync_bn', 'voxelization']

_STRIDE = 8


def _op(name: str) -> Callable[..., Any]:
    """Return a function of ``mmcv.ops``, looked up when it is called."""
    import mmcv.ops
    found = mmcv.ops
    for part in name.split('.'):
        found = getattr(found, part)
    return found


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


def deform_roi_pool(s: Inputs) -> OperatorCall:
    rois = s.rois()
    return OperatorCall(dict(feature=_map(s), offset=s.normal(len(rois), 2, 7, 7)), dict(rois=rois),
                        lambda feature, offset, rois: _op('deform_roi_pool')(
                       feature, rois, offset, 7, 1 / _STRIDE, 2, 0.1))


def roi_align_rotated(s: Inputs, ratio: int = 2) -> OperatorCall:
    boxes = s.rotated(512)
    rois = torch.cat((torch.zeros(len(boxes), 1), boxes), 1)
    return OperatorCall(dict(feature=_map(s)), dict(rois=rois),
                        lambda feature, rois: _op('roi_align_rotated')(
                            feature, rois, 7, 1 / _STRIDE, ratio, True))


def bezier_align(s: Inputs) -> OperatorCall:
    boxes = s.boxes(128, 800, 1344, 96)
    x1, y1, x2, y2 = boxes.unbind(1)
    share = torch.linspace(0, 1, 4)
    across = x1[:, None] + (x2 - x1)[:, None] * share
    upper = torch.stack((across, y1[:, None] + s.uniform(len(boxes), 4)), -1)
    lower = torch.stack((across.flip(1), y2[:, None] + s.uniform(len(boxes), 4)), -1)
    rois = torch.cat((torch.zeros(len(boxes), 1), upper.flatten(1), lower.flatten(1)), 1)
    return OperatorCall(dict(feature=_map(s)), dict(rois=rois),
                        lambda feature, rois: _op('bezier_align')(
                            feature, rois, (8, 32), 1 / _STRIDE, 2))


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


def active_rotated_filter(s: Inputs) -> OperatorCall:
    filters = s.channels(256) // 8
    orientations, rotations, size = 8, 8, 9
    ordinal = torch.arange(orientations)[:, None, None]
    turn = torch.arange(rotations)
    # every rotation shifts the orientations and the entries around the middle of a filter
    entry = (torch.arange(size)[None, :, None] + turn * 2) % size
    target = ((ordinal + turn) % orientations) * size + entry
    indices = (target + 1).int().view(orientations, 3, 3, rotations)
    weight = s.normal(filters, filters, orientations, 3, 3)
    return OperatorCall(dict(weight=weight), dict(indices=indices),
                        lambda weight, indices: _op('active_rotated_filter')(weight, indices))


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


def carafe(s: Inputs) -> OperatorCall:
    feature = s.feature(256, 50, 84)
    h, w = feature.shape[2:]
    return OperatorCall(dict(feature=feature, masks=s.uniform(1, 25, 2 * h, 2 * w)), {},
                        lambda feature, masks: _op('carafe')(feature, masks, 5, 1, 2))


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


def nms_quadri(s: Inputs, number: int = 1000) -> OperatorCall:
    boxes = quads(s.boxes(number, 800, 1344, 96))
    return OperatorCall({}, dict(boxes=boxes, scores=s.scores(len(boxes))),
                        lambda boxes, scores: _op('nms_quadri')(boxes, scores, 0.5), double=False)


def overlaps(s: Inputs, name: str, boxes: Callable[[Inputs], Tensor],
             others: Callable[[Inputs], Tensor] | None = None, **options: Any) -> OperatorCall:
    return OperatorCall({}, dict(a=boxes(s), b=(others or boxes)(s)),
                        lambda a, b: _op(name)(a, b, **options), double=name == 'bbox_overlaps')


def _kernels(s: Inputs, height: int, width: int, step: int = 8) -> tuple[Tensor, int]:
    """Return labels of text kernels of 2 x 2 pixels on a grid (H, W) int32, and how many."""
    labels = torch.zeros(s.count(height), s.count(width), dtype=torch.int32)
    number = 0
    for row in range(1, len(labels) - 2, step):
        for column in range(1, labels.shape[1] - 2, step):
            number += 1
            labels[row:row + 2, column:column + 2] = number
    return labels, number


def contour_expand(s: Inputs, height: int = 640, width: int = 640) -> OperatorCall:
    labels, number = _kernels(s, height, width)
    masks = (s.uniform(7, *labels.shape) > 0.2).to(torch.uint8)
    # mmcv runs it on the CPU whatever the device
    return OperatorCall({}, dict(masks=masks, labels=labels), lambda masks, labels: torch.tensor(
        _op('contour_expand')(masks.cpu(), labels.cpu(), 1, number)), double=False)


def pixel_group(s: Inputs, height: int = 640, width: int = 640) -> OperatorCall:
    labels, number = _kernels(s, height, width)
    contour = torch.zeros_like(labels, dtype=torch.uint8)
    contour[labels > 0] = 255
    fixed = dict(score=s.uniform(*labels.shape), mask=s.uniform(*labels.shape) > 0.2,
                 embedding=s.uniform(*labels.shape, 4) * 0.5, labels=labels, contour=contour)
    # mmcv runs it on the CPU whatever the device
    return OperatorCall({}, fixed, lambda score, mask, embedding, labels, contour: _op(
        'pixel_group')(score.cpu(), mask.cpu(), embedding.cpu(), labels.cpu(), contour.cpu(),
                       number + 1, 0.8), double=False)


def psa_mask(s: Inputs, kind: str, height: int = 60, width: int = 60) -> OperatorCall:
    height, width = s.count(height), s.count(width)
    size = 2 * height - 1, 2 * width - 1
    return OperatorCall(dict(masks=s.normal(1, size[0] * size[1], height, width)), {},
                        lambda masks: _op('PSAMask')(kind, size)(masks))


def _cloud(s: Inputs, number: int) -> Tensor:
    """Return (N, 4) points x, y, z and one more value; several in a voxel, some out of range."""
    return s.uniform(s.count(number), 4) * torch.tensor([72., 84, 5, 1]) - torch.tensor(
        [1., 42, 3.5, 0])


def voxelization(s: Inputs, limit: int, number: int = 20000) -> OperatorCall:
    most = -1 if limit == -1 else s.count(limit)
    depth = -1 if limit == -1 else 3
    return OperatorCall({}, dict(points=_cloud(s, number)), lambda points: _op('voxelization')(
        points, [1.6, 1.6, 4.], [0, -40, -3, 70.4, 40, 1], depth, most), double=False)


def points_in_boxes(s: Inputs, number: int = 20000, boxes: int = 100) -> OperatorCall:
    points = _cloud(s, number)[None, :, :3]
    count = s.count(boxes)
    size = torch.cat((s.uniform(count, 3) * 8 + 1, s.uniform(count, 1) * 6 - 3), 1)
    boxes_3d = torch.cat((points[0, :count], size), 1)[None]
    return OperatorCall({}, dict(points=points, boxes=boxes_3d),
                        lambda points, boxes: _op('points_in_boxes_cpu')(points, boxes),
                        double=False)


def focal_loss(s: Inputs, rows: int = 20000) -> OperatorCall:
    rows = s.count(rows)
    return OperatorCall(dict(logits=s.normal(rows, 80)), dict(labels=torch.arange(rows) % 81),
                        lambda logits, labels: _op('sigmoid_focal_loss')(
                            logits, labels, 2., .25, None, 'mean'))


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
    'DeformRoIPool': _case(_pair('deform_roi_pool'), deform_roi_pool),
    'RoIAlignRotated': _case(_pair('roi_align_rotated'), roi_align_rotated),
    'BezierAlign': _case(_pair('bezier_align'), bezier_align),
    'RotatedFeatureAlign': _case(_pair('rotated_feature_align'), rotated_feature_align),
    'rotated filters': _case(_pair('active_rotated_filter'), active_rotated_filter),
    'DCNv1': _case(('deform_conv_forward', 'deform_conv_backward_input',
                    'deform_conv_backward_parameters'), deform_conv),
    'DCNv2': _case(_pair('modulated_deform_conv'), deform_conv, modulated=True),
    'MSDeformAttn': _case(_pair('ms_deform_attn'), ms_deform_attn),
    'CARAFE': _case(_pair('carafe'), carafe),
    'NMS': _case(('nms',), nms),
    'Soft-NMS': _case(('softnms',), soft_nms),
    'NMS, groups': _case(('nms_match',), nms_match),
    'NMS, rotated': _case(('nms_rotated',), nms_rotated),
    'NMS, quadrilaterals': _case(('nms_quadri',), nms_quadri),
    'overlaps': _case(('bbox_overlaps',), overlaps, 'bbox_overlaps',
                      lambda s: s.boxes(2000, 800, 1344, 96)),
    'overlaps, rotated': _case(('box_iou_rotated',), overlaps, 'box_iou_rotated',
                               lambda s: s.rotated(500)),
    'overlaps, quadrilaterals': _case(('box_iou_quadri',), overlaps, 'box_iou_quadri',
                                      lambda s: quads(s.boxes(500, 800, 1344, 96))),
    'text regions, PSENet': _case(('contour_expand',), contour_expand),
    'text regions, PAN': _case(('pixel_group',), pixel_group),
    'PSAMask, collect': _case(('psamask_forward', 'psamask_backward'), psa_mask, 'collect'),
    'PSAMask, distribute': _case(('psamask_forward', 'psamask_backward'), psa_mask, 'distribute'),
    'voxels': _case(('hard_voxelize_forward',), voxelization, 1000),
    'voxel of each point': _case(('dynamic_voxelize_forward',), voxelization, -1),
    'points in boxes': _case(('points_in_boxes_cpu_forward',), points_in_boxes),
    'focal loss, sigmoid': _case(_pair('sigmoid_focal_loss'), focal_loss),
    'masked convolution': _case(('masked_im2col_forward', 'masked_col2im_forward'), masked_conv),
    'SyncBN': _case(('sync_bn_forward_mean', 'sync_bn_forward_var', 'sync_bn_forward_output',
                     'sync_bn_backward_param', 'sync_bn_backward_data'), sync_bn),
}
