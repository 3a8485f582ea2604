"""Tensors of any shapes as few flat ones, or as bytes, in which they travel."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SIZE = 25 << 20  # bytes: a flat tensor takes on more tensors until it has these


def as_bytes(value: Tensor) -> Tensor:
    """A one-dimensional tensor of the bytes of a contiguous one, in the same memory."""
    return value.contiguous().view(-1).view(torch.uint8)


class Buckets:
    """Which tensors of a list travel together: those of one type and device, in their order.

    Args:
        tensors: Their shapes, types and devices count.

    Attributes:
        numbers: Of the tensors in each bucket.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [one.shape for one in tensors]
        self.numbers: list[list[int]] = []
        open_ones: dict[tuple[Any, Any], list[int]] = {}
        sizes: dict[tuple[Any, Any], int] = {}
        for number, one in enumerate(tensors):
            kind = one.dtype, one.device
            if kind not in open_ones or sizes[kind] >= SIZE:
                open_ones[kind], sizes[kind] = [], 0
                self.numbers.append(open_ones[kind])
            open_ones[kind].append(number)
            sizes[kind] += one.numel() * one.element_size()

    def pack(self, tensors: list[Tensor]) -> list[Tensor]:
        """Flat tensors; takes the tensors out of the list."""
        flat = []
        for bucket in self.numbers:
            flat.append(torch.cat([tensors[number].reshape(-1) for number in bucket]))
            for number in bucket:
                tensors[number] = None
        return flat

    def unpack(self, flat: Sequence[Tensor]) -> list[Tensor]:
        """The tensors again, as views."""
        found: dict[int, Tensor] = {}
        for bucket, whole in zip(self.numbers, flat):
            shapes = [self._shapes[number] for number in bucket]
            parts = whole.split([shape.numel() for shape in shapes])
            found.update((number, part.view(shape))
                         for number, shape, part in zip(bucket, shapes, parts))
        return [found[number] for number in range(len(self._shapes))]
