"""The table of torch's own operators: their behavior under the deterministic flag.

One row per operator and span of releases. ``torch`` is the behavior of torch on CUDA:

    raises   raises, naming the operator
    silent   adds in the order in which threads arrive, without an error
    slow     deterministic, by a detour that costs time and memory
    ties     deterministic, but the choice among equal values is not specified
    good     deterministic
    unknown  no source says; the operator guard reports it where it runs

Rows with a ``target`` are replaced (or refused, by ``dispatch.refuse``), the others are not;
``why`` is the reason. A row named ``module.attribute`` is a *Python override*: torch takes its
detour in Python, before the dispatcher, so that function is replaced. ``kernel_families.ini`` has
what a reason holds for by the dozen, as patterns; a test holds every operator of the dispatcher
against both, but those that are pointwise, views or compositions by torch's own tags. This module
does not import torch.

Sources: "documented" is the documentation of ``torch.use_deterministic_algorithms`` (2.13); files
are of ``aten/src/ATen/native``, read in versions around 2.x, not measured. Spans of releases, in
pytorch/pytorch: cumsum #140887 (2.6), kthvalue #165762 (2.10), bilinear since 2.1, trilinear
#154239 (2.9), replication padding #148633 (2.8; 2-D since 2.1), scatter and scatter_reduce #98060
(2.1), max_pool3d #179104 (2.12). topk does not specify the order of equal values: on NVIDIA the
selection goes by prefix scans and the sort of the results is not stable; on ROCm the selection
takes equal values as threads arrive (#186653, which was reverted).
"""
from __future__ import annotations

import functools
import importlib
import re
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ..operator_table import read_names

BEHAVIORS = ('raises', 'silent', 'slow', 'ties', 'good', 'unknown')
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
_LAST = "of equal indices the last one writes; sums are torch's sorted ones"
_REFUSED = 'no detector uses it; refused by name, because torch does not refuse it'


class KernelRow(NamedTuple):
    """One operator over a span of releases."""

    operator: str  # name in aten with its overload, or module.attribute
    torch: str  # a word of BEHAVIORS
    target: str  # module:function or module:function(literals) of the replacement, or ''
    why: str  # why the replacement is deterministic, or why there is none
    users: str = ''  # detectors and parts that reach it
    since: tuple[int, int] = _FIRST  # the first release (major, minor) that the row applies to
    until: tuple[int, int] = _LATER  # the first one that it does not apply to any more
    devices: tuple[str, ...] = _CUDA  # on which it is replaced
    key: str = ''  # of the dispatcher, if not the device's: above it, where torch's kernel remains

    @property
    def overrides_python(self) -> bool:
        """Whether the row names a Python function instead of an operator of ``aten``."""
        return self.operator.startswith('torch.')

    def load(self) -> Callable[..., Any]:
        """Return the function of ``target``, with its literals as the first arguments."""
        module, _, expression = self.target.partition(':')
        name, _, arguments = expression.rstrip(')').partition('(')
        function = getattr(importlib.import_module(f'mmrepro.ops.aten.{module}'), name)
        return functools.partial(function, *arguments.split(', ')) if arguments else function


class KernelFamily(NamedTuple):
    """Operators without a row in :data:`TABLE` that share a reason."""

    pattern: str  # of a name without the underscore of in-place forms, or name.overload
    torch: str  # a word of BEHAVIORS
    why: str


TABLE: tuple[KernelRow, ...] = (
    # backward passes of maps
    KernelRow('upsample_bicubic2d_backward', 'raises', 'separable:resize_backward(cubic)', _AXES,
              'position embeddings of vision transformers (ViTDet)'),
    KernelRow('upsample_bilinear2d_backward', 'raises', 'separable:resize_backward(linear)', _AXES,
              'SOLO, SOLOv2, HTC, SCNet, PanopticFPN, DyHead, NAS-FCOS, FPG, RTMDet-Ins, CondInst, '
              'BoxInst, YOLACT, Mask2Former, HRFPN, PVT'),
    KernelRow('torch._decomp.decompositions.upsample_bilinear2d_vec', 'slow',
              'separable:upsample_bilinear',
              _DETOUR, 'F.interpolate', since=(2, 1), until=(2, 4)),
    KernelRow('torch._decomp.decompositions._upsample_linear_vec', 'slow',
              'separable:upsample_bilinear', _DETOUR, 'F.interpolate', since=(2, 2)),
    KernelRow('_adaptive_avg_pool2d_backward', 'raises', 'separable:adaptive_avg_pool_backward',
              _AXES, 'HTC, SCNet (1x1 outputs are a mean and never get here)'),
    KernelRow('adaptive_max_pool2d_backward', 'raises', 'sums:adaptive_max_pool_backward', _FLAT,
              'Libra R-CNN (BFP)'),
    KernelRow('reflection_pad2d_backward', 'raises', 'separable:pad_backward(reflection)', _AXES,
              'DetectoRS (SAC)'),
    KernelRow('replication_pad2d_backward', 'raises', 'separable:pad_backward(replication)', _AXES,
              'CondInst, BoxInst'),
    KernelRow('torch._decomp.decompositions._replication_pad', 'slow',
              'separable:replication_pad', _DETOUR, 'F.pad(mode="replicate")', since=(2, 1)),
    KernelRow('grid_sampler_2d_backward', 'raises', 'grid_sample:grid_sample_backward', _TAPS,
              'Mask2Former, PointRend; Deformable DETR in pure Python'),
    KernelRow('cudnn_grid_sampler_backward', 'silent', 'grid_sample:cudnn_grid_sample_backward',
              _TAPS, 'bilinear grid_sample with align_corners=True'),
    # selection by value
    KernelRow('topk', 'silent', 'selection:topk', _TIES,
              'RPN, ATSS, SimOTA, DETR queries, every dense head', devices=_BOTH),
    KernelRow('sort', 'ties', 'selection:sort', _TIES,
              'candidates before NMS, PISA, rank losses', devices=_BOTH),
    KernelRow('kthvalue', 'raises', 'selection:kthvalue', _TIES,
              'Dynamic R-CNN, CenterNet (update)', until=(2, 10)),
    KernelRow('kthvalue', 'good', '', 'the lowest index of equal values',
              'Dynamic R-CNN, CenterNet (update)', since=(2, 10)),
    # sums, and writes by index
    KernelRow('cumsum', 'raises', 'sums:cumsum', _STEPS,
              'sine position encodings: DETR, Deformable DETR, DINO, Mask2Former and all relatives',
              until=(2, 6)),
    KernelRow('cumsum_', 'raises', 'sums:cumsum_', _STEPS, until=(2, 6)),
    # of one dimension: a scan whose blocks take the sums of their neighbors as these arrive
    *(KernelRow(name, 'silent', f'dispatch:refuse({name})', _REFUSED)
      for name in ('cumprod', 'cumprod_', 'cumprod.out', '_logcumsumexp', '_logcumsumexp.out',
                   'adaptive_max_pool3d_backward', 'adaptive_max_pool3d_backward.grad_input')),
    KernelRow('nll_loss2d_forward', 'raises', 'sums:nll_loss2d_forward', 'gathered, then torch.sum',
              'cross_entropy of maps in losses of users; MMDetection reduces itself'),
    # Sources do not agree on whether 2.0 is in order for more than one dimension: taken as not.
    KernelRow('_index_put_impl_', 'slow', 'indexed_writes:index_put', _LAST,
              'assigners, targets of every head', key='BackendSelect'),
    KernelRow('scatter_add', 'raises', 'sums:scatter_add', _FLAT,
              'FreeAnchor, CornerNet, two-stage DETRs (backward of gather)', until=(2, 1)),
    KernelRow('scatter_add_', 'raises', 'sums:scatter_add_', _FLAT,
              'backward of gather', until=(2, 1)),
)

FAMILIES = tuple(KernelFamily('|'.join(names), *section.split(': ', 1)) for section, names in
                 read_names(Path(__file__).with_name('kernel_families.ini')).items())


def family_of(operator: str) -> KernelFamily | None:
    """Return the first of :data:`FAMILIES` that fits the name of an operator, or None."""
    packet, dot, overload = operator.partition('.')
    name = packet.rstrip('_')
    return next((family for family in FAMILIES if re.fullmatch(family.pattern, name)
                 or re.fullmatch(family.pattern, f'{name}{dot}{overload}')), None)
