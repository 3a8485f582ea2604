"""Masked convolution: im2col and col2im of selected pixels.

Semantics of mmcv 2.1.0 (csrc/common/cuda/masked_conv2d_cuda_kernel.cuh), which implements them for
CUDA only, without a backward. mmcv's Python selects pixels with ``nonzero``, so every pixel occurs
once.
"""
from __future__ import annotations

import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_shape, require_tensor


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
                f'pixel ({high[0]}, {high[1]}) lies outside the image ({height}, {width})')
    pixel = mask_h_idx * width + mask_w_idx
    im.view(channels, -1).index_copy_(1, pixel, col.detach())
