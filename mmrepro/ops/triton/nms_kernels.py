"""NMS in two kernels: all conflicts as bits, then one sweep over them.

Overlaps are computed as on a CPU (:func:`mmrepro.ops.mmcv.box_iou.overlaps`), operation by
operation, so the same boxes are kept. Each box has a row of bits, one for each later box that it
conflicts with; the sweep processes the boxes in the order of their scores, 32 at a time.
"""
from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..mmcv import nms as plain
from ..mmcv.box_iou import columns
from ..mmcv.nms import rank

_WORD = 32
# Boxes, and so rows of bits, of a program of the first kernel.
_ROWS = 64
# With more boxes the bits take too much memory; the PyTorch form works in blocks.
_MOST = 1 << 15


@triton.jit(do_not_specialize=['count', 'words'])
def _conflict_kernel(boxes, bits_of, count, words, threshold,
                     OFFSET: tl.constexpr, ROWS: tl.constexpr, WORD: tl.constexpr):
    """Write the conflicts of some boxes with the 32 boxes of a word."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * WORD + tl.arange(0, WORD)
    row, column = i < count, j < count
    bits = tl.zeros([ROWS], dtype=tl.int32)
    # a word before all of these boxes has no later box
    if tl.program_id(1) * WORD + WORD > tl.program_id(0) * ROWS:
        ax1 = tl.load(boxes + i, mask=row, other=0.)[:, None]
        ay1 = tl.load(boxes + count + i, mask=row, other=0.)[:, None]
        ax2 = tl.load(boxes + 2 * count + i, mask=row, other=0.)[:, None]
        ay2 = tl.load(boxes + 3 * count + i, mask=row, other=0.)[:, None]
        a_area = tl.load(boxes + 4 * count + i, mask=row, other=0.)[:, None]
        bx1 = tl.load(boxes + j, mask=column, other=0.)[None, :]
        by1 = tl.load(boxes + count + j, mask=column, other=0.)[None, :]
        bx2 = tl.load(boxes + 2 * count + j, mask=column, other=0.)[None, :]
        by2 = tl.load(boxes + 3 * count + j, mask=column, other=0.)[None, :]
        b_area = tl.load(boxes + 4 * count + j, mask=column, other=0.)[None, :]
        # if a corner is NaN so is the area, and the comparison is false
        width = tl.minimum(ax2, bx2) - tl.maximum(ax1, bx1)
        height = tl.minimum(ay2, by2) - tl.maximum(ay1, by1)
        if OFFSET:
            width += OFFSET
            height += OFFSET
        inter = tl.maximum(width, 0.) * tl.maximum(height, 0.)
        overlap = tl.div_rn(inter, a_area + b_area - inter)
        hit = (overlap > threshold) & (j[None, :] > i[:, None]) & row[:, None] & column[None, :]
        bit = tl.arange(0, WORD)[None, :]
        bits = tl.sum(hit.to(tl.int32) << bit, 1)
    tl.store(bits_of + i.to(tl.int64) * words + tl.program_id(1), bits, mask=row)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit(do_not_specialize=['count', 'words'])
def _sweep_kernel(bits_of, kept_of, count, words, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Keep the boxes that no kept box drops, in order; a single program."""
    word = tl.arange(0, WORDS)
    exists = word < words
    lane = tl.arange(0, WORD)
    dropped = tl.zeros([WORDS], dtype=tl.int32)
    long = tl.full([], 0, tl.int64)  # offsets may pass what 32 bits hold
    for current in range(0, words):
        gone = tl.sum(tl.where(word == current, dropped, 0), 0)
        # among the 32 boxes of this word: the bits that each has in the word itself
        first = current * WORD
        rows = (long + first + lane) * words
        own = tl.load(bits_of + rows + current, mask=first + lane < count, other=0)
        for i in range(0, WORD):
            mine = tl.sum(tl.where(lane == i, own, 0), 0)
            gone = tl.where((gone >> i) & 1 == 0, gone | mine, gone)
        stays = ((gone >> lane) & 1) == 0
        stays = stays & (first + lane < count)
        tl.store(kept_of + first + lane, stays.to(tl.int8), mask=first + lane < count)
        # one load for all of them: a loop would wait for the memory 32 times
        later = tl.load(bits_of + rows[:, None] + word[None, :],
                        mask=stays[:, None] & exists[None, :], other=0)
        dropped |= tl.reduce(later, 0, _either)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Run :func:`mmrepro.ops.mmcv.nms.nms`."""
    count = len(boxes)
    if count == 0 or count > _MOST:
        return plain.nms(boxes, scores, iou_threshold, offset)
    plain.check(boxes, scores)
    with torch.cuda.device_of(boxes):
        order = rank(scores)
        words = triton.cdiv(count, _WORD)
        bits = torch.empty(count, words, dtype=torch.int32, device=boxes.device)
        kept = torch.empty(count, dtype=torch.int8, device=boxes.device)
        _conflict_kernel[(triton.cdiv(count, _ROWS), words)](
            columns(boxes.detach()[order], offset), bits, count, words,
            float(np.float32(iou_threshold)), OFFSET=offset, ROWS=_ROWS, WORD=_WORD,
            enable_fp_fusion=False)
        width = triton.next_power_of_2(words)
        # 32 rows of words: at most 64 of them in each thread's registers
        _sweep_kernel[(1, )](bits, kept, count, words, WORD=_WORD, WORDS=width,
                             num_warps=min(16, max(4, width // 64)), enable_fp_fusion=False)
        return order[kept.bool()]
