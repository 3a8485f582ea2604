"""Cases of mmcv's operators: calls of mmcv's own Python.

The inputs of the check have the most write conflicts: boxes overlap in three locations, offsets
move samples together, and attention samples few points.
"""
from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES', 'carafe', 'deform_conv', 'deform_roi_pool', 'focal_loss', 'masked_conv',
           'ms_deform_attn', 'nms', 'nms_match', 'roi_align', 'roi_pool', 'soft_nms', 'sync_bn']

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
    'RoIPool': _case(_pair('roi_pool'), roi_pool),
    'DeformRoIPool': _case(_pair('deform_roi_pool'), deform_roi_pool),
    'DCNv1': _case(('deform_conv_forward', 'deform_conv_backward_input',
                    'deform_conv_backward_parameters'), deform_conv),
    'DCNv2': _case(_pair('modulated_deform_conv'), deform_conv, modulated=True),
    'MSDeformAttn': _case(_pair('ms_deform_attn'), ms_deform_attn),
    'CARAFE': _case(_pair('carafe'), carafe),
    'NMS': _case(('nms',), nms),
    'Soft-NMS': _case(('softnms',), soft_nms),
    'NMS, groups': _case(('nms_match',), nms_match),
    'focal loss, sigmoid': _case(_pair('sigmoid_focal_loss'), focal_loss),
    'masked convolution': _case(('masked_im2col_forward', 'masked_col2im_forward'), masked_conv),
    'SyncBN': _case(('sync_bn_forward_mean', 'sync_bn_forward_var', 'sync_bn_forward_output',
                     'sync_bn_backward_param', 'sync_bn_backward_data'), sync_bn),
}
