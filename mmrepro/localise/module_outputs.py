"""What modules return: recorded, and how far apart that of two models or runs is."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook

from ..objects.nested import tensors

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
