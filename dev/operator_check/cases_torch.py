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
# Where torch keeps what it calls instead of a kernel under the deterministic flag.
_PYTHON = 'torch._decomp.decompositions'


def _of_map(run: Callable[[Tensor], Any], axes: int = 2, channels: int = 256
            ) -> Callable[[Inputs], OperatorCall]:
    """A function of one feature map (or volume, or line), with its gradient."""
    def make(s: Inputs) -> OperatorCall:
        sizes = {1: (4096,), 2: (100, 168), 3: _VOLUME}[axes]
        counts = [max(8, size // s.by) for size in sizes]
        width = s.channels(channels) // (4 if axes == 3 else 1)
        return OperatorCall(dict(x=s.normal(2, width, *counts)), {}, lambda x: run(x))
    return make


def _resize(mode: str, axes: int, **options: Any) -> Callable[[Inputs], OperatorCall]:
    # nearest may take different pixels in float32 and float64, at an integer position
    factor = 2 if mode == 'nearest' else 2.3 if axes < 3 else 1.6
    return _of_map(lambda x: F.interpolate(x, scale_factor=factor, mode=mode, **options), axes, 64)


def _grid(axes: int, align: bool = False) -> Callable[[Inputs], OperatorCall]:
    def make(s: Inputs) -> OperatorCall:
        x = s.feature(256, 100, 168) if axes == 2 else s.normal(1, 16, 8, 12, 14)
        points = (s.count(400), s.count(100)) if axes == 2 else (4, s.count(100), 16)
        # all samples near few pixels
        grid = s.normal(1, *points, axes) * 0.05 + s.uniform(1, 1, points[-1], axes) * 1.6 - 0.8
        return OperatorCall(dict(x=x, grid=grid if axes == 2 else grid.view(1, *points, axes)), {},
                            lambda x, grid: F.grid_sample(x, grid, align_corners=align))
    return make


def _few_values(s: Inputs, *shape: int) -> Tensor:
    """Many equal numbers."""
    return (s.normal(*shape) * 10).round() / 10


def _selection(run: Callable[[Tensor], Any], *shape: int) -> Callable[[Inputs], OperatorCall]:
    return lambda s: OperatorCall(dict(x=_few_values(s, *(s.count(n) for n in shape))), {},
                                  lambda x: run(x), double=False)


def _value(run: Callable[[Tensor], Any]) -> Callable[[Inputs], OperatorCall]:
    """A selection of one value; no gradient, which may go to any of equal values."""
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


def _weighted_counts(s: Inputs) -> OperatorCall:
    index = torch.randint(0, 50, (s.count(20000),), generator=s.random)
    return OperatorCall({}, dict(index=index, weights=s.normal(len(index))),
                        lambda index, weights: torch.bincount(index, weights))


def _near_one(x: Tensor) -> Tensor:
    return 1 + x.flatten() * 1e-4


def _put(s: Inputs) -> OperatorCall:
    index = torch.randint(0, 50, (s.count(20000),), generator=s.random)
    return OperatorCall({}, dict(x=s.normal(64), index=index, source=s.normal(len(index))),
                        lambda x, index, source: x.clone().put_(index, source, accumulate=True))


def _unpool(axes: int) -> Callable[[Inputs], OperatorCall]:
    def make(s: Inputs) -> OperatorCall:
        shape = (s.count(64),) * 2 if axes == 2 else (4, s.count(32), s.count(32))
        area = 1
        for size in shape:
            area *= 2 * size
        # every destination has several sources; the last one stays
        index = torch.randint(0, max(1, area // 8), (1, 16, *shape), generator=s.random)
        pool = (F.max_unpool2d, F.max_unpool3d)[axes - 2]
        return OperatorCall(dict(x=s.normal(1, 16, *shape)), dict(index=index),
                            lambda x, index: pool(x, index, 2).detach())
    return make


def _fractional(axes: int) -> Callable[[Inputs], OperatorCall]:
    def make(s: Inputs) -> OperatorCall:
        pool = (F.fractional_max_pool2d, F.fractional_max_pool3d)[axes - 2]
        shape = [max(12, n // s.by) for n in ((100, 168) if axes == 2 else _VOLUME)]
        return OperatorCall(dict(x=s.normal(1, 16, *shape)), dict(samples=s.uniform(1, 16, axes)),
                            lambda x, samples: pool(x, 3, output_ratio=(0.7,) * axes,
                                                    _random_samples=samples))
    return make


def _ctc(s: Inputs) -> OperatorCall:
    length = s.count(64)
    return OperatorCall(dict(x=s.normal(length, 4, 20)),
                        dict(target=torch.randint(1, 20, (4, 6), generator=s.random)),
                        lambda x, target: F.ctc_loss(x.log_softmax(2), target, [length] * 4,
                                                     [6] * 4))


def _replicated(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2) * (x.dim() - 2), 'replicate')


def _reflected(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2) * (x.dim() - 2), 'reflect')


CASES: dict[str, OperatorCase] = {
    'linear resize': OperatorCase(('upsample_linear1d_backward',), _resize('linear', 1)),
    'bilinear resize': OperatorCase(
        ('upsample_bilinear2d_backward', f'{_PYTHON}._upsample_linear_vec',
         f'{_PYTHON}.upsample_bilinear2d_vec'),
        _resize('bilinear', 2)),
    'trilinear resize': OperatorCase(('upsample_trilinear3d_backward',), _resize('trilinear', 3)),
    'bicubic resize': OperatorCase(('upsample_bicubic2d_backward',), _resize('bicubic', 2)),
    'bilinear resize, antialiased': OperatorCase(
        ('_upsample_bilinear2d_aa_backward',), _resize('bilinear', 2, antialias=True)),
    'bicubic resize, antialiased': OperatorCase(
        ('_upsample_bicubic2d_aa_backward',), _resize('bicubic', 2, antialias=True)),
    'nearest resize': OperatorCase(('upsample_nearest2d_backward',), _resize('nearest', 2)),
    'nearest resize, 1-D': OperatorCase(('upsample_nearest1d_backward',), _resize('nearest', 1)),
    'nearest resize, 3-D': OperatorCase(('upsample_nearest3d_backward',), _resize('nearest', 3)),
    'adaptive average pool': OperatorCase(
        ('_adaptive_avg_pool2d_backward',), _of_map(lambda x: F.adaptive_avg_pool2d(x, 7))),
    'adaptive average pool, 3-D': OperatorCase(
        ('_adaptive_avg_pool3d_backward',), _of_map(lambda x: F.adaptive_avg_pool3d(x, 3), 3)),
    'average pool': OperatorCase(
        ('avg_pool2d_backward',), _of_map(lambda x: F.avg_pool2d(x, 3, 2, 1))),
    'average pool, 3-D': OperatorCase(
        ('avg_pool3d_backward',), _of_map(lambda x: F.avg_pool3d(x, 3, 2, 1), 3)),
    'adaptive max pool': OperatorCase(
        ('adaptive_max_pool2d_backward',), _of_map(lambda x: F.adaptive_max_pool2d(x, 30))),
    'adaptive max pool, 3-D': OperatorCase(
        ('adaptive_max_pool3d_backward',), _of_map(lambda x: F.adaptive_max_pool3d(x, 6), 3)),
    'max pool': OperatorCase(
        ('max_pool2d_with_indices_backward',), _of_map(lambda x: F.max_pool2d(x, 5, 1, 2))),
    'max pool, 3-D': OperatorCase(
        ('max_pool3d_with_indices_backward', f'{_PYTHON}.max_pool3d_with_indices'),
        _of_map(lambda x: F.max_pool3d(x, 3, 1, 1), 3)),
    'fractional max pool': OperatorCase(('fractional_max_pool2d_backward',), _fractional(2)),
    'fractional max pool, 3-D': OperatorCase(('fractional_max_pool3d_backward',), _fractional(3)),
    'max unpool': OperatorCase(('max_unpool2d',), _unpool(2)),
    'max unpool, 3-D': OperatorCase(('max_unpool3d',), _unpool(3)),
    'reflection pad, 1-D': OperatorCase(('reflection_pad1d_backward',), _of_map(_reflected, 1)),
    'reflection pad': OperatorCase(('reflection_pad2d_backward',), _of_map(_reflected)),
    'reflection pad, 3-D': OperatorCase(('reflection_pad3d_backward',), _of_map(_reflected, 3)),
    'replication pad, 1-D': OperatorCase(('replication_pad1d_backward',), _of_map(_replicated, 1)),
    'replication pad': OperatorCase(
        ('replication_pad2d_backward', f'{_PYTHON}._replication_pad'),
        _of_map(_replicated)),
    'replication pad, 3-D': OperatorCase(('replication_pad3d_backward',), _of_map(_replicated, 3)),
    'topk': OperatorCase(
        ('topk',), _selection(lambda x: torch.topk(x, x.shape[-1] // 4), 16, 20000),
        reference=_stable_topk),
    'sort': OperatorCase(
        ('sort',), _selection(lambda x: torch.sort(x, descending=True), 16, 20000),
        reference=lambda x: torch.sort(x, descending=True, stable=True)),
    'kthvalue': OperatorCase(('kthvalue',), _value(lambda x: torch.kthvalue(x, 5))),
    'median': OperatorCase(('median.dim',), _value(lambda x: torch.median(x, -1))),
    'nanmedian': OperatorCase(('nanmedian.dim',), _value(lambda x: torch.nanmedian(x, -1))),
    'maximum': OperatorCase(
        ('max.dim', 'argmax'),
        _selection(lambda x: (*torch.max(x, -1), torch.argmax(x, 0)), 64, 2000)),
    'cumsum': OperatorCase(
        ('cumsum', 'cumsum_'), _of_map(lambda x: x.cumsum(2) + x.clone().cumsum_(3))),
    'cumprod, 1-D': OperatorCase(
        ('cumprod', 'cumprod_'), _of_map(lambda x: _near_one(x).cumprod(0)
                                         + _near_one(x).clone().cumprod_(0))),
    'logcumsumexp, 1-D': OperatorCase(
        ('_logcumsumexp',), _of_map(lambda x: x.flatten().logcumsumexp(0))),
    'NLL per pixel': OperatorCase(
        ('nll_loss2d_forward', 'nll_loss2d_backward'), _labels(F.nll_loss, (200, 336))),
    'NLL': OperatorCase(
        ('nll_loss_forward',),
        _labels(lambda x, labels: F.nll_loss(x.flatten(0, 1).t()[:, :20].contiguous(),
                                             labels.flatten()[:x.shape[2]]), (20000,))),
    'bincount with weights': OperatorCase(('bincount',), _weighted_counts),
    'put': OperatorCase(('put_',), _put),
    'histogram': OperatorCase(
        ('histc',),
        lambda s: OperatorCall({}, dict(x=s.normal(4096)), lambda x: torch.histc(x, 20)),
        expect='raises'),
    'CTC': OperatorCase(('_ctc_loss_backward',), _ctc, expect='raises'),
    'embedding bag, max': OperatorCase(
        ('_embedding_bag',),
        _embedded(lambda table, index: F.embedding_bag(index, table, mode='max')), expect='raises'),
    'embedding bag': OperatorCase(
        ('_embedding_bag_backward',),
        _embedded(lambda table, index: F.embedding_bag(index, table, mode='sum'))),
    'embedding': OperatorCase(
        ('embedding_dense_backward',), _embedded(lambda table, index: F.embedding(index, table))),
    'grid sample': OperatorCase(('grid_sampler_2d_backward',), _grid(2)),
    'grid sample, 3-D': OperatorCase(('grid_sampler_3d_backward',), _grid(3)),
    'grid sample by cuDNN': OperatorCase(('cudnn_grid_sampler_backward',), _grid(2, True)),
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
}
