"""Cases of torch's own operators, one or more per row of ``mmrepro.ops.aten.TABLE``."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .operator_cases import Inputs, OperatorCall, OperatorCase

__all__ = ['CASES']

_VOLUME = (16, 64, 64)
_SIZES = {1: (4096,), 2: (100, 168), 3: _VOLUME}  # by number of axes
# Where torch keeps what it calls instead of a kernel under the deterministic flag.
_PYTHON = 'torch._decomp.decompositions'


def _of_map(run: Callable[[Tensor], Any], axes: int = 2, channels: int = 256
            ) -> Callable[[Inputs], OperatorCall]:
    """Return a function of one feature map (or volume, or line), with its gradient."""
    def make(s: Inputs) -> OperatorCall:
        counts = [max(8, size // s.by) for size in _SIZES[axes]]
        width = s.channels(channels) // (4 if axes == 3 else 1)
        return OperatorCall(dict(x=s.normal(2, width, *counts)), {}, lambda x: run(x))
    return make


def _resize(mode: str, axes: int) -> Callable[[Inputs], OperatorCall]:
    # nearest may take different pixels in float32 and float64, at an integer position
    factor = 2 if mode == 'nearest' else 2.3
    return _of_map(lambda x: F.interpolate(x, scale_factor=factor, mode=mode), axes, 64)


def _grid(align: bool = False) -> Callable[[Inputs], OperatorCall]:
    def make(s: Inputs) -> OperatorCall:
        points = s.count(400), s.count(100)
        # all samples near few pixels
        grid = s.normal(1, *points, 2) * 0.05 + s.uniform(1, 1, points[-1], 2) * 1.6 - 0.8
        return OperatorCall(dict(x=s.feature(256, 100, 168), grid=grid), {},
                            lambda x, grid: F.grid_sample(x, grid, align_corners=align))
    return make


def _few_values(s: Inputs, *shape: int) -> Tensor:
    """Many equal numbers."""
    return (s.normal(*shape) * 10).round() / 10


def _selection(run: Callable[[Tensor], Any], *shape: int) -> Callable[[Inputs], OperatorCall]:
    return lambda s: OperatorCall(dict(x=_few_values(s, *(s.count(n) for n in shape))), {},
                                  lambda x: run(x), double=False)


def _value(run: Callable[[Tensor], Any]) -> Callable[[Inputs], OperatorCall]:
    """Return a selection of one value; no gradient, which may go to any of equal values."""
    return lambda s: OperatorCall({}, dict(x=_few_values(s, s.count(64), s.count(2000))),
                                  lambda x: run(x)[0], double=False)


def _stable_topk(x: Tensor) -> Any:
    values, indices = torch.sort(x, descending=True, stable=True)
    k = x.shape[-1] // 4
    return values[..., :k], indices[..., :k]


def _indexed(run: Callable[[Tensor, Tensor, Tensor], Any]) -> Callable[[Inputs], OperatorCall]:
    """Many rows onto few: (x, source, index)."""
    def make(s: Inputs) -> OperatorCall:
        rows, width = s.count(20000), s.channels(256)
        index = torch.randint(0, 50, (rows,), generator=s.random)
        return OperatorCall(dict(x=s.normal(64, width), source=s.normal(rows, width)),
                            dict(index=index), lambda x, source, index: run(x, source, index))
    return make


def _wide(index: Tensor, source: Tensor) -> Tensor:
    return index[:, None].expand_as(source)


def _labels(run: Callable[[Tensor, Tensor], Any], shape: Sequence[int]
            ) -> Callable[[Inputs], OperatorCall]:
    def make(s: Inputs) -> OperatorCall:
        sizes = [max(8, n // s.by) for n in shape]
        labels = torch.randint(0, 20, (2, *sizes), generator=s.random)
        return OperatorCall(dict(logits=s.normal(2, 20, *sizes)), dict(labels=labels),
                            lambda logits, labels: run(logits.log_softmax(1), labels))
    return make


def _embedded(run: Callable[[Tensor, Tensor], Any]) -> Callable[[Inputs], OperatorCall]:
    return lambda s: OperatorCall(dict(table=s.normal(50, 256)),
                                  dict(index=torch.randint(0, 50, (s.count(4000), 8),
                                                           generator=s.random)),
                                  lambda table, index: run(table, index))


def _replicated(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2, 3, 2), 'replicate')


def _reflected(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2, 3, 2), 'reflect')


def _refused(operator: str, run: Callable[[Tensor], Any], *shape: int) -> OperatorCase:
    """Return an operator that nothing replaces: it raises, forward or backward."""
    return OperatorCase((operator,), lambda s: OperatorCall(dict(x=s.normal(*shape)), {}, run),
                        expect='raises')


def _unpool(axes: int) -> Callable[[Tensor], Any]:
    pool, unpool = F.max_pool2d, F.max_unpool2d
    if axes == 3:
        pool, unpool = F.max_pool3d, F.max_unpool3d
    return lambda x: unpool(*pool(x.detach(), 2, return_indices=True), 2)


def _ctc(x: Tensor) -> Tensor:
    target = torch.arange(1, 7, device=x.device).expand(4, 6)
    return F.ctc_loss(x.log_softmax(2), target, [len(x)] * 4, [6] * 4)


def _weighted_counts(x: Tensor) -> Tensor:
    return torch.bincount(torch.arange(len(x), device=x.device) % 5, x.detach())


def _embedded_max(x: Tensor) -> Tensor:
    return F.embedding_bag(torch.arange(24, device=x.device).view(4, 6) % len(x), x, mode='max')


CASES: dict[str, OperatorCase] = {
    'bilinear resize': OperatorCase(
        ('upsample_bilinear2d_backward', f'{_PYTHON}._upsample_linear_vec',
         f'{_PYTHON}.upsample_bilinear2d_vec'),
        _resize('bilinear', 2)),
    'bicubic resize': OperatorCase(('upsample_bicubic2d_backward',), _resize('bicubic', 2)),
    'nearest resize': OperatorCase(('upsample_nearest2d_backward',), _resize('nearest', 2)),
    'nearest resize, 1-D': OperatorCase(('upsample_nearest1d_backward',), _resize('nearest', 1)),
    'nearest resize, 3-D': OperatorCase(('upsample_nearest3d_backward',), _resize('nearest', 3)),
    'adaptive average pool': OperatorCase(
        ('_adaptive_avg_pool2d_backward',), _of_map(lambda x: F.adaptive_avg_pool2d(x, 7))),
    'average pool': OperatorCase(
        ('avg_pool2d_backward',), _of_map(lambda x: F.avg_pool2d(x, 3, 2, 1))),
    'adaptive max pool': OperatorCase(
        ('adaptive_max_pool2d_backward',), _of_map(lambda x: F.adaptive_max_pool2d(x, 30))),
    'max pool': OperatorCase(
        ('max_pool2d_with_indices_backward',), _of_map(lambda x: F.max_pool2d(x, 5, 1, 2))),
    'reflection pad': OperatorCase(('reflection_pad2d_backward',), _of_map(_reflected)),
    'replication pad': OperatorCase(
        ('replication_pad2d_backward', f'{_PYTHON}._replication_pad'),
        _of_map(_replicated)),
    'topk': OperatorCase(
        ('topk',), _selection(lambda x: torch.topk(x, x.shape[-1] // 4), 16, 20000),
        reference=_stable_topk),
    'sort': OperatorCase(
        ('sort',), _selection(lambda x: torch.sort(x, descending=True), 16, 20000),
        reference=lambda x: torch.sort(x, descending=True, stable=True)),
    'kthvalue': OperatorCase(('kthvalue',), _value(lambda x: torch.kthvalue(x, 5))),
    'maximum': OperatorCase(
        ('max.dim', 'argmax'),
        _selection(lambda x: (*torch.max(x, -1), torch.argmax(x, 0)), 64, 2000)),
    'cumsum': OperatorCase(
        ('cumsum', 'cumsum_'), _of_map(lambda x: x.cumsum(2) + x.clone().cumsum_(3))),
    'NLL per pixel': OperatorCase(
        ('nll_loss2d_forward', 'nll_loss2d_backward'),
        _labels(F.nll_loss, (200, 336))),
    'NLL': OperatorCase(
        ('nll_loss_forward',),
        _labels(lambda x, labels: F.nll_loss(x.flatten(0, 1).t()[:, :20].contiguous(),
                                             labels.flatten()[:x.shape[2]]), (20000,))),
    'embedding bag': OperatorCase(
        ('_embedding_bag_backward',),
        _embedded(lambda table, index: F.embedding_bag(index, table, mode='sum'))),
    'embedding': OperatorCase(
        ('embedding_dense_backward',), _embedded(lambda table, index: F.embedding(index, table))),
    'grid sample': OperatorCase(('grid_sampler_2d_backward',), _grid()),
    'grid sample by cuDNN': OperatorCase(('cudnn_grid_sampler_backward',), _grid(True)),
    'scatter_add': OperatorCase(
        ('scatter_add', 'scatter_add_'),
        _indexed(lambda x, source, index: x.scatter_add(0, _wide(index, source), source))),
    'scatter_reduce': OperatorCase(
        ('scatter_reduce.two',),
        _indexed(lambda x, source, index: x.scatter_reduce(0, _wide(index, source), source,
                                                           'mean'))),
    'index_put': OperatorCase(
        ('index_put',),
        _indexed(lambda x, source, index: x.index_put((index,), source, accumulate=True))),
    'indexed write': OperatorCase(
        ('_index_put_impl_',),
        _indexed(lambda x, source, index: x.index_put((index,), source))),
    'index_add': OperatorCase(
        ('index_add',), _indexed(lambda x, source, index: x.index_add(0, index, source))),
    'index_copy': OperatorCase(
        ('index_copy',),
        _indexed(lambda x, source, index: x.index_copy(0, index.unique(),
                                                       source[:len(index.unique())]))),
    'scatter': OperatorCase(
        ('scatter.src',),
        _indexed(lambda x, source, index: x.scatter(
            0, _wide(index.unique(), x[:len(index.unique())]), source[:len(index.unique())]))),
    'gather': OperatorCase(
        ('scatter_add',),
        _indexed(lambda x, source, index: x.gather(0, _wide(index, source)) + source)),
    'roll': OperatorCase(('roll',), _of_map(lambda x: torch.roll(x, (3, 5), (2, 3)))),
    'linear resize': _refused('upsample_linear1d_backward', lambda x: F.interpolate(
        x, scale_factor=2.3, mode='linear'), 2, 4, 32),
    **{f'{mode} resize, antialiased': _refused(
        f'_upsample_{mode}2d_aa_backward', lambda x, mode=mode: F.interpolate(
            x, scale_factor=2.3, mode=mode, antialias=True), 2, 4, 8, 9)
        for mode in ('bilinear', 'bicubic')},
    'adaptive average pool, 3-D': _refused(
        '_adaptive_avg_pool3d_backward', lambda x: F.adaptive_avg_pool3d(x, 3), 2, 4, 5, 8, 9),
    'adaptive max pool, 3-D': _refused(
        'adaptive_max_pool3d_backward', lambda x: F.adaptive_max_pool3d(x, 3), 2, 4, 5, 8, 9),
    'average pool, 3-D': _refused(
        'avg_pool3d_backward', lambda x: F.avg_pool3d(x, 3, 2, 1), 2, 4, 5, 8, 9),
    'fractional max pool': _refused('fractional_max_pool2d_backward', lambda x: (
        F.fractional_max_pool2d(x, 3, output_ratio=(0.7,) * 2)), 2, 4, 12, 12),
    'fractional max pool, 3-D': _refused('fractional_max_pool3d_backward', lambda x: (
        F.fractional_max_pool3d(x, 3, output_ratio=(0.7,) * 3)), 2, 4, 12, 12, 12),
    'max unpool': _refused('max_unpool2d', _unpool(2), 2, 4, 8, 8),
    'max unpool, 3-D': _refused('max_unpool3d', _unpool(3), 2, 4, 8, 8, 8),
    'reflection pad, 1-D': _refused(
        'reflection_pad1d_backward', lambda x: F.pad(x, (3, 2), 'reflect'), 2, 4, 9),
    'reflection pad, 3-D': _refused(
        'reflection_pad3d_backward', lambda x: F.pad(x, (3, 2) * 3, 'reflect'), 2, 4, 6, 6, 6),
    'grid sample, 3-D': _refused('grid_sampler_3d_backward', lambda x: F.grid_sample(
        x, torch.zeros(2, 3, 3, 3, 3, device=x.device), align_corners=False), 2, 4, 6, 6, 6),
    'median': _refused('median', lambda x: torch.median(x, -1), 4, 20),
    'nanmedian': _refused('nanmedian', lambda x: torch.nanmedian(x, -1), 4, 20),
    'cumprod': _refused('cumprod', lambda x: x.cumprod(0), 64),
    'cumprod in place': _refused('cumprod_', lambda x: x.clone().cumprod_(0), 64),
    'cumprod into a tensor': _refused('cumprod.out', lambda x: torch.cumprod(
        x.detach(), 0, out=torch.empty_like(x)), 64),
    'logcumsumexp': _refused('_logcumsumexp', lambda x: x.logcumsumexp(0), 64),
    'logcumsumexp into a tensor': _refused('_logcumsumexp.out', lambda x: torch.logcumsumexp(
        x.detach(), 0, out=torch.empty_like(x)), 64),
    'bincount with weights': _refused('bincount', _weighted_counts, 64),
    'put': _refused('put_', lambda x: x.clone().put_(
        torch.arange(6, device=x.device) % 3, x.detach()[:6], accumulate=True), 64),
    'index_reduce': _refused('index_reduce', lambda x: x.detach().index_reduce(
        0, torch.arange(6, device=x.device) % 3, x.detach()[:6], 'prod'), 64),
    'histogram': _refused('histc', lambda x: torch.histc(x.detach(), 20), 64),
    'CTC': _refused('_ctc_loss_backward', _ctc, 64, 4, 20),
    'embedding bag, max': _refused('_embedding_bag_backward', _embedded_max, 50, 16),
}
