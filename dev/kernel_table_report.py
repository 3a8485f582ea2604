"""The table of torch's own operators as Markdown: ``python -m dev.kernel_table_report``.

What mmrepro replaces is ``mmrepro/ops/aten/kernel_table.py``. This table has the reasons, and the
operators that stay as they are.
"""
from __future__ import annotations

from typing import NamedTuple

from mmrepro.ops.aten.kernel_table import FIRST, LATER, TABLE

__all__ = ['BEHAVIOURS', 'OPERATORS', 'Operator', 'lines']

BEHAVIOURS = ('raises', 'silent', 'slow', 'ties', 'good')  # docs/reference/operators.md
# Why a replacement is deterministic, or why an operator is not replaced.
_AXES = 'one filter per axis; every element is a sum over its own readers in ascending order'
_TAPS = 'corners are sorted by destination (stable), then every pixel is one ordered sum'
_FLAT = 'one flat index_put, which sorts by destination and adds in order'
_STEPS = 'log2(n) operations on whole tensors'
_TIES = 'equal values by lower index, on a CPU and on CUDA alike'
_DETOUR = 'straight to the kernel, whose backward is replaced here; no detour over index_put'
_GATHER = 'every element of the gradient reads its own sources'
_UNUSED = 'no detector uses it; torch refuses it by name, which is the promise'


class Operator(NamedTuple):
    """One operator over a span of releases."""

    name: str  # in aten, or module.attribute
    torch: str  # a word of BEHAVIOURS: on CUDA, under the deterministic flag
    why: str  # why the replacement is deterministic, or why there is none
    users: str = ''  # detectors and parts that reach it
    since: tuple[int, int] = FIRST
    until: tuple[int, int] = LATER


OPERATORS: tuple[Operator, ...] = (
    Operator('upsample_linear1d_backward', 'raises', _AXES, '1-D necks of third parties'),
    Operator('upsample_bilinear2d_backward', 'raises', _AXES,
             'SOLO, SOLOv2, HTC, SCNet, PanopticFPN, DyHead, NAS-FCOS, FPG, RTMDet-Ins, CondInst, '
              'BoxInst, YOLACT, Mask2Former, HRFPN'),
    Operator('upsample_trilinear3d_backward', 'raises', _AXES, 'video necks of third parties'),
    Operator('upsample_bicubic2d_backward', 'raises', _AXES,
             'position embeddings that are resized while they train'),
    Operator('_upsample_bilinear2d_aa_backward', 'raises', _AXES,
             'antialiased resize inside a model'),
    Operator('_upsample_bicubic2d_aa_backward', 'raises', _AXES,
             'antialiased resize inside a model'),
    Operator('torch._decomp.decompositions.upsample_bilinear2d_vec', 'slow', _DETOUR,
             'F.interpolate', since=(2, 1), until=(2, 4)),
    Operator('torch._decomp.decompositions._upsample_linear_vec', 'slow', _DETOUR, 'F.interpolate',
             since=(2, 2)),
    Operator('upsample_nearest2d_backward', 'good', _GATHER, 'FPN, PAFPN, BFP, HRNet'),
    Operator('upsample_nearest1d_backward', 'good', _GATHER),
    Operator('upsample_nearest3d_backward', 'good', _GATHER),
    Operator('_adaptive_avg_pool2d_backward', 'raises', _AXES,
             'HTC, SCNet (1x1 outputs are a mean and never get here)'),
    Operator('_adaptive_avg_pool3d_backward', 'raises', _AXES),
    Operator('avg_pool3d_backward', 'raises', _AXES),
    Operator('avg_pool2d_backward', 'good', _GATHER, 'ResNet-D, Res2Net'),
    Operator('adaptive_max_pool2d_backward', 'raises', _FLAT, 'Libra R-CNN (BFP)'),
    Operator('adaptive_max_pool3d_backward', 'silent', _FLAT),
    Operator('max_pool2d_with_indices_backward', 'good', _GATHER, 'stem of every ResNet, SPP'),
    Operator('max_pool3d_with_indices_backward', 'raises', _FLAT),
    Operator('torch._decomp.decompositions.max_pool3d_with_indices', 'slow', _DETOUR,
             'F.max_pool3d', since=(2, 12)),
    Operator('fractional_max_pool2d_backward', 'raises', _FLAT),
    Operator('fractional_max_pool3d_backward', 'raises', _FLAT),
    Operator('max_unpool2d', 'raises',
             'the last source of a position stays (torch raises on a CPU too)'),
    Operator('max_unpool3d', 'raises',
             'the last source of a position stays (torch raises on a CPU too)'),
    Operator('reflection_pad1d_backward', 'raises', _AXES),
    Operator('reflection_pad2d_backward', 'raises', _AXES),
    Operator('reflection_pad3d_backward', 'raises', _AXES),
    Operator('replication_pad1d_backward', 'raises', _AXES),
    Operator('replication_pad2d_backward', 'raises', _AXES, 'CondInst, BoxInst'),
    Operator('replication_pad3d_backward', 'raises', _AXES),
    Operator('torch._decomp.decompositions._replication_pad', 'slow', _DETOUR,
             'F.pad(mode="replicate")', since=(2, 1)),
    Operator('topk', 'silent', _TIES, 'RPN, ATSS, SimOTA, DETR queries, every dense head'),
    Operator('sort', 'ties', _TIES, 'candidates before NMS, PISA, rank losses'),
    Operator('kthvalue', 'raises', _TIES, 'Dynamic R-CNN, CenterNet (update)', until=(2, 10)),
    Operator('kthvalue', 'good', 'the lowest index of equal values',
             'Dynamic R-CNN, CenterNet (update)', since=(2, 10)),
    Operator('median.dim', 'raises', _TIES),
    Operator('nanmedian.dim', 'raises', _TIES),
    Operator('max.dim', 'good', 'the first of equal values, by its documentation', 'assigners'),
    Operator('argmax', 'good', 'the first of equal values, by its documentation', 'assigners'),
    Operator('cumsum', 'raises', _STEPS,
             'sine position encodings: DETR, Deformable DETR, DINO, Mask2Former and all relatives',
             until=(2, 6)),
    Operator('cumsum_', 'raises', _STEPS, until=(2, 6)),
    Operator('cumsum', 'good', 'a scan in a fixed order under the flag', since=(2, 6)),
    Operator('cumprod', 'silent', _STEPS),
    Operator('cumprod_', 'silent', _STEPS),
    Operator('_logcumsumexp', 'silent', _STEPS),
    Operator('nll_loss2d_forward', 'raises', 'gathered and summed by torch.sum',
             'third-party losses (MMDetection reduces itself)'),
    Operator('nll_loss2d_backward', 'good', 'one write per pixel'),
    Operator('nll_loss_forward', 'good', 'one block sums', 'all classification losses'),
    Operator('bincount', 'raises', _FLAT),
    Operator('histc', 'raises', _UNUSED),
    Operator('put_', 'raises', _FLAT),
    Operator('_ctc_loss_backward', 'raises', _UNUSED),
    Operator('_embedding_bag', 'raises', _UNUSED + ' (mode "max" only; "sum" is good)'),
    Operator('grid_sampler_2d_backward', 'raises', _TAPS,
             'Mask2Former, PointRend; Deformable DETR in pure Python'),
    Operator('grid_sampler_3d_backward', 'raises', _TAPS),
    Operator('cudnn_grid_sampler_backward', 'silent', _TAPS,
             'bilinear grid_sample with align_corners=True'),
    Operator('scatter_add', 'raises', _FLAT,
             'FreeAnchor, CornerNet, two-stage DETRs (backward of gather)', until=(2, 1)),
    Operator('scatter_add_', 'raises', _FLAT, 'backward of gather', until=(2, 1)),
    Operator('scatter_add', 'good', 'a sorted index_put under the flag', since=(2, 1)),
    Operator('index_put', 'good', 'sorted by destination on CUDA, serial on a CPU under the flag',
             'every anchor head and RoI head'),
    Operator('index_add', 'good', 'an index_put under the flag'),
    Operator('index_copy', 'good', 'an index_put under the flag'),
    Operator('scatter.src', 'raises', _UNUSED, until=(2, 1)),
    Operator('scatter.src', 'good', 'an index_put under the flag', since=(2, 1)),
    Operator('scatter_reduce.two', 'raises', _UNUSED, until=(2, 1)),
    Operator('scatter_reduce.two', 'good',
             'sum and mean under the flag; "prod" raises, and no detector uses it', since=(2, 1)),
    Operator('embedding_dense_backward', 'good', 'sorted by destination', 'queries of DETRs'),
    Operator('_embedding_bag_backward', 'good', 'mode "sum" is sorted by destination'),
    Operator('roll', 'good', _GATHER, 'Swin'),
)


def _span(row: Operator) -> str:
    first, last = '.'.join(map(str, row.since)), f'{row.until[0]}.{row.until[1] - 1}'
    if row.until == LATER:
        return 'all' if row.since == FIRST else f'from {first}'
    return f'to {last}' if row.since == FIRST else f'{first} to {last}'


def _ours(row: Operator) -> str:
    replaced = {(kernel.operator, kernel.since, kernel.until): kernel for kernel in TABLE}
    kernel = replaced.get((row.name, row.since, row.until))
    if kernel is None:
        return 'left'
    module = kernel.target.partition(':')[0]
    return f'`{module}`' + (', CPU too' if 'cpu' in kernel.devices else '')


def lines() -> list[str]:
    """Return the table, the reasons that its last column numbers, and the users of operators."""
    reasons = {why: number for number, why in enumerate(
        dict.fromkeys(row.why for row in OPERATORS), 1)}
    names = [f'`{row.name.replace("torch._decomp.decompositions", "decompositions")}`'
             for row in OPERATORS]
    users: dict[str, list[str]] = {}
    for name, row in zip(names, OPERATORS):
        if row.users and name not in users.setdefault(row.users, []):
            users[row.users].append(name)
    return ['| operator | releases | torch, on CUDA | mmrepro | reason |',
            '|---|---|---|---|--:|',
            *(f'| {name} | {_span(row)} | {row.torch} | {_ours(row)} | {reasons[row.why]} |'
              for name, row in zip(names, OPERATORS)),
            '', 'Reasons:', '', *(f'{number}. {why}' for why, number in reasons.items()),
            '', '### Who reaches them', '',
            *(f'- {", ".join(found)}: {used}' for used, found in users.items())]


if __name__ == '__main__':
    print('\n'.join(lines()))
