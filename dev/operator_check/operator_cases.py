"""The classes of the catalogue of operator cases, and the inputs that cases are made from."""
from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
from torch import Tensor

__all__ = ['Inputs', 'OperatorCall', 'OperatorCase', 'tensors_of']


class Inputs:
    """Random inputs in the sizes of a detector, the same on every machine.

    Boxes overlap in three locations and scores have ties: the most write conflicts, which show a
    sum in no fixed order.

    Args:
        small: divide height, width, channels and number of boxes by eight.
    """

    def __init__(self, small: bool) -> None:
        self.by = 8 if small else 1
        self.random = torch.Generator().manual_seed(0)

    def count(self, number: int) -> int:
        return max(2, number // self.by)

    def channels(self, number: int) -> int:
        return max(16, number // self.by)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random)

    def feature(self, channels: int, height: int, width: int, batch: int = 1) -> Tensor:
        """(batch, channels, height, width)."""
        return self.normal(batch, self.channels(channels), self.count(height), self.count(width))

    def boxes(self, number: int, height: int, width: int, size: float) -> Tensor:
        """(K, 4) x1, y1, x2, y2 of about ``size`` pixels in an image of ``height`` x ``width``."""
        number = self.count(number)
        limit = torch.tensor([width, height]) / self.by
        centres = self.uniform(3, 2) * limit * 0.6 + limit * 0.2
        centre = centres[torch.arange(number) % 3] + self.normal(number, 2) * 2
        extent = size / self.by * torch.exp(self.normal(number, 2) * 0.4)
        corners = torch.cat((centre - extent / 2, centre + extent / 2), 1).clamp(min=0)
        return torch.minimum(corners, limit.repeat(2) - torch.tensor([2., 2, 1, 1]))

    def rois(self, number: int = 512, size: float = 96.) -> Tensor:
        """(K, 5) image index, x1, y1, x2, y2."""
        boxes = self.boxes(number, 800, 1344, size)
        return torch.cat((torch.zeros(len(boxes), 1), boxes), 1)

    def rotated(self, number: int) -> Tensor:
        """(K, 5) centre x, y, width, height, angle in radians."""
        boxes = self.boxes(number, 800, 1344, 96)
        return torch.cat(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2] + 1,
                          self.uniform(len(boxes), 1) * 3 - 1.5), 1)

    def scores(self, number: int) -> Tensor:
        """(number,) with few different values."""
        return (self.uniform(number) * 20).round() / 20


class OperatorCall(NamedTuple):
    """One call of an operator.

    Attributes:
        leaves: tensors that get a gradient; empty for a forward only.
        fixed: the other tensors.
        run: called with both as keywords; returns a tensor or several.
        double: whether the reference may be computed in float64; else it has the same precision.
    """

    leaves: dict[str, Tensor]
    fixed: dict[str, Tensor]
    run: Callable[..., Any]
    double: bool = True

    def to(self, device: str, dtype: torch.dtype | None = None) -> OperatorCall:
        """Return the same call on another device or in another floating dtype."""
        def move(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() and dtype is not None
            return tensor.to(device, dtype if floating else tensor.dtype)

        return self._replace(
            leaves={name: move(t).detach().requires_grad_() for name, t in self.leaves.items()},
            fixed={name: move(t) for name, t in self.fixed.items()})


class OperatorCase(NamedTuple):
    """One row of the catalogue.

    Attributes:
        covers: names in ``mmrepro.ops.TABLE`` or ``mmrepro.ops.aten.TABLE``.
        make: makes the call from inputs.
        expect: 'equal', or 'raises' where torch raises and there is no replacement.
        reference: another definition of the result, where torch does not specify it.
    """

    covers: tuple[str, ...]
    make: Callable[[Inputs], OperatorCall]
    expect: str = 'equal'
    reference: Callable[..., Any] | None = None


def tensors_of(value: Any) -> list[Tensor]:
    """Return all tensors of a result, in order; numbers become tensors."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, (int, float)):
        return [torch.tensor(value)]
    return []
