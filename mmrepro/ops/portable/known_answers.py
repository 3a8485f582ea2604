"""Results that a CPU has to reproduce before it may train with ``cpu='portable'``.

The reasons in ``table`` say why the results cannot depend on the CPU; these digests are the test,
on every CPU that anybody uses. They also notice a release of torch or oneDNN that computes in
another way on some CPUs. ``known_answers.json`` has, per release of torch and name of a result, the
first digits of its SHA-256, the same on the CPUs that docs/explanation/portable.md lists.
"""
from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import DeterminismError
from .table import ROUTED


def numbers(*shape: int, scale: float = 1.) -> Tensor:
    """Return a float32 tensor of numbers between -scale and scale, by arithmetic of integers."""
    count = torch.Size(shape).numel()
    steps = (torch.arange(count) * 48271 + 11) * 69621 % 65521 - 32760
    return (steps.double() * (scale / 32768)).float().view(shape)


def _product(rows: int, common: int, columns: int) -> list[Tensor]:
    a, b = numbers(rows, common), numbers(columns, common)
    return [F.linear(a, b, numbers(columns)), a.t().contiguous().t() @ b.t(),
            a.double() @ b.t().double()]


def _gradients(function: Callable[..., Tensor], *leaves: Tensor) -> list[Tensor]:
    leaves = tuple(leaf.requires_grad_() for leaf in leaves)
    with torch.enable_grad():
        result = function(*leaves)
        return [result, *torch.autograd.grad(result, leaves, numbers(*result.shape))]


def _convolution(images: int, channels: int, size: int, filters: int, kernel: int,
                 **settings: Any) -> list[Tensor]:
    groups = settings.get('groups', 1)
    return _gradients(lambda x, weight: F.conv2d(x, weight, **settings),
                      numbers(images, channels, size, size),
                      numbers(filters, channels // groups, kernel, kernel))


def _optimized(kind: Any, **settings: Any) -> list[Tensor]:
    parameter = torch.nn.Parameter(numbers(300))
    optimizer = kind([parameter], lr=0.01, **settings)
    for step in range(3):
        parameter.grad = numbers(300, scale=step + 1.)
        optimizer.step()
    return [parameter]


def _bags() -> list[Tensor]:
    # no index twice: the order of equal ones depends on deterministic=True
    indices, offsets = torch.arange(60) * 7 % 60, torch.arange(0, 60, 5)
    return _gradients(lambda table, weights: F.embedding_bag(
        indices, table, offsets, mode='sum', per_sample_weights=weights),
        numbers(60, 24), numbers(60))


def _draws() -> list[Tensor]:
    generator, dtype = torch.Generator().manual_seed(7), torch.float32
    return [torch.randn(100, generator=generator, dtype=dtype),
            torch.randn(5, generator=generator, dtype=dtype),
            torch.rand(10, generator=generator, dtype=dtype),
            torch.empty(100, dtype=dtype).bernoulli_(0.3, generator=generator),
            torch.empty(40, dtype=dtype).exponential_(generator=generator)]


# the range of arguments of a function, where it is not -20 to 20
_RANGES = {'asin': 1., 'acos': 1., 'erfinv': 0.999, 'erf': 4., 'erfc': 4.}
_POSITIVE = ('sqrt', 'log', 'log2', 'log10')


def _function(name: str) -> list[Tensor]:
    x = numbers(500, scale=_RANGES.get(name, 20.))
    x = x.abs() + 2**-20 if name in _POSITIVE else x
    return [getattr(torch, name)(x), getattr(torch, name)(x.double())]


def _rows() -> dict[str, Callable[[], Sequence[Tensor]]]:
    """Return the computations, by name."""
    x = numbers(6, 40, scale=8.)
    image = numbers(2, 8, 9, 11)
    return {
        **{f'product {shape}': functools.partial(_product, *shape)
           for shape in ((3, 3, 3), (17, 33, 5), (64, 64, 64), (50, 256, 12))},
        'products of a batch': lambda: [
            torch.bmm(numbers(40, 3, 3), numbers(40, 3, 3)),
            torch.baddbmm(numbers(2, 50, 40), numbers(2, 50, 32), numbers(2, 32, 40)),
            numbers(33, 70) @ numbers(70), numbers(999) @ numbers(999)],
        'convolution 1x1': lambda: _convolution(2, 16, 10, 24, 1),
        'convolution 1x1, strided': lambda: _convolution(2, 16, 10, 24, 1, stride=2),
        'convolution 3x3': lambda: _convolution(2, 16, 10, 24, 3, padding=1),
        'convolution 3x3, one image': lambda: _convolution(1, 8, 7, 12, 3, padding=1),
        'convolution 3x3, strided': lambda: _convolution(2, 32, 14, 32, 3, stride=2, padding=1),
        'convolution 3x3, dilated': lambda: _convolution(1, 4, 9, 6, 3, dilation=2),
        'convolution 3x3, dilated by 8': lambda: _convolution(1, 128, 16, 16, 3, padding=8,
                                                              dilation=8),
        'convolution 3x3, four channels a group': lambda: _convolution(2, 16, 9, 16, 3, groups=4),
        'convolution 3x3, by channel': lambda: _convolution(2, 16, 9, 16, 3, groups=16),
        'convolution 7x7': lambda: _convolution(1, 3, 24, 16, 7, stride=2, padding=3),
        'convolution, transposed': lambda: _gradients(
            lambda x, weight: F.conv_transpose2d(x, weight, stride=2), numbers(1, 8, 6, 6),
            numbers(8, 5, 2, 2)),
        'attention': lambda: _gradients(
            F.scaled_dot_product_attention, *(numbers(1, 2, 20, 8) for _ in range(3))),
        'weighted sums of rows': _bags,
        **{row.operator: functools.partial(_function, row.operator) for row in ROUTED
           if row.target.startswith('functions:') and '.' not in row.operator},
        'functions of torch': lambda: [
            function(x) for function in (
                torch.sigmoid, torch.expm1, torch.exp2, torch.rsqrt, F.gelu, F.silu, F.softplus,
                F.logsigmoid, lambda x: x.softmax(1), lambda x: x.log_softmax(1),
                lambda x: x.logsumexp(1), lambda x: x.abs() ** 0.5, lambda x: x.abs() ** 0.3,
                lambda x: torch.atan2(x, x.flip(1)))],
        'sums': lambda: [x.sum(), x.mean(0), x.std(1), x.norm(), x.cumsum(1), torch.cdist(x, x),
                         x.prod(1)],
        'norms': lambda: [
            *_gradients(lambda x: F.batch_norm(x, None, None, training=True), image),
            *_gradients(lambda x: F.group_norm(x, 4), image.detach()),
            *_gradients(lambda x: F.layer_norm(x, (11, )), image.detach())],
        'interpolation': lambda: [
            *_gradients(lambda x: F.interpolate(x, scale_factor=2, mode='bilinear'),
                        image.detach()), F.avg_pool2d(image.detach(), 3),
            F.grid_sample(image.detach(), numbers(2, 5, 5, 2), align_corners=False)],
        'SGD': lambda: _optimized(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
        'AdamW': lambda: _optimized(torch.optim.AdamW),
        'random numbers': _draws,
    }


def compute() -> dict[str, str]:
    """Return the digest of every result, as this CPU computes it on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return {name: _digest(row()) for name, row in _rows().items()}
    finally:
        torch.set_num_threads(threads)


def _digest(results: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()[:8]


def answers(version: str = torch.__version__) -> dict[str, str]:
    """Return the recorded digests of a release of torch.

    Raises:
        DeterminismError: there are none.
    """
    known: dict[str, dict[str, str]] = json.loads(
        Path(__file__).with_suffix('.json').read_text(encoding='utf-8'))
    release = '.'.join(version.split('.')[:2])
    if release not in known:
        raise DeterminismError(
            f"randomness.numerics.cpu='portable': no results are known for torch {version}; "
            f"allowed are torch {', '.join(known)}, or cpu='avx2'")
    return known[release]


@functools.cache
def check() -> None:
    """Compare the results of this CPU with the recorded digests.

    Raises:
        DeterminismError: a result differs; names it.
    """
    known, found = answers(), compute()
    wrong = [name for name in {**known, **found} if known.get(name) != found.get(name)]
    if wrong:
        raise DeterminismError(
            "randomness.numerics.cpu='portable': on this CPU, or with this build of torch, "
            f'{len(wrong)} of {len(found)} known results have different bits: '
            f'{"; ".join(wrong)}. A '
            "run would not have the bits that other machines have. Use cpu='avx2' for the same "
            'bits among machines like this one.')
