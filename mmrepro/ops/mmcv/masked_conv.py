"""Operators that copy values to where a mask says: masked convolution, and PSAMask.

Masked convolution: im2col and col2im of selected pixels. Semantics of mmcv 2.1.0
(csrc/common/cuda/masked_conv2d_cuda_kernel.cuh), which implements them for CUDA only, without a
backward. mmcv's Python selects pixels with ``nonzero``, so every pixel occurs once.

PSAMask, point-wise spatial attention: each position's mask of neighbours becomes a map of the
image. Semantics of mmcv 2.1.0 (csrc/pytorch/cpu/psamask.cpp): channel ``(i, j)`` of the mask at
position ``p`` belongs to the position at ``p + (i, j) - half``. 'distribute' writes it to the row
of ``p`` and 'collect' to the row of the neighbour. Values are copied, none is added up.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_shape, require_tensor

# mmcv's number of the PSA type 'collect'; 'distribute' is 1.
_COLLECT = 0


def _check_pixels(operator: str, rows: Tensor, columns: Tensor) -> None:
    for name, tensor in (('mask_h_idx', rows), ('mask_w_idx', columns)):
        require_dtype(operator, name, tensor, (torch.long,))
    require(rows.dim() == 1 and rows.shape == columns.shape, operator,
            f'shapes do not match: mask_h_idx {describe(rows)}, mask_w_idx {describe(columns)}')


def masked_im2col_forward(im: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, col: Tensor,
                          kernel_h: int, kernel_w: int, pad_h: int, pad_w: int) -> None:
    """Write the windows around the selected pixels to ``col``; 0 outside the image.

    ``im`` is (1, C, H, W), and ``col`` (C * kernel_h * kernel_w, K) for the K pixels whose rows and
    columns are ``mask_h_idx`` and ``mask_w_idx``, (K,) int64. The stride is 1.
    """
    operator = 'masked_im2col_forward'
    require_tensor(operator, 'im', im, (1, None, None, None))
    _check_pixels(operator, mask_h_idx, mask_w_idx)
    _, channels, height, width = im.shape
    count, window = len(mask_h_idx), kernel_h * kernel_w
    fits = tuple(col.shape) == (channels * window, count) and col.dtype == im.dtype
    require(fits and col.is_contiguous(), operator,
            f'col must be contiguous, ({channels * window}, {count}), of the dtype of im '
            f'{describe(im)}, got {describe(col)}')
    if col.numel() == 0:
        return
    device = im.device
    rows = mask_h_idx - pad_h + torch.arange(kernel_h, device=device)[:, None]
    columns = mask_w_idx - pad_w + torch.arange(kernel_w, device=device)[:, None]
    inside = (((rows >= 0) & (rows < height))[:, None]
              & ((columns >= 0) & (columns < width))[None]).flatten()
    pixel = rows.clamp(0, height - 1)[:, None] * width + columns.clamp(0, width - 1)[None]
    table = col.view(channels, -1)
    torch.index_select(im.detach().reshape(channels, -1), 1, pixel.flatten(), out=table)
    table.masked_fill_(~inside, 0)


def masked_col2im_forward(col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor,
                          height: int, width: int, channels: int) -> None:
    """Write column k of ``col`` (C, K) to pixel k of ``im`` (1, C, H, W); others are not changed.

    Raises:
        RuntimeError: shapes or dtypes do not match, or a pixel lies outside the image.
    """
    operator = 'masked_col2im_forward'
    _check_pixels(operator, mask_h_idx, mask_w_idx)
    require_shape(operator, 'im', im, (1, channels, height, width))
    require_shape(operator, 'col', col, (channels, len(mask_h_idx)))
    require(im.is_contiguous() and im.dtype == col.dtype, operator,
            f'im must be contiguous and of the dtype of col: {describe(im)}, {describe(col)}')
    if col.numel() == 0:
        return
    # CUDA's index kernels assert this themselves, without a synchronization
    if not im.is_cuda:
        low, high = (torch.stack([f(mask_h_idx), f(mask_w_idx)]).tolist()
                     for f in (torch.min, torch.max))
        require(min(low) >= 0 and high[0] < height and high[1] < width, operator,
                f'pixels from ({low[0]}, {low[1]}) to ({high[0]}, {high[1]}) are not all in the '
                f'image ({height}, {width})')
    pixel = mask_h_idx * width + mask_w_idx
    im.view(channels, -1).index_copy_(1, pixel, col.detach())


# ------------------------------------------------------------------------------------ PSAMask

def _offsets(count: int, half: int, device: torch.device) -> Tensor:
    """Return the mask's row that position p has for position q, (count, count); maybe outside."""
    position = torch.arange(count, device=device)
    return position[None, :] - position[:, None] + half


def _channels(height: int, width: int, mask: tuple[int, int], half: tuple[int, int],
              device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the channel of each position for each other one, and whether there is one.

    Both are (H * W, H * W).
    """
    rows, columns = _offsets(height, half[0], device), _offsets(width, half[1], device)
    inside = (((rows >= 0) & (rows < mask[0]))[:, None, :, None]
              & ((columns >= 0) & (columns < mask[1]))[None, :, None, :])
    channel = rows.clamp(0, mask[0] - 1)[:, None, :, None] * mask[1] + columns.clamp(
        0, mask[1] - 1)[None, :, None, :]
    pixels = height * width
    return channel.view(pixels, pixels), inside.reshape(pixels, pixels)


def _check_masks(operator: str, psa_type: int, num_: int, size: tuple[int, int],
                 mask: tuple[int, int], masks: Tensor, maps: Tensor) -> None:
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
    _check_masks(operator, psa_type, num_, (h_feature, w_feature), (h_mask, w_mask), input, output)
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
    _check_masks(operator, psa_type, num_, (h_feature, w_feature), (h_mask, w_mask), grad_input,
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
