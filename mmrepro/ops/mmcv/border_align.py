"""Border alignment: the greatest bilinear sample along each side of a box.

Signature: ``mmcv/ops/border_align.py``; formula: ``border_align_cuda_kernel.cuh`` (mmcv 2.1.0).
The sides are top, left, bottom, right; each reads its own quarter of the channels.
"""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import gather, sampling
from ..contract import require, require_tensor
from .maximum import keep_greatest, scatter_to_winners


def _check(feature: Tensor, boxes: Tensor, pool_size: int) -> None:
    name = 'border_align'
    require_tensor(name, 'input', feature, (None,) * 4)
    require_tensor(name, 'boxes', boxes, (len(feature), None, 4), (feature.dtype,))
    require(feature.shape[2] * feature.shape[3] > 0 or boxes.numel() == 0, name,
            f'boxes {tuple(boxes.shape)} on input {tuple(feature.shape)}, which has no pixels')
    require(feature.shape[1] % 4 == 0, name,
            f'the channels of input {tuple(feature.shape)} are not divisible by 4')
    require(pool_size > 0, name, f'pool_size must be positive, got {pool_size}')


def _visits(shape: torch.Size, boxes: Tensor, pool_size: int,
            accumulate: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows and weights (N * boxes * 4, 4) of the samples 0 to pool_size of every side.

    mmcv's forward adds up the steps along a side and its backward multiplies them; the two round
    differently. ``accumulate`` selects the former.
    """
    n, _, height, width = shape
    x1, y1, x2, y2 = boxes.to(gather.COMPUTE[boxes.dtype]).unbind(-1)
    step_x, step_y = (x2 - x1) / pool_size, (y2 - y1) / pool_size
    none = torch.zeros_like(x1)
    start = torch.stack((y1, y1, y2, y2), -1), torch.stack((x1, x1, x2, x2), -1)
    step = (torch.stack((none, step_y, none, -step_y), -1),
            torch.stack((step_x, none, -step_x, none), -1))
    image = torch.arange(n, dtype=torch.int32, device=boxes.device).view(-1, 1, 1, 1)
    side = torch.arange(4, dtype=torch.int32, device=boxes.device).view(1, 1, 4, 1)
    y, x = start
    for i in range(pool_size + 1):
        if i:
            y, x = (at + s if accumulate else first + s * i
                    for at, s, first in zip((y, x), step, start))
        corners = sampling.clamped_corners(y, x, height, width)
        row = (corners.row + image * (height * width)) * 4 + side
        row = torch.where(corners.live, row, n * height * width * 4)
        yield row.view(-1, 4), corners.weight.view(-1, 4)


def border_align_forward(input: Tensor, boxes: Tensor, output: Tensor, argmax_idx: Tensor,
                         pool_size: int) -> None:
    """Fill ``output`` and ``argmax_idx`` (N, C, boxes, 4).

    ``input`` is (N, 4 * C, H, W): channels for the top, left, bottom and right side; ``boxes`` is
    (N, boxes, 4): x1, y1, x2, y2 in pixels of the map. ``argmax_idx`` is int32, the number of the
    greatest of the pool_size + 1 samples.
    """
    _check(input, boxes, pool_size)
    if output.numel() == 0:
        return
    rows = gather.rows_of(input).view(-1, input.shape[1] // 4)
    step = gather.chunk_rows(input.device, input.shape[0] * input.shape[1])
    for a in range(0, boxes.shape[1], step):
        part = slice(a, a + step)
        visits = _visits(input.shape, boxes[:, part], pool_size, accumulate=True)
        values = (gather.gather_sum(rows, row, weight) for row, weight in visits)
        best = next(values)
        # NaN wins as the first sample only, because nothing is greater than it
        winner = keep_greatest(best, values, nan=float('-inf'))
        gather.put_rows(output[:, :, part], best)
        gather.put_rows(argmax_idx[:, :, part], winner)


def border_align_backward(grad_output: Tensor, boxes: Tensor, argmax_idx: Tensor,
                          grad_input: Tensor, pool_size: int) -> None:
    """Add the gradient of :func:`border_align_forward` to ``grad_input`` (N, 4 * C, H, W)."""
    _check(grad_input, boxes, pool_size)
    if grad_output.numel() == 0 or grad_input.numel() == 0:
        return
    n, c, h, w = grad_input.shape
    grad, winner = gather.bags(grad_output), gather.bags(argmax_idx)
    total = grad.new_zeros((n * h * w * 4, c // 4))

    def scatter(source: Tensor, row: Tensor, weight: Tensor) -> None:
        total.add_(gather.scatter_sum(source, row, weight, len(total)))

    scatter_to_winners(grad, winner, _visits(grad_input.shape, boxes, pool_size, accumulate=False),
                       scatter, first=0)
    gather.add_rows(grad_input, total.view(-1, c))
