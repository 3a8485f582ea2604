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
import importlib.util
from typing import Callable, Dict, NamedTuple, Optional, Tuple

__all__ = ['FAMILIES', 'TABLE', 'Family', 'OperatorRow', 'implementation']

# Why mmrepro's form is deterministic. Each family names one of these reasons.
OWN_SUM = 'every output is one sum over its own sources, in a fixed order; nothing is added twice'
SORTED = 'sources are sorted by destination (stable), then every destination is one ordered sum'
ELEMENT = 'every output element depends on its own inputs only'
ORDERED = 'ties are broken by index, candidates are visited in a fixed order'
DENSE = 'dense torch reductions, which are ordered'
NONE = 'no implementation in PyTorch'


class Family(NamedTuple):
    """Operators that share a module, a calling file and a reason.

    ``module`` is '' without an implementation. ``compiled`` is the kind of mmcv's CUDA kernel:
    'ordered', or 'atomics' if it adds floats in the order in which threads arrive.
    """

    module: str
    source: str
    why: str
    compiled: str
    users: str
    names: Tuple[str, ...]


class OperatorRow(NamedTuple):
    """One operator. ``target`` is 'module:function', or '' without an implementation."""

    name: str
    target: str
    source: str
    why: str
    compiled: str
    users: str

    @property
    def deterministic(self) -> bool:
        """Whether there is an implementation: all of them give the same bits on every run."""
        return bool(self.target)


_ROI = (
    Family('mmrepro.ops.mmcv.roi_align', 'roi_align.py', OWN_SUM, 'ordered',
           'every two-stage detector; mask targets of all instance heads',
           ('roi_align_forward',)),
    Family('mmrepro.ops.mmcv.roi_align', 'roi_align.py', SORTED, 'atomics',
           'every two-stage detector', ('roi_align_backward',)),
    Family('mmrepro.ops.mmcv.roi_pool', 'roi_pool.py', ORDERED, 'ordered',
           'Fast R-CNN style heads that ask for RoIPool', ('roi_pool_forward',)),
    Family('mmrepro.ops.mmcv.roi_pool', 'roi_pool.py', SORTED, 'atomics',
           'Fast R-CNN style heads that ask for RoIPool', ('roi_pool_backward',)),
    Family('mmrepro.ops.mmcv.prroi_pool', 'prroi_pool.py', OWN_SUM, 'ordered',
           'buildable as roi_layer', ('prroi_pool_forward',)),
    Family('mmrepro.ops.mmcv.prroi_pool', 'prroi_pool.py', OWN_SUM, 'atomics',
           'buildable as roi_layer', ('prroi_pool_coor_backward',)),
    Family('mmrepro.ops.mmcv.prroi_pool', 'prroi_pool.py', SORTED, 'atomics',
           'buildable as roi_layer', ('prroi_pool_backward',)),
    Family('mmrepro.ops.mmcv.deform_roi_pool', 'deform_roi_pool.py', OWN_SUM, 'ordered',
           'dpool configs of dcn and dcnv2', ('deform_roi_pool_forward',)),
    Family('mmrepro.ops.mmcv.deform_roi_pool', 'deform_roi_pool.py', SORTED, 'atomics',
           'dpool configs of dcn and dcnv2', ('deform_roi_pool_backward',)),
)

_ROTATED = (
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'roi_align_rotated.py', OWN_SUM, 'ordered',
           'mmrotate; buildable as roi_layer', ('roi_align_rotated_forward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'roi_align_rotated.py', SORTED, 'atomics',
           'mmrotate; buildable as roi_layer', ('roi_align_rotated_backward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'riroi_align_rotated.py', OWN_SUM, 'ordered',
           'mmrotate (ReDet)', ('riroi_align_rotated_forward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'riroi_align_rotated.py', SORTED, 'atomics',
           'mmrotate (ReDet)', ('riroi_align_rotated_backward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'rotated_feature_align.py', OWN_SUM, 'ordered',
           'mmrotate (R3Det)', ('rotated_feature_align_forward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'rotated_feature_align.py', SORTED, 'atomics',
           'mmrotate (R3Det)', ('rotated_feature_align_backward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'bezier_align.py', OWN_SUM, 'ordered',
           'mmocr (ABCNet)', ('bezier_align_forward',)),
    Family('mmrepro.ops.mmcv.roi_align_rotated', 'bezier_align.py', SORTED, 'atomics',
           'mmocr (ABCNet)', ('bezier_align_backward',)),
    Family('mmrepro.ops.mmcv.border_align', 'border_align.py', ORDERED, 'ordered',
           'BorderDet', ('border_align_forward',)),
    Family('mmrepro.ops.mmcv.border_align', 'border_align.py', SORTED, 'atomics',
           'BorderDet', ('border_align_backward',)),
)

_DEFORM = (
    Family('mmrepro.ops.mmcv.deform_conv', 'deform_conv.py', OWN_SUM, 'ordered',
           'DCN, RepPoints, VFNet, TOOD, Cascade RPN, Guided Anchoring, FoveaBox, SAConv2d',
           ('deform_conv_forward', 'deform_conv_backward_parameters')),
    Family('mmrepro.ops.mmcv.deform_conv', 'deform_conv.py', SORTED, 'atomics',
           'DCN, RepPoints, VFNet, TOOD, Cascade RPN, Guided Anchoring, FoveaBox, SAConv2d',
           ('deform_conv_backward_input',)),
    Family('mmrepro.ops.mmcv.deform_conv', 'modulated_deform_conv.py', OWN_SUM, 'ordered',
           'DCNv2, DyHead, GLIP, SOLOv2 and FCOS with DCN, CenterNet',
           ('modulated_deform_conv_forward',)),
    Family('mmrepro.ops.mmcv.deform_conv', 'modulated_deform_conv.py', SORTED, 'atomics',
           'DCNv2, DyHead, GLIP, SOLOv2 and FCOS with DCN, CenterNet',
           ('modulated_deform_conv_backward',)),
)

_ATTENTION = (
    Family('mmrepro.ops.mmcv.ms_deform_attn', 'multi_scale_deform_attn.py', OWN_SUM, 'ordered',
           'Deformable DETR, DINO, DDQ, Grounding DINO, Mask2Former',
           ('ms_deform_attn_forward',)),
    Family('mmrepro.ops.mmcv.ms_deform_attn', 'multi_scale_deform_attn.py', SORTED, 'atomics',
           'Deformable DETR, DINO, DDQ, Grounding DINO, Mask2Former',
           ('ms_deform_attn_backward',)),
)

_CARAFE = (
    Family('mmrepro.ops.mmcv.carafe', 'carafe.py', OWN_SUM, 'ordered',
           'FPN_CARAFE, mask heads with CARAFE',
           ('carafe_forward', 'carafe_backward', 'carafe_naive_forward')),
    Family('mmrepro.ops.mmcv.carafe', 'carafe.py', OWN_SUM, 'atomics',
           'CARAFENaive', ('carafe_naive_backward',)),
)

_NMS = (
    Family('mmrepro.ops.mmcv.nms', 'nms.py', ORDERED, 'ordered',
           'every detector at inference, RPN and Cascade RPN in training', ('nms',)),
    Family('mmrepro.ops.mmcv.nms', 'nms.py', ORDERED, 'ordered',
           'CornerNet, CentripetalNet, soft-NMS test configs', ('softnms',)),
    Family('mmrepro.ops.mmcv.nms', 'nms.py', ORDERED, 'ordered', 'PISA', ('nms_match',)),
    Family('mmrepro.ops.mmcv.nms', 'nms.py', ORDERED, 'ordered', 'mmrotate',
           ('nms_rotated', 'nms_quadri')),
)

_LOSSES = (
    Family('mmrepro.ops.mmcv.focal_loss', 'focal_loss.py', ELEMENT, 'ordered',
           'RetinaNet, FCOS, ATSS, Deformable DETR and every other user of FocalLoss',
           ('sigmoid_focal_loss_forward', 'sigmoid_focal_loss_backward')),
    Family('mmrepro.ops.mmcv.focal_loss', 'focal_loss.py', ELEMENT, 'ordered', 'SoftmaxFocalLoss',
           ('softmax_focal_loss_forward', 'softmax_focal_loss_backward')),
)

_BOXES = (
    Family('mmrepro.ops.mmcv.box_iou', 'bbox.py', ELEMENT, 'ordered', 'mmcv.ops.bbox_overlaps',
           ('bbox_overlaps',)),
    Family('mmrepro.ops.mmcv.box_iou', 'box_iou_rotated.py', ELEMENT, 'ordered', 'mmrotate',
           ('box_iou_rotated',)),
    Family('mmrepro.ops.mmcv.box_iou', 'box_iou_quadri.py', ELEMENT, 'ordered', 'mmrotate',
           ('box_iou_quadri',)),
    Family('mmrepro.ops.mmcv.box_iou', 'diff_iou_rotated.py', ORDERED, 'ordered',
           'mmrotate, mmdet3d', ('diff_iou_rotated_sort_vertices_forward',)),
)

_POLYGONS = (
    Family('mmrepro.ops.mmcv.polygons', 'points_in_polygons.py', ELEMENT, 'ordered', 'mmrotate',
           ('points_in_polygons_forward',)),
    Family('mmrepro.ops.mmcv.polygons', 'min_area_polygons.py', ELEMENT, 'ordered', 'mmrotate',
           ('min_area_polygons',)),
    Family('mmrepro.ops.mmcv.polygons', 'convex_iou.py', ELEMENT, 'ordered', 'mmrotate',
           ('convex_iou', 'convex_giou')),
    Family('mmrepro.ops.mmcv.polygons', 'active_rotated_filter.py', OWN_SUM, 'ordered',
           'mmrotate (S2A-Net)',
           ('active_rotated_filter_forward', 'active_rotated_filter_backward')),
)

_MASKED = (
    Family('mmrepro.ops.mmcv.masked_conv', 'masked_conv.py', ELEMENT, 'ordered',
           'Guided Anchoring heads at inference',
           ('masked_im2col_forward', 'masked_col2im_forward')),
)

_NORM = (
    Family('mmrepro.ops.mmcv.batch_norm', 'sync_bn.py', DENSE, 'ordered',
           'norm_cfg type MMSyncBN: simple copy paste, strong baselines',
           ('sync_bn_forward_mean', 'sync_bn_forward_var', 'sync_bn_forward_output',
            'sync_bn_backward_param', 'sync_bn_backward_data')),
)

_INFO = (
    Family('mmrepro.ops.provider', 'info.py', ELEMENT, 'ordered', 'environment reports',
           ('get_compiler_version', 'get_compiling_cuda_version')),
)

# Not used by MMDetection: point clouds, generators, text spotting, segmentation.
_ELSEWHERE = (
    Family('', 'assign_score_withk.py', NONE, 'atomics', 'mmdet3d (PAConv)',
           ('assign_score_withk_forward', 'assign_score_withk_backward')),
    Family('', 'ball_query.py', NONE, 'ordered', 'mmdet3d',
           ('ball_query_forward', 'stack_ball_query_forward')),
    Family('', 'bias_act.py', NONE, 'ordered', 'mmagic (StyleGAN)', ('bias_act',)),
    Family('', 'chamfer_distance.py', NONE, 'atomics', 'mmdet3d',
           ('chamfer_distance_forward', 'chamfer_distance_backward')),
    Family('', 'contour_expand.py', NONE, 'ordered', 'mmocr (PSENet)', ('contour_expand',)),
    Family('', 'correlation.py', NONE, 'ordered', 'mmflow',
           ('correlation_forward', 'correlation_backward')),
    Family('', 'filtered_lrelu.py', NONE, 'ordered', 'mmagic (StyleGAN)',
           ('filtered_lrelu', 'filtered_lrelu_act_')),
    Family('', 'furthest_point_sample.py', NONE, 'ordered', 'mmdet3d',
           ('furthest_point_sampling_forward', 'furthest_point_sampling_with_dist_forward')),
    Family('', 'fused_bias_leakyrelu.py', NONE, 'ordered', 'mmagic (StyleGAN)',
           ('fused_bias_leakyrelu',)),
    Family('', 'gather_points.py', NONE, 'atomics', 'mmdet3d',
           ('gather_points_forward', 'gather_points_backward')),
    Family('', 'group_points.py', NONE, 'atomics', 'mmdet3d',
           ('group_points_forward', 'group_points_backward',
            'stack_group_points_forward', 'stack_group_points_backward')),
    Family('', 'iou3d.py', NONE, 'ordered', 'mmdet3d',
           ('iou3d_boxes_overlap_bev_forward', 'iou3d_nms3d_forward',
            'iou3d_nms3d_normal_forward')),
    Family('', 'knn.py', NONE, 'ordered', 'mmdet3d', ('knn_forward',)),
    Family('', 'pixel_group.py', NONE, 'ordered', 'mmocr (PANet)', ('pixel_group',)),
    Family('', 'points_in_boxes.py', NONE, 'ordered', 'mmdet3d',
           ('points_in_boxes_part_forward', 'points_in_boxes_cpu_forward',
            'points_in_boxes_all_forward')),
    Family('', 'psa_mask.py', NONE, 'ordered', 'mmseg (PSANet)',
           ('psamask_forward', 'psamask_backward')),
    Family('', 'roiaware_pool3d.py', NONE, 'atomics', 'mmdet3d',
           ('roiaware_pool3d_forward', 'roiaware_pool3d_backward')),
    Family('', 'roipoint_pool3d.py', NONE, 'ordered', 'mmdet3d', ('roipoint_pool3d_forward',)),
    Family('', 'scatter_points.py', NONE, 'atomics', 'mmdet3d',
           ('dynamic_point_to_voxel_forward', 'dynamic_point_to_voxel_backward')),
    Family('', 'sparse_ops.py', NONE, 'atomics', 'mmdet3d',
           ('get_indice_pairs_2d_forward', 'get_indice_pairs_3d_forward',
            'get_indice_pairs_4d_forward', 'get_indice_pairs_2d_backward',
            'get_indice_pairs_3d_backward', 'indice_conv_forward', 'indice_conv_backward',
            'fused_indice_conv_forward', 'indice_maxpool_forward', 'indice_maxpool_backward')),
    Family('', 'three_interpolate.py', NONE, 'atomics', 'mmdet3d',
           ('three_interpolate_forward', 'three_interpolate_backward')),
    Family('', 'three_nn.py', NONE, 'ordered', 'mmdet3d', ('three_nn_forward',)),
    Family('', 'tin_shift.py', NONE, 'ordered', 'mmaction2 (TIN)',
           ('tin_shift_forward', 'tin_shift_backward')),
    Family('', 'upfirdn2d.py', NONE, 'ordered', 'mmagic (StyleGAN)', ('upfirdn2d',)),
    Family('', 'voxelize.py', NONE, 'atomics', 'mmdet3d',
           ('dynamic_voxelize_forward', 'hard_voxelize_forward')),
)

FAMILIES: Tuple[Family, ...] = (
    *_ROI, *_ROTATED, *_DEFORM, *_ATTENTION, *_CARAFE, *_NMS, *_LOSSES, *_BOXES, *_POLYGONS,
    *_MASKED, *_NORM, *_INFO, *_ELSEWHERE)


def _rows() -> Dict[str, OperatorRow]:
    rows: Dict[str, OperatorRow] = {}
    for family in FAMILIES:
        for name in family.names:
            if name in rows:
                raise ValueError(f'operator {name!r} has two rows: in {rows[name].source} and in '
                                 f'{family.source}; one name, one row')
            target = f'{family.module}:{name}' if family.module else ''
            rows[name] = OperatorRow(name, target, family.source, family.why, family.compiled,
                                     family.users)
    return rows


TABLE: Dict[str, OperatorRow] = _rows()


def implementation(name: str) -> Optional[Callable]:
    """The function of operator ``name``, or None if it has no row, module or function.

    Imports its module; errors of that import propagate.
    """
    row = TABLE.get(name)
    if row is None or not row.target:
        return None
    module, function = row.target.split(':')
    if importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), function, None)
