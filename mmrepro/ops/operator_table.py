"""The table of mmcv's operators: one row per name that mmcv imports from ``mmcv._ext``.

A row names mmrepro's function, the file of ``mmcv/ops`` that calls it (and so defines its
signature), the reason why mmrepro's form is deterministic, what mmcv's CUDA kernel does, and the
detectors that use it. To implement an operator, write a function of that name in the family's
module. An operator without an implementation imports, and raises when it is called. To add an
operator, add its name to a family.

This module imports the standard library only.
"""
from __future__ import annotations

import importlib
from typing import Any, Callable, NamedTuple

# Why mmrepro's form is deterministic. Each family names one of these reasons.
OWN_SUM = 'every output is one sum over its own sources, in a fixed order; nothing is added twice'
SORTED = 'sources are sorted by destination (stable), then every destination is one ordered sum'
ELEMENT = 'every output element depends on its own inputs only'
ORDERED = 'ties are broken by index, candidates are visited in a fixed order'
DENSE = 'dense torch reductions, which are ordered'
NONE = 'no implementation in PyTorch'


class OperatorRow(NamedTuple):
    """One operator."""

    name: str
    target: str  # 'module:function', or '' without an implementation
    source: str
    why: str
    # mmcv's CUDA kernel: 'ordered', 'atomics' if it adds as threads arrive, 'races' if threads of
    # several warps write to shared memory as they arrive, 'host' if there is none
    compiled: str
    users: str


Rows = list[OperatorRow]


def _family(module: str, source: str, why: str, compiled: str, users: str, *names: str) -> Rows:
    """Return operators that share a module; without one, they import, and raise when called."""
    # the package has another name where mmrepro is not imported: see _mmrepro_operators.py
    path = module if '.' in module else f'{__package__}.mmcv.{module}'
    return [OperatorRow(name, f'{path}:{name}' if module else '', source, why, compiled, users)
            for name in names]


def _pair(module: str, source: str, forward: str, users: str, name: str) -> Rows:
    """Return a forward for the reason ``forward`` and a backward that sorts, unlike mmcv's."""
    return [*_family(module, source, forward, 'ordered', users, f'{name}_forward'),
            *_family(module, source, SORTED, 'atomics', users, f'{name}_backward')]


def _missing(source: str, compiled: str, users: str, *names: str) -> Rows:
    return _family('', source, NONE, compiled, users, *names)


def _missing_pair(source: str, users: str, name: str) -> Rows:
    return [*_missing(source, 'ordered', users, f'{name}_forward'),
            *_missing(source, 'atomics', users, f'{name}_backward')]


_FAMILIES: tuple[Rows, ...] = (
    _family('roi_align', 'roi_align.py', OWN_SUM, 'ordered',
            'every two-stage detector; mask targets of all instance heads', 'roi_align_forward'),
    _family('roi_align', 'roi_align.py', SORTED, 'atomics', 'every two-stage detector',
            'roi_align_backward'),
    _pair('roi_pool', 'roi_pool.py', ORDERED, 'Fast R-CNN style heads that ask for RoIPool',
          'roi_pool'),
    _pair('deform_roi_pool', 'deform_roi_pool.py', OWN_SUM, 'dpool configs of dcn and dcnv2',
          'deform_roi_pool'),
    _family('deform_conv', 'deform_conv.py', OWN_SUM, 'ordered',
            'DCN, RepPoints, VFNet, TOOD, Cascade RPN, Guided Anchoring, FoveaBox, SAConv2d',
            'deform_conv_forward', 'deform_conv_backward_parameters'),
    _family('deform_conv', 'deform_conv.py', SORTED, 'atomics',
            'DCN, RepPoints, VFNet, TOOD, Cascade RPN, Guided Anchoring, FoveaBox, SAConv2d',
            'deform_conv_backward_input'),
    _pair('deform_conv', 'modulated_deform_conv.py', OWN_SUM,
          'DCNv2, DyHead, GLIP, SOLOv2 and FCOS with DCN, CenterNet', 'modulated_deform_conv'),
    _pair('ms_deform_attn', 'multi_scale_deform_attn.py', OWN_SUM,
          'Deformable DETR, DINO, DDQ, Grounding DINO, Mask2Former', 'ms_deform_attn'),
    _family('carafe', 'carafe.py', OWN_SUM, 'ordered', 'FPN_CARAFE, mask heads with CARAFE',
            'carafe_forward', 'carafe_backward'),
    _family('nms', 'nms.py', ORDERED, 'ordered',
            'every detector at inference, RPN and Cascade RPN in training', 'nms'),
    _family('soft_nms', 'nms.py', ORDERED, 'host',
            'CornerNet, CentripetalNet, soft-NMS test configs', 'softnms'),
    _family('nms', 'nms.py', ORDERED, 'host', 'PISA', 'nms_match'),
    _family('focal_loss', 'focal_loss.py', ELEMENT, 'ordered',
            'RetinaNet, FCOS, ATSS, Deformable DETR and every other user of FocalLoss',
            'sigmoid_focal_loss_forward', 'sigmoid_focal_loss_backward'),
    _family('masked_conv', 'masked_conv.py', ELEMENT, 'ordered',
            'Guided Anchoring heads at inference', 'masked_im2col_forward',
            'masked_col2im_forward'),
    _family('batch_norm', 'sync_bn.py', DENSE, 'ordered',
            'norm_cfg type MMSyncBN: simple copy paste, strong baselines', 'sync_bn_forward_mean',
            'sync_bn_forward_var', 'sync_bn_forward_output', 'sync_bn_backward_param',
            'sync_bn_backward_data'),
    _family(f'{__package__}.provider', 'info.py', ELEMENT, 'ordered', 'environment reports',
            'get_compiler_version', 'get_compiling_cuda_version'),
    # Not implemented: rotated boxes, point clouds, generators, optical flow, text, and whatever
    # else MMDetection does not reach.
    _missing('active_rotated_filter.py', 'ordered', 'mmrotate (S2A-Net)',
             'active_rotated_filter_forward', 'active_rotated_filter_backward'),
    _missing('assign_score_withk.py', 'atomics', 'mmdet3d (PAConv)', 'assign_score_withk_forward',
             'assign_score_withk_backward'),
    _missing('ball_query.py', 'ordered', 'mmdet3d', 'ball_query_forward',
             'stack_ball_query_forward'),
    _missing('bbox.py', 'ordered', 'mmcv.ops.bbox_overlaps', 'bbox_overlaps'),
    _missing_pair('bezier_align.py', 'mmocr (ABCNet)', 'bezier_align'),
    _missing('bias_act.py', 'ordered', 'mmagic (StyleGAN)', 'bias_act'),
    _missing_pair('border_align.py', 'BorderDet', 'border_align'),
    _missing('box_iou_quadri.py', 'ordered', 'mmrotate', 'box_iou_quadri'),
    _missing('box_iou_rotated.py', 'ordered', 'mmrotate', 'box_iou_rotated'),
    _missing_pair('carafe.py', 'CARAFENaive', 'carafe_naive'),
    _missing_pair('chamfer_distance.py', 'mmrotate (Oriented RepPoints)', 'chamfer_distance'),
    _missing('contour_expand.py', 'host', 'mmocr (PSENet)', 'contour_expand'),
    _missing('convex_iou.py', 'ordered', 'mmrotate', 'convex_iou', 'convex_giou'),
    _missing('correlation.py', 'ordered', 'mmflow', 'correlation_forward', 'correlation_backward'),
    _missing('diff_iou_rotated.py', 'ordered', 'mmrotate, mmdet3d',
             'diff_iou_rotated_sort_vertices_forward'),
    _missing('filtered_lrelu.py', 'ordered', 'mmagic (StyleGAN)', 'filtered_lrelu',
             'filtered_lrelu_act_'),
    _missing('focal_loss.py', 'ordered', 'SoftmaxFocalLoss', 'softmax_focal_loss_forward',
             'softmax_focal_loss_backward'),
    _missing('furthest_point_sample.py', 'ordered', 'mmdet3d', 'furthest_point_sampling_forward',
             'furthest_point_sampling_with_dist_forward'),
    _missing('fused_bias_leakyrelu.py', 'ordered', 'mmagic (StyleGAN)', 'fused_bias_leakyrelu'),
    _missing('gather_points.py', 'atomics', 'mmdet3d', 'gather_points_forward',
             'gather_points_backward'),
    _missing('group_points.py', 'atomics', 'mmdet3d', 'group_points_forward',
             'group_points_backward', 'stack_group_points_forward', 'stack_group_points_backward'),
    _missing('iou3d.py', 'ordered', 'mmdet3d', 'iou3d_boxes_overlap_bev_forward',
             'iou3d_nms3d_forward', 'iou3d_nms3d_normal_forward'),
    _missing('knn.py', 'ordered', 'mmdet3d', 'knn_forward'),
    _missing('line_nms.py', 'races', 'CLRNet of onedl-mmdetection', 'line_nms_forward'),
    _missing('min_area_polygons.py', 'ordered', 'mmrotate', 'min_area_polygons'),
    _missing('nms.py', 'ordered', 'mmrotate', 'nms_rotated', 'nms_quadri'),
    _missing('pixel_group.py', 'host', 'mmocr (PANet)', 'pixel_group'),
    _missing('points_in_boxes.py', 'ordered', 'mmdet3d', 'points_in_boxes_part_forward',
             'points_in_boxes_cpu_forward', 'points_in_boxes_all_forward'),
    _missing('points_in_polygons.py', 'ordered', 'mmrotate', 'points_in_polygons_forward'),
    _missing('prroi_pool.py', 'ordered', 'buildable as roi_layer', 'prroi_pool_forward'),
    _missing('prroi_pool.py', 'atomics', 'buildable as roi_layer', 'prroi_pool_coor_backward',
             'prroi_pool_backward'),
    _missing('psa_mask.py', 'ordered', 'mmseg (PSANet)', 'psamask_forward', 'psamask_backward'),
    _missing_pair('riroi_align_rotated.py', 'mmrotate (ReDet)', 'riroi_align_rotated'),
    _missing_pair('roi_align_rotated.py', 'mmrotate; buildable as roi_layer',
                  'roi_align_rotated'),
    _missing('roiaware_pool3d.py', 'atomics', 'mmdet3d', 'roiaware_pool3d_forward',
             'roiaware_pool3d_backward'),
    _missing('roipoint_pool3d.py', 'ordered', 'mmdet3d', 'roipoint_pool3d_forward'),
    _missing_pair('rotated_feature_align.py', 'mmrotate (R3Det)', 'rotated_feature_align'),
    _missing('scatter_points.py', 'atomics', 'mmdet3d', 'dynamic_point_to_voxel_forward',
             'dynamic_point_to_voxel_backward'),
    _missing('sparse_ops.py', 'atomics', 'mmdet3d', 'get_indice_pairs_2d_forward',
             'get_indice_pairs_3d_forward', 'get_indice_pairs_4d_forward',
             'get_indice_pairs_2d_backward', 'get_indice_pairs_3d_backward', 'indice_conv_forward',
             'indice_conv_backward', 'fused_indice_conv_forward', 'indice_maxpool_forward',
             'indice_maxpool_backward'),
    _missing('three_interpolate.py', 'atomics', 'mmdet3d', 'three_interpolate_forward',
             'three_interpolate_backward'),
    _missing('three_nn.py', 'ordered', 'mmdet3d', 'three_nn_forward'),
    _missing('tin_shift.py', 'ordered', 'mmaction2 (TIN)', 'tin_shift_forward',
             'tin_shift_backward'),
    _missing('upfirdn2d.py', 'ordered', 'mmagic (StyleGAN)', 'upfirdn2d'),
    _missing('voxelize.py', 'atomics', 'mmdet3d', 'dynamic_voxelize_forward',
             'hard_voxelize_forward'),
)


TABLE: dict[str, OperatorRow] = {row.name: row for rows in _FAMILIES for row in rows}
# Operators that mmcv does not have, and the fork that has.
OF_FORKS: dict[str, str] = {'line_nms_forward': 'onedl-mmcv==2.3.6'}


def implementation(name: str) -> Callable | None:
    """Return the function of operator ``name``; None if it has no row, or one without a target."""
    row = TABLE.get(name)
    if row is None or not row.target:
        return None
    module, function = row.target.split(':')
    return getattr(importlib.import_module(module), function)


def named(function: Callable, name: str, doc: str | None = None) -> Callable:
    """Return ``function`` under the name of an operator."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def by_device(name: str, kernel: Callable[[], Callable],
              runs_on: Callable[[str], bool]) -> Callable:
    """Return operator ``name`` with a kernel for some devices, chosen by its first argument.

    ``runs_on`` says for a type of device, such as 'cuda', whether ``kernel()`` is called there.
    Elsewhere the implementation of the table is called.
    """
    plain: Any = implementation(name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        return (kernel() if runs_on(first.device.type) else plain)(*args, **kwargs)

    return named(operator, name, plain.__doc__)
