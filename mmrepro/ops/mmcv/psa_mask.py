"""Point-wise spatial attention: each position's mask of neighbours becomes a map of the image.

Semantics of mmcv 2.1.0 (csrc/pytorch/cpu/psamask.cpp): channel ``(i, j)`` of the mask at position
``p`` belongs to the position at ``p + (i, j) - half``. 'distribute' writes it to the row of ``p``
and 'collect' to the row of the neighbour. Values are copied, none is added up.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_shape, require_tensor

_COLLECT = 0


def _offsets(count: int, half: int, device: torch.device) -> Tensor:
    """(count, count) the mask's row that position p has for position q; it may be outside."""
    position = torch.arange(count, device=device)
    return position[None, :] - position[:, None] + half


def _channels(height: int, width: int, mask: tuple[int, int], half: tuple[int, int],
              device: torch.device) -> tuple[Tensor, Tensor]:
    """(H * W, H * W) the channel of each position for each other one, and whether there is one."""
    rows, columns = _offsets(height, half[0], device), _offsets(width, half[1], device)
    inside = (((rows >= 0) & (rows < mask[0]))[:, None, :, None]
              & ((columns >= 0) & (columns < mask[1]))[None, :, None, :])
    channel = rows.clamp(0, mask[0] - 1)[:, None, :, None] * mask[1] + columns.clamp(
        0, mask[1] - 1)[None, :, None, :]
    pixels = height * width
    return channel.view(pixels, pixels), inside.reshape(pixels, pixels)


def _check(operator: str, psa_type: int, num_: int, size: tuple[int, int], mask: tuple[int, int],
           masks: Tensor, maps: Tensor) -> None:
    require(psa_type in (0, 1), operator,
            f'psa_type must be 0 (collect) or 1 (distribute), got {psa_type}')
    require_tensor(operator, 'the masks', masks, (num_, mask[0] * mask[1], *size))
    require_shape(operator, 'the maps', maps, (num_, size[0] * size[1], *size))
    require(masks.dtype == maps.dtype, operator,
            f'dtypes do not match: {describe(masks)}, {describe(maps)}')


def psamask_forward(input: Tensor, output: Tensor, psa_type: int, num_: int, h_feature: int,
                    w_feature: int, h_mask: int, w_mask: int, half_h_mask: int,
                    half_w_mask: int) -> None:
    """Copy the masks ``input`` (N, h_mask * w_mask, H, W) into ``output`` (N, H * W, H, W).

    Elements of ``output`` that no mask reaches are not changed.
    """
    operator = 'psamask_forward'
    _check(operator, psa_type, num_, (h_feature, w_feature), (h_mask, w_mask), input, output)
    if output.numel() == 0:
        return
    pixels = h_feature * w_feature
    channel, inside = _channels(h_feature, w_feature, (h_mask, w_mask),
                                (half_h_mask, half_w_mask), input.device)
    found = input.detach().reshape(num_, -1, pixels).transpose(1, 2).gather(
        2, channel.expand(num_, pixels, pixels))  # [position, neighbour]
    if psa_type == _COLLECT:
        found, inside = found.transpose(1, 2), inside.t()
    before = output.view(found.shape)
    before.copy_(torch.where(inside, found, before))


def psamask_backward(grad_output: Tensor, grad_input: Tensor, psa_type: int, num_: int,
                     h_feature: int, w_feature: int, h_mask: int, w_mask: int, half_h_mask: int,
                     half_w_mask: int) -> None:
    """Compute the transpose of :func:`psamask_forward`: each gradient comes from one element.

    Channels that lie outside the image are not changed.
    """
    operator = 'psamask_backward'
    _check(operator, psa_type, num_, (h_feature, w_feature), (h_mask, w_mask), grad_input,
           grad_output)
    if grad_output.numel() == 0:
        return
    pixels, device = h_feature * w_feature, grad_output.device
    grad = grad_output.detach().reshape(num_, pixels, pixels)
    if psa_type == _COLLECT:
        grad = grad.transpose(1, 2)
    rows = torch.arange(h_mask, device=device) - half_h_mask
    columns = torch.arange(w_mask, device=device) - half_w_mask
    row = torch.arange(h_feature, device=device)[:, None] + rows  # (H, h_mask)
    column = torch.arange(w_feature, device=device)[:, None] + columns
    inside = (((row >= 0) & (row < h_feature))[:, None, :, None]
              & ((column >= 0) & (column < w_feature))[None, :, None, :]).reshape(pixels, -1)
    neighbour = (row.clamp(0, h_feature - 1)[:, None, :, None] * w_feature
                 + column.clamp(0, w_feature - 1)[None, :, None, :]).view(pixels, -1)
    found = grad.gather(2, neighbour.expand(num_, *neighbour.shape))  # [position, channel]
    before = grad_input.view(num_, -1, pixels).transpose(1, 2)
    grad_input.copy_(torch.where(inside, found, before).transpose(1, 2).reshape(grad_input.shape))
