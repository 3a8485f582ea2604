"""What modules return: recorded, and how far apart that of two models or runs is."""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from ..objects.nested import tensors
from ..report.tolerance import relative

ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a relative difference: units in the last place


def recorded_outputs(run: Callable[[], Any], paths: Mapping[Any, str]
                     ) -> tuple[Any, list[tuple[str, torch.Tensor]]]:
    """Return what ``run`` returns, and path and output of the modules in the order of calls."""
    records: list[tuple[str, torch.Tensor]] = []

    def keep(module: Any, args: Any, result: Any) -> None:
        if module in paths:  # clones, because an operator may write to an output later
            records.extend((paths[module], tensor.clone()) for tensor in tensors(result))

    with torch.no_grad(), register_module_forward_hook(keep):
        return run(), records


class ValueDifference(NamedTuple):
    """The difference of two tensors of one shape."""
    elements: int  # number of elements whose bits differ
    of: int  # number of all elements
    largest: float  # largest absolute difference; NaNs do not count
    relative: float  # the largest difference over the largest magnitude
    first: tuple[int, ...]  # index of the first element that differs
    a: float  # its values
    b: float

    def text(self) -> str:
        text = (f'{self.elements} of {self.of} elements differ, by at most {self.largest:.3g} '
                f'({self.relative:.2g} of the largest value); the first is at {list(self.first)}: '
                f'{self.a!r} / {self.b!r}')
        return text + ('; a rounding difference' if 0 < self.relative < ROUNDING else '')


def compare_tensors(a: torch.Tensor, b: torch.Tensor) -> ValueDifference | None:
    """Compare two tensors of one shape and type; None when their bytes agree."""
    if a.numel() == 0:
        return None
    shape = a.shape
    a, b = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
    bytes_a, bytes_b = (t.view(torch.uint8).view(t.numel(), -1) for t in (a, b))
    differ = (bytes_a != bytes_b).any(1)
    if not differ.any():
        return None
    first = int(differ.nonzero()[0])
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs().nan_to_num(0, 0)
    largest, scale = float(distance.max()), float(a.to(wide).abs().nan_to_num(0, 0).max())
    index = tuple(map(int, np.unravel_index(first, shape)))
    return ValueDifference(int(differ.sum()), a.numel(), largest,
                           largest / scale if scale else largest, index, a[first].item(),
                           b[first].item())


class Sample(NamedTuple):
    """What is kept of a tensor."""
    shape: tuple[int, ...]
    norm: float
    values: torch.Tensor  # elements, in one dimension


def sample_of(tensor: torch.Tensor) -> Sample:
    """Return all of a tensor, as :func:`distance` compares it."""
    flat = tensor.detach().double().flatten()
    return Sample(tensor.shape, float(flat.norm()), flat)


def distance(a: Sample, b: Sample) -> float:
    """Return the relative distance of two samples."""
    if a.shape != b.shape:
        return math.inf
    norms, x, y = relative(a.norm, b.norm), a.values, b.values
    if not x.numel():
        return norms
    gap = torch.where((x == y) | (x.isnan() & y.isnan()), 0., (x - y).abs())
    scale = float(x.abs().nan_to_num(0, 0, 0).max()) or 1.
    return max(norms, float((gap / scale).nan_to_num(math.inf).max()))


class FirstApart(NamedTuple):
    """The first place where two models, or two runs of one, are apart by more than rounding."""
    place: Any  # None: there is none
    distance: float  # there
    before: int  # number of places that were compared before it
    largest: float  # largest distance before it


def first_apart(distances: Iterable[tuple[Any, float]], tolerance: float,
                growth: float = 0.) -> FirstApart:
    """Find the first place whose distance is more than rounding.

    Args:
        distances: places and relative distances, in the order of execution.
        tolerance: largest distance that is rounding.
        growth: factor by which rounding may grow at one place, over the largest distance so far.
    """
    number, largest = 0, 0.
    for place, apart in distances:
        if apart > max(tolerance, growth * largest):
            return FirstApart(place, apart, number, largest)
        number, largest = number + 1, max(largest, apart)
    return FirstApart(None, 0., number, largest)
