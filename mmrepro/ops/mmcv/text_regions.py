"""Text regions grow from their kernels: of PSENet (``contour_expand``) and PAN (``pixel_group``).

Semantics of mmcv 2.1.0 (csrc/pytorch/contour_expand.cpp and cpu/pixel_group.cpp), which has them
for the CPU only. Both are searches in breadth, from a queue. Here all pixels of the queue that are
equally far take a step together; of those that reach the same pixel, the one that came first in the
queue wins, as if they came one after the other.
"""
from __future__ import annotations

from typing import Callable

import numpy as np
import torch
from torch import Tensor

from ..contract import describe, require, require_dtype, require_shape

# mmcv's order: up, down, left, right
_STEPS = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
# mmcv's order for PAN: left, right, up, down
_STEPS_BY_COLUMN = _STEPS[:, ::-1]

# which of the pixels may have which labels: (rows, columns, labels) -> bool
_Accept = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _grow(labels: np.ndarray, rows: np.ndarray, columns: np.ndarray, steps: np.ndarray,
          accept: _Accept) -> None:
    """Give the labels of the queue (rows, columns) to pixels without one, step by step."""
    height, width = labels.shape
    while len(rows):
        label = np.repeat(labels[rows, columns], len(steps))
        row, column = ((axis[:, None] + steps[:, number]).ravel()
                       for number, axis in enumerate((rows, columns)))
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        row, column, label = row[inside], column[inside], label[inside]
        free = labels[row, column] <= 0
        row, column, label = row[free], column[free], label[free]
        allowed = accept(row, column, label)
        row, column, label = row[allowed], column[allowed], label[allowed]
        _, first = np.unique(row * width + column, return_index=True)
        first.sort()  # the order of the queue
        rows, columns = row[first], column[first]
        labels[rows, columns] = label[first]


def _on_host(operator: str, name: str, tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    require_dtype(operator, name, tensor, (dtype, ))
    require(tensor.device.type == 'cpu', operator, f'{name} must be on the CPU, got '
            f'{describe(tensor)}')
    return tensor.detach().contiguous().numpy()


def contour_expand(kernel_mask: Tensor, internal_kernel_label: Tensor, min_kernel_area: int,
                   kernel_num: int) -> list[list[int]]:
    """Grow the labelled kernels within the largest mask.

    mmcv means to grow through the masks from the second smallest to the largest, but its pointer to
    the mask never moves, so the largest one, the first, decides alone. So it does here.

    Args:
        kernel_mask: (masks, H, W) uint8, the largest first.
        internal_kernel_label: (H, W) int32, the number of each pixel's kernel; 0: none.
        min_kernel_area: kernels of fewer pixels are left out.
        kernel_num: the largest number that a kernel may have.

    Returns:
        H rows of W labels.
    """
    operator = 'contour_expand'
    masks = _on_host(operator, 'kernel_mask', kernel_mask, torch.uint8)
    given = _on_host(operator, 'internal_kernel_label', internal_kernel_label, torch.int32)
    require(masks.ndim == 3 and masks.shape[1:] == given.shape, operator,
            f'shapes do not match: kernel_mask {describe(kernel_mask)}, internal_kernel_label '
            f'{describe(internal_kernel_label)}')
    if given.size == 0:
        return [[] for _ in given]
    require(0 <= given.min() and given.max() <= kernel_num, operator,
            f'labels must be from 0 to kernel_num, {kernel_num}; got {given.min()} to '
            f'{given.max()}')
    area = np.bincount(given.ravel(), minlength=kernel_num + 1)
    labels = np.where(area[given] >= min_kernel_area, given, 0)
    rows, columns = np.nonzero(labels)
    if len(masks) > 1:
        inside = masks[0] != 0
        _grow(labels, rows, columns, _STEPS, lambda row, column, label: inside[row, column])
    rows_of_labels: list[list[int]] = labels.tolist()
    return rows_of_labels


def pixel_group(score: Tensor, mask: Tensor, embedding: Tensor, kernel_label: Tensor,
                kernel_contour: Tensor, kernel_region_label: int, distance_threshold: float
                ) -> list[list[float]]:
    """Group the pixels of a mask with the kernels whose mean embedding is near theirs.

    Args:
        score: (H, W) float32, the confidence of each pixel.
        mask: (H, W) bool, pixels that may belong to a region.
        embedding: (H, W, D) float32.
        kernel_label: (H, W) int32, the number of each pixel's kernel, from 1; 0: none.
        kernel_contour: (H, W) uint8, not 0 where a region may start to grow.
        kernel_region_label: number of kernels, and one for the background.
        distance_threshold: embeddings must be nearer than this.

    Returns:
        For each kernel: mean confidence, number of pixels, and x and y of each, row by row.
    """
    operator = 'pixel_group'
    scores = _on_host(operator, 'score', score, torch.float32)
    allowed = _on_host(operator, 'mask', mask, torch.bool)
    vectors = _on_host(operator, 'embedding', embedding, torch.float32)
    labels = _on_host(operator, 'kernel_label', kernel_label, torch.int32).copy()
    contour = _on_host(operator, 'kernel_contour', kernel_contour, torch.uint8)
    require(score.dim() == 2, operator, f'score must have shape (H, W), got {describe(score)}')
    for name, tensor, shape in (('mask', mask, score.shape),
                                ('embedding', embedding, (*score.shape, None)),
                                ('kernel_label', kernel_label, score.shape),
                                ('kernel_contour', kernel_contour, score.shape)):
        require_shape(operator, name, tensor, tuple(shape))
    most = int(labels.max()) if labels.size else 0
    require(most < kernel_region_label, operator,
            f'labels must be below kernel_region_label, {kernel_region_label}; got {most}')

    kernels = _means(vectors, labels, kernel_region_label)
    limit = np.float32(distance_threshold) * np.float32(distance_threshold)

    def near(row: np.ndarray, column: np.ndarray, label: np.ndarray) -> np.ndarray:
        # mmcv's roundings: differences and sums in float32, squares in double precision
        apart = kernels[label] - vectors[row, column]
        distance = np.zeros(len(row), np.float32)
        far = np.zeros(len(row), bool)
        for dimension in range(apart.shape[1]):
            distance = (distance + apart[:, dimension].astype(np.float64) ** 2).astype(np.float32)
            far |= distance >= limit  # and it stays: mmcv stops here
        near_enough: np.ndarray = allowed[row, column] & ~far
        return near_enough

    rows, columns = np.nonzero((labels > 0) & (contour != 0))
    _grow(labels, rows, columns, _STEPS_BY_COLUMN, near)
    return _regions(scores, labels, kernel_region_label)


def _means(vectors: np.ndarray, labels: np.ndarray, number: int) -> np.ndarray:
    """Return (number, D) the mean of each kernel's embeddings, added up row by row in float32."""
    inside = labels > 0
    total = np.zeros((number, vectors.shape[2]), np.float32)
    np.add.at(total, labels[inside], vectors[inside])
    count = np.bincount(labels[inside], minlength=number).astype(np.float32)
    with np.errstate(invalid='ignore'):  # the background has no pixels
        return total / count[:, None]


def _regions(scores: np.ndarray, labels: np.ndarray, number: int) -> list[list[float]]:
    inside = labels > 0
    total = np.zeros(number, np.float32)
    np.add.at(total, labels[inside], scores[inside])
    y, x = np.nonzero(inside)
    label = labels[inside]
    order = np.argsort(label, kind='stable')
    ends = np.cumsum(np.bincount(label, minlength=number))
    points = np.stack((x[order], y[order]), 1).astype(np.float32)
    result, start = [], 0
    for mean, end in zip(total, ends):
        count = np.float32(end - start)
        region: tuple[float, ...] = (float(mean / count) if count else 0., float(count))
        result.append([*region, *points[start:end].ravel().tolist()])
        start = end
    return result
