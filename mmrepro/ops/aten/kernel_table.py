"""The table of torch's own operators: their behaviour under the deterministic flag.

One row per operator and span of releases. ``torch`` is the behaviour of torch on CUDA:

    raises   raises, naming the operator
    silent   adds in the order in which threads arrive, without an error
    slow     deterministic, by a detour that costs time and memory
    ties     deterministic, but the choice among equal values is not specified
    good     deterministic; not replaced

Rows with a ``target`` are replaced, the others are not; ``why`` is the reason. A row named
``module.attribute`` is a *Python override*: torch takes its detour in Python, before the
dispatcher, so that function is replaced. This module does not import torch.

Sources of the spans of releases in pytorch/pytorch: cumsum #140887 (2.6), kthvalue #165762 (2.10),
bilinear since 2.1, trilinear #154239 (2.9), replication padding #148633 (2.8; 2-D since 2.1),
scatter and scatter_reduce #98060 (2.1), max_pool3d #179104 (2.12). topk does not specify the order
of equal values: on NVIDIA the selection goes by prefix scans and the sort of the results is not
stable; on ROCm the selection takes equal values as threads arrive (#186653, which was reverted).
"""
from __future__ import annotations

import functools
import importlib
from typing import Any, Callable, NamedTuple

BEHAVIOURS = ('raises', 'silent', 'slow', 'ties', 'good')
# Spans of releases. 2.0 is the oldest that mmrepro runs on.
_FIRST, _LATER = (2, 0), (99, 0)
_CUDA, _BOTH = ('cuda',), ('cpu', 'cuda')
# Why a replacement is deterministic, or why an operator is not replaced.
_AXES = 'one filter per axis; every element is a sum over its own readers in ascending order'
_TAPS = 'corners are sorted by destination (stable), then every pixel is one ordered sum'
_FLAT = 'one flat index_put, which sorts by destination and adds in order'
_STEPS = 'log2(n) operations on whole tensors'
_TIES = 'equal values by lower index, on a CPU and on CUDA alike'
_DETOUR = 'straight to the kernel, whose backward is replaced here; no detour over index_put'
_GATHER = 'every element of the gradient reads its own sources'
_UNUSED = 'no detector uses it; torch refuses it by name, which is the promise'


class KernelRow(NamedTuple):
    """One operator over a span of releases."""

    operator: str  # name in aten with its overload, or module.attribute
    torch: str  # a word of BEHAVIOURS
    target: str  # module:function or module:function(literals) of the replacement, or ''
    why: str  # why the replacement is deterministic, or why there is none
    users: str = ''  # detectors and parts that reach it
    since: tuple[int, int] = _FIRST  # the first release (major, minor) that the row applies to
    until: tuple[int, int] = _LATER  # the first one that it does not apply to any more
    devices: tuple[str, ...] = _CUDA  # on which it is replaced

    @property
    def overrides_python(self) -> bool:
        """Whether the row names a Python function instead of an operator of ``aten``."""
        return self.operator.startswith('torch.')

    def load(self) -> Callable[..., Any]:
        """Return the function of ``target``, with its literals as the first arguments."""
        module, _, expression = self.target.partition(':')
        name, _, arguments = expression.rstrip(')').partition('(')
        function = getattr(importlib.import_module(f'mmrepro.ops.aten.{module}'), name)
        literals = [int(text) if text.isdigit() else text for text in arguments.split(', ')]
        return functools.partial(function, *literals) if arguments else function


_RESIZE = (
    KernelRow('upsample_linear1d_backward', 'raises', 'separable:resize_backward(linear)', _AXES,
              '1-D necks of third parties'),
    KernelRow('upsample_bilinear2d_backward', 'raises', 'separable:resize_backward(linear)', _AXES,
              'SOLO, SOLOv2, HTC, SCNet, PanopticFPN, DyHead, NAS-FCOS, FPG, RTMDet-Ins, CondInst, '
              'BoxInst, YOLACT, Mask2Former, HRFPN'),
    KernelRow('upsample_trilinear3d_backward', 'raises', 'separable:resize_backward(linear)', _AXES,
              'video necks of third parties'),
    KernelRow('upsample_bicubic2d_backward', 'raises', 'separable:resize_backward(cubic)', _AXES,
              'position embeddings that are resized while they train'),
    KernelRow('_upsample_bilinear2d_aa_backward', 'raises', 'separable:resize_backward(linear_aa)',
              _AXES, 'antialiased resize inside a model'),
    KernelRow('_upsample_bicubic2d_aa_backward', 'raises', 'separable:resize_backward(cubic_aa)',
              _AXES, 'antialiased resize inside a model'),
    KernelRow('torch._decomp.decompositions.upsample_bilinear2d_vec', 'slow',
              'python_overrides:upsample_linear',
              _DETOUR, 'F.interpolate', since=(2, 1), until=(2, 4)),
    KernelRow('torch._decomp.decompositions._upsample_linear_vec', 'slow',
              'python_overrides:upsample_linear', _DETOUR, 'F.interpolate', since=(2, 2)),
    KernelRow('upsample_nearest2d_backward', 'good', '', _GATHER, 'FPN, PAFPN, BFP, HRNet'),
    KernelRow('upsample_nearest1d_backward', 'good', '', _GATHER),
    KernelRow('upsample_nearest3d_backward', 'good', '', _GATHER),
)

_POOLING = (
    KernelRow('_adaptive_avg_pool2d_backward', 'raises', 'separable:adaptive_avg_pool_backward(2)',
              _AXES, 'HTC, SCNet (1x1 outputs are a mean and never get here)'),
    KernelRow('_adaptive_avg_pool3d_backward', 'raises', 'separable:adaptive_avg_pool_backward(3)',
              _AXES),
    KernelRow('avg_pool3d_backward', 'raises', 'separable:avg_pool3d_backward', _AXES),
    KernelRow('avg_pool2d_backward', 'good', '', _GATHER, 'ResNet-D, Res2Net'),
    KernelRow('adaptive_max_pool2d_backward', 'raises', 'scatter:max_pool_backward(2)', _FLAT,
              'Libra R-CNN (BFP)'),
    KernelRow('adaptive_max_pool3d_backward', 'silent', 'scatter:max_pool_backward(3)', _FLAT),
    KernelRow('max_pool2d_with_indices_backward', 'good', '', _GATHER, 'stem of every ResNet, SPP'),
    KernelRow('max_pool3d_with_indices_backward', 'raises', 'scatter:max_pool_backward(3)', _FLAT),
    KernelRow('torch._decomp.decompositions.max_pool3d_with_indices', 'slow',
              'python_overrides:max_pool3d_with_indices', _DETOUR, 'F.max_pool3d', since=(2, 12)),
    KernelRow('fractional_max_pool2d_backward', 'raises', 'scatter:max_pool_backward(2)', _FLAT),
    KernelRow('fractional_max_pool3d_backward', 'raises', 'scatter:max_pool_backward(3)', _FLAT),
    KernelRow('max_unpool2d', 'raises', 'scatter:max_unpool(2)',
              'the last source of a position stays (torch raises on a CPU too)', devices=_BOTH),
    KernelRow('max_unpool3d', 'raises', 'scatter:max_unpool(3)',
              'the last source of a position stays (torch raises on a CPU too)', devices=_BOTH),
)

_PADDING = (
    KernelRow('reflection_pad1d_backward', 'raises', 'separable:pad_backward(reflection)', _AXES),
    KernelRow('reflection_pad2d_backward', 'raises', 'separable:pad_backward(reflection)', _AXES),
    KernelRow('reflection_pad3d_backward', 'raises', 'separable:pad_backward(reflection)', _AXES),
    KernelRow('replication_pad1d_backward', 'raises', 'separable:pad_backward(replication)', _AXES),
    KernelRow('replication_pad2d_backward', 'raises', 'separable:pad_backward(replication)', _AXES,
              'CondInst, BoxInst'),
    KernelRow('replication_pad3d_backward', 'raises', 'separable:pad_backward(replication)', _AXES),
    KernelRow('torch._decomp.decompositions._replication_pad', 'slow',
              'python_overrides:replication_pad', _DETOUR, 'F.pad(mode="replicate")', since=(2, 1)),
)

_SELECTION = (
    KernelRow('topk', 'silent', 'selection:topk', _TIES,
              'RPN, ATSS, SimOTA, DETR queries, every dense head', devices=_BOTH),
    KernelRow('sort', 'ties', 'selection:sort', _TIES,
              'candidates before NMS, PISA, rank losses', devices=_BOTH),
    KernelRow('kthvalue', 'raises', 'selection:kthvalue', _TIES,
              'Dynamic R-CNN, CenterNet (update)', until=(2, 10)),
    KernelRow('kthvalue', 'good', '', 'the lowest index of equal values',
              'Dynamic R-CNN, CenterNet (update)', since=(2, 10)),
    KernelRow('median.dim', 'raises', 'selection:median', _TIES),
    KernelRow('nanmedian.dim', 'raises', 'selection:nanmedian', _TIES),
    KernelRow('max.dim', 'good', '', 'the first of equal values, by its documentation',
              'assigners'),
    KernelRow('argmax', 'good', '', 'the first of equal values, by its documentation', 'assigners'),
)

_SUMS = (
    KernelRow('cumsum', 'raises', 'sums:cumsum', _STEPS,
              'sine position encodings: DETR, Deformable DETR, DINO, Mask2Former and all relatives',
              until=(2, 6)),
    KernelRow('cumsum_', 'raises', 'sums:cumsum_', _STEPS, until=(2, 6)),
    KernelRow('cumsum', 'good', '', 'a scan in a fixed order under the flag', since=(2, 6)),
    # of one dimension: a scan whose blocks take the sums of their neighbours as these arrive
    KernelRow('cumprod', 'silent', 'sums:cumprod', _STEPS),
    KernelRow('cumprod_', 'silent', 'sums:cumprod_', _STEPS),
    KernelRow('_logcumsumexp', 'silent', 'sums:logcumsumexp', _STEPS),
    KernelRow('nll_loss2d_forward', 'raises', 'sums:nll_loss2d_forward',
              'gathered and summed by torch.sum',
              'third-party losses (MMDetection reduces itself)'),
    KernelRow('nll_loss2d_backward', 'good', '', 'one write per pixel'),
    KernelRow('nll_loss_forward', 'good', '', 'one block sums', 'all classification losses'),
    KernelRow('bincount', 'raises', 'scatter:bincount', _FLAT),
    KernelRow('histc', 'raises', '', _UNUSED),
    KernelRow('put_', 'raises', 'scatter:put_', _FLAT),
    KernelRow('_ctc_loss_backward', 'raises', '', _UNUSED),
    KernelRow('_embedding_bag', 'raises', '', _UNUSED + ' (mode "max" only; "sum" is good)'),
)

_GRIDS = (
    KernelRow('grid_sampler_2d_backward', 'raises', 'grid_sample:grid_sample_backward', _TAPS,
              'Mask2Former, PointRend; Deformable DETR in pure Python'),
    KernelRow('grid_sampler_3d_backward', 'raises', 'grid_sample:grid_sample_backward', _TAPS),
    KernelRow('cudnn_grid_sampler_backward', 'silent', 'grid_sample:cudnn_grid_sample_backward',
              _TAPS, 'bilinear grid_sample with align_corners=True'),
)

_INDEXING = (
    # Sources do not agree on whether 2.0 is in order for more than one dimension: taken as not.
    KernelRow('scatter_add', 'raises', 'scatter:scatter_add', _FLAT,
              'FreeAnchor, CornerNet, two-stage DETRs (backward of gather)', until=(2, 1)),
    KernelRow('scatter_add_', 'raises', 'scatter:scatter_add_', _FLAT,
              'backward of gather', until=(2, 1)),
    KernelRow('scatter_add', 'good', '', 'a sorted index_put under the flag', since=(2, 1)),
    KernelRow('index_put', 'good', '',
              'sorted by destination on CUDA, serial on a CPU under the flag',
              'every anchor head and RoI head'),
    KernelRow('index_add', 'good', '', 'an index_put under the flag'),
    KernelRow('index_copy', 'good', '', 'an index_put under the flag'),
    KernelRow('scatter.src', 'raises', '', _UNUSED, until=(2, 1)),
    KernelRow('scatter.src', 'good', '', 'an index_put under the flag', since=(2, 1)),
    KernelRow('scatter_reduce.two', 'raises', '', _UNUSED, until=(2, 1)),
    KernelRow('scatter_reduce.two', 'good', '',
              'sum and mean under the flag; "prod" raises, and no detector uses it', since=(2, 1)),
    KernelRow('embedding_dense_backward', 'good', '', 'sorted by destination', 'queries of DETRs'),
    KernelRow('_embedding_bag_backward', 'good', '', 'mode "sum" is sorted by destination'),
    KernelRow('roll', 'good', '', _GATHER, 'Swin'),
)

TABLE: tuple[KernelRow, ...] = (*_RESIZE, *_POOLING, *_PADDING, *_SELECTION, *_SUMS, *_GRIDS,
                                *_INDEXING)
