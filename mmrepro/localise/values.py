"""How far apart the results of one operator are on the two sides."""
from __future__ import annotations

import os
from typing import NamedTuple, Optional, Tuple

import torch

__all__ = ['Values', 'compare_kept', 'compare_tensors']


class Values(NamedTuple):
    """The difference of two tensors of one shape.

    Attributes:
        elements: that differ in their bits.
        of: elements in all.
        largest: absolute difference; NaNs do not count.
        relative: the largest difference over the largest magnitude.
        place: index of the first element that differs.
        a, b: its values.
    """
    elements: int
    of: int
    largest: float
    relative: float
    place: Tuple[int, ...]
    a: float
    b: float

    def text(self) -> str:
        text = (f'{self.elements} of {self.of} elements differ, by {self.largest:.3g} at most '
                f'({self.relative:.2g} of the largest); the first is {list(self.place)}: '
                f'{self.a!r} / {self.b!r}')
        # a few units in the last place of float32 and lower types
        return text + ('; of the size of rounding' if 0 < self.relative < 4e-7 else '')


def compare_kept(folder_a: str, folder_b: str, rank: int) -> Optional[Values]:
    """The first result that differs, of the tensors that both sides kept; None when all agree."""
    sides = [torch.load(os.path.join(folder, f'kept.rank{rank}.pt'), weights_only=True)['outputs']
             for folder in (folder_a, folder_b)]
    for a, b in zip(*sides):
        found = compare_tensors(a, b) if a.shape == b.shape and a.dtype == b.dtype else None
        if found is not None:
            return found
    return None


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> Optional[Values]:
    """None when the tensors, of one shape and type, have the same bytes."""
    a, b = (t.clone(memory_format=torch.contiguous_format) for t in (a, b))
    if a.numel() == 0:
        return None
    bytes_a, bytes_b = (t.view(-1).view(torch.uint8).view(t.numel(), -1) for t in (a, b))
    differ = (bytes_a != bytes_b).any(1)
    if not bool(differ.any()):
        return None
    first = int(differ.nonzero()[0])
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.view(-1).to(wide), b.view(-1).to(wide)
    distance = (x - y).abs().nan_to_num(0, 0)
    largest, scale = float(distance.max()), float(x.abs().nan_to_num(0, 0).max())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)) \
        if a.dim() else ()
    return Values(int(differ.sum()), a.numel(), largest, largest / scale if scale else largest,
                  place, a.view(-1)[first].item(), b.view(-1)[first].item())
