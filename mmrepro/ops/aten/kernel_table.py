"""The table of torch's own operators that are replaced under the deterministic flag.

A row holds for a span of releases. A row named ``module.attribute`` is a *Python override*: torch
takes a detour in Python, before the dispatcher, so that function is replaced. What torch does on
CUDA without each replacement, and which operators stay as they are, is in
``docs/reference/operators.md``. This module does not import torch.

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

# Spans of releases. 2.0 is the oldest that mmrepro runs on.
FIRST, LATER = (2, 0), (99, 0)


class KernelRow(NamedTuple):
    """The replacement of an operator over a span of releases."""

    operator: str  # name in aten with its overload, or module.attribute
    target: str  # module:function of the replacement, or module:function(literals)
    since: tuple[int, int] = FIRST  # the first release (major, minor) that the row applies to
    until: tuple[int, int] = LATER  # the first one that it does not apply to any more
    devices: tuple[str, ...] = ('cuda',)  # on which it is replaced

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


def _rows(target: str, *operators: str, **applies: Any) -> tuple[KernelRow, ...]:
    return tuple(KernelRow(operator, target, **applies) for operator in operators)


_PYTHON = 'torch._decomp.decompositions'
TABLE: tuple[KernelRow, ...] = (
    # one filter per axis; every element is a sum over its own readers in ascending order
    *_rows('separable:resize_backward(linear)', 'upsample_linear1d_backward',
           'upsample_bilinear2d_backward', 'upsample_trilinear3d_backward'),
    *_rows('separable:resize_backward(cubic)', 'upsample_bicubic2d_backward'),
    *_rows('separable:resize_backward(linear_aa)', '_upsample_bilinear2d_aa_backward'),
    *_rows('separable:resize_backward(cubic_aa)', '_upsample_bicubic2d_aa_backward'),
    *_rows('separable:adaptive_avg_pool_backward(2)', '_adaptive_avg_pool2d_backward'),
    *_rows('separable:adaptive_avg_pool_backward(3)', '_adaptive_avg_pool3d_backward'),
    *_rows('separable:avg_pool3d_backward', 'avg_pool3d_backward'),
    *(row for kind in ('reflection', 'replication') for row in _rows(
        f'separable:pad_backward({kind})', *(f'{kind}_pad{axes}d_backward' for axes in (1, 2, 3)))),
    # straight to the kernel, whose backward is replaced here; no detour over index_put
    *_rows('python_overrides:upsample_linear', f'{_PYTHON}.upsample_bilinear2d_vec',
           since=(2, 1), until=(2, 4)),
    *_rows('python_overrides:upsample_linear', f'{_PYTHON}._upsample_linear_vec', since=(2, 2)),
    *_rows('python_overrides:replication_pad', f'{_PYTHON}._replication_pad', since=(2, 1)),
    *_rows('python_overrides:max_pool3d_with_indices', f'{_PYTHON}.max_pool3d_with_indices',
           since=(2, 12)),
    # one flat index_put, which sorts by destination and adds in order
    *_rows('scatter:max_pool_backward(2)', 'adaptive_max_pool2d_backward',
           'fractional_max_pool2d_backward'),
    *_rows('scatter:max_pool_backward(3)', 'adaptive_max_pool3d_backward',
           'max_pool3d_with_indices_backward', 'fractional_max_pool3d_backward'),
    *_rows('scatter:bincount', 'bincount'),
    *_rows('scatter:put_', 'put_'),
    # Sources do not agree on whether 2.0 is in order for more than one dimension: taken as not.
    *_rows('scatter:scatter_add', 'scatter_add', until=(2, 1)),
    *_rows('scatter:scatter_add_', 'scatter_add_', until=(2, 1)),
    # the last source of a position stays (torch raises on a CPU too)
    *_rows('scatter:max_unpool(2)', 'max_unpool2d', devices=('cpu', 'cuda')),
    *_rows('scatter:max_unpool(3)', 'max_unpool3d', devices=('cpu', 'cuda')),
    # equal values by lower index, on a CPU and on CUDA alike
    *_rows('selection:topk', 'topk', devices=('cpu', 'cuda')),
    *_rows('selection:sort', 'sort', devices=('cpu', 'cuda')),
    *_rows('selection:kthvalue', 'kthvalue', until=(2, 10)),
    *_rows('selection:median', 'median.dim'),
    *_rows('selection:nanmedian', 'nanmedian.dim'),
    # log2(n) operations on whole tensors; torch's cumprod of one dimension is a scan whose blocks
    # take the sums of their neighbours as these arrive
    *_rows('sums:cumsum', 'cumsum', until=(2, 6)),
    *_rows('sums:cumsum_', 'cumsum_', until=(2, 6)),
    *_rows('sums:cumprod', 'cumprod'),
    *_rows('sums:cumprod_', 'cumprod_'),
    *_rows('sums:logcumsumexp', '_logcumsumexp'),
    # gathered and summed by torch.sum
    *_rows('sums:nll_loss2d_forward', 'nll_loss2d_forward'),
    # corners are sorted by destination (stable), then every pixel is one ordered sum
    *_rows('grid_sample:grid_sample_backward', 'grid_sampler_2d_backward',
           'grid_sampler_3d_backward'),
    *_rows('grid_sample:cudnn_grid_sample_backward', 'cudnn_grid_sampler_backward'),
)
