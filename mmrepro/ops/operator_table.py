"""The table of mmcv's operators: one row per name that mmcv imports from ``mmcv._ext``.

A row names mmrepro's function, the file of ``mmcv/ops`` that calls it (and so defines its
signature), the reason why mmrepro's form is deterministic, what mmcv's CUDA kernel does, and the
detectors that use it. To implement an operator, write a function of that name in the family's
module. An operator without an implementation (``not_implemented.csv``) imports, and raises when it
is called. To add an operator, add its name to a family.

This module imports the standard library only.
"""
from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from configparser import RawConfigParser
from pathlib import Path
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


def _missing() -> Iterator[Rows]:
    """Yield the operators without an implementation: those of point clouds, generators, optical
    flow and the like that MMDetection does not reach and that mmcv runs on CUDA only.
    """
    with open(Path(__file__).with_name('not_implemented.csv'), encoding='utf-8') as file:
        for row in csv.DictReader(file):
            yield _family('', row['source'], NONE, row['compiled'], row['users'],
                          *row['operators'].split())


_FAMILIES: tuple[Rows, ...] = (
    _family('roi_align', 'roi_align.py', OWN_SUM, 'ordered',
            'every two-stage detector; mask targets of all instance heads', 'roi_align_forward'),
    _family('roi_align', 'roi_align.py', SORTED, 'atomics', 'every two-stage detector',
            'roi_align_backward'),
    _pair('roi_pool', 'roi_pool.py', ORDERED, 'Fast R-CNN style heads that ask for RoIPool',
          'roi_pool'),
    _pair('roi_pool', 'deform_roi_pool.py', OWN_SUM, 'dpool configs of dcn and dcnv2',
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
    _family('nms', 'nms.py', ORDERED, 'host',
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
    _pair('rotated_features', 'roi_align_rotated.py', OWN_SUM, 'MMRotate; buildable as roi_layer',
          'roi_align_rotated'),
    _pair('rotated_features', 'bezier_align.py', OWN_SUM, 'MMOCR (ABCNet)', 'bezier_align'),
    _pair('rotated_features', 'rotated_feature_align.py', OWN_SUM, 'MMRotate (R3Det)',
          'rotated_feature_align'),
    _family('rotated_features', 'active_rotated_filter.py', OWN_SUM, 'ordered',
            'MMRotate (S2A-Net)', 'active_rotated_filter_forward',
            'active_rotated_filter_backward'),
    _family('box_iou', 'bbox.py', ELEMENT, 'ordered', 'mmcv.ops.bbox_overlaps', 'bbox_overlaps'),
    _family('box_iou', 'box_iou_rotated.py', ELEMENT, 'ordered', 'MMRotate', 'box_iou_rotated'),
    _family('box_iou', 'box_iou_quadri.py', ELEMENT, 'ordered', 'MMRotate', 'box_iou_quadri'),
    _family('nms', 'nms.py', ORDERED, 'ordered', 'MMRotate', 'nms_rotated', 'nms_quadri'),
    _family('text_regions', 'contour_expand.py', ORDERED, 'host', 'MMOCR (PSENet)',
            'contour_expand'),
    _family('text_regions', 'pixel_group.py', ORDERED, 'host', 'MMOCR (PANet)', 'pixel_group'),
    _family('masked_conv', 'psa_mask.py', ELEMENT, 'ordered', 'MMSegmentation (PSANet)',
            'psamask_forward', 'psamask_backward'),
    _family('points', 'voxelize.py', ORDERED, 'atomics', 'MMDetection3D',
            'dynamic_voxelize_forward', 'hard_voxelize_forward'),
    _family('points', 'points_in_boxes.py', ELEMENT, 'host', 'MMDetection3D',
            'points_in_boxes_cpu_forward'),
    _family(f'{__package__}.provider', 'info.py', ELEMENT, 'ordered', 'environment reports',
            'get_compiler_version', 'get_compiling_cuda_version'),
    *_missing(),
)

TABLE: dict[str, OperatorRow] = {row.name: row for rows in _FAMILIES for row in rows}
# Operators that mmcv does not have, and the fork that has.
OF_FORKS: dict[str, str] = {'line_nms_forward': 'onedl-mmcv==2.3.6'}


def implementation(name: str) -> Callable[..., Any] | None:
    """Return the function of operator ``name``; None if it has no row, or one without a target."""
    row = TABLE.get(name)
    if row is None or not row.target:
        return None
    module, function = row.target.split(':')
    from .exported import traceable  # imports torch
    return traceable(name, getattr(importlib.import_module(module), function))


def named(function: Callable[..., Any], name: str,
          doc: str | None = None) -> Callable[..., Any]:
    """Return ``function`` under the name of an operator."""
    function.__name__ = function.__qualname__ = name
    function.__doc__ = doc
    return function


def by_device(name: str, kernel: Callable[[], Callable[..., Any]],
              runs_on: Callable[[str], bool]) -> Callable[..., Any]:
    """Return operator ``name`` with a kernel for some devices, chosen by its first argument.

    ``runs_on`` says for a type of device, such as 'cuda', whether ``kernel()`` is called there.
    Elsewhere the implementation of the table is called.
    """
    plain: Any = implementation(name)

    def operator(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else next(iter(kwargs.values()))
        return (kernel() if runs_on(first.device.type) else plain)(*args, **kwargs)

    return named(operator, name, plain.__doc__)


def read_names(path: Path) -> dict[str, list[str]]:
    """Return the names by section, in the order of the file."""
    file = RawConfigParser(delimiters=('=', ), allow_no_value=True)
    setattr(file, 'optionxform', str)  # noqa: B010  names are case-sensitive
    file.read(path, 'utf-8')
    return {section: list(file[section]) for section in file.sections()}
