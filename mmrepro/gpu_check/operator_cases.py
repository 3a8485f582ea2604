"""What a row of the operator check is made of."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

__all__ = ['Case', 'Problem', 'Sizes', 'tensors_of']


class Sizes:
    """Makes inputs of a detector's size, or small ones, the same on every machine.

    Args:
        small: an eighth of the height, width and number of boxes.
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
        return self.normal(batch, self.channels(channels), self.count(height), self.count(width))

    def boxes(self, number: int, height: int, width: int, size: float) -> Tensor:
        """(K, 4) piled on a few centres, so that most of them read the same pixels."""
        number = self.count(number)
        limit = torch.tensor([width, height]) / self.by
        centres = self.uniform(3, 2) * limit * 0.6 + limit * 0.2
        centre = centres[torch.arange(number) % 3] + self.normal(number, 2) * 2
        extent = size / self.by * torch.exp(self.normal(number, 2) * 0.4)
        corners = torch.cat((centre - extent / 2, centre + extent / 2), 1).clamp(min=0)
        return torch.minimum(corners, limit.repeat(2) - torch.tensor([2., 2, 1, 1]))

    def rois(self, number: int = 512, size: float = 96.) -> Tensor:
        boxes = self.boxes(number, 800, 1344, size)
        return torch.cat((torch.zeros(len(boxes), 1), boxes), 1)

    def rotated(self, number: int) -> Tensor:
        """(K, 5) centre, width, height, angle."""
        boxes = self.boxes(number, 800, 1344, 96)
        return torch.cat(((boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2] + 1,
                          self.uniform(len(boxes), 1) * 3 - 1.5), 1)


class Problem(NamedTuple):
    """One call.

    Attributes:
        leaves: tensors that get a gradient; empty for a forward only.
        fixed: the other tensors.
        run: called with both as keywords, returns a tensor or several.
        double: the reference may be made in float64 (else in the same precision, on the CPU).
    """

    leaves: Dict[str, Tensor]
    fixed: Dict[str, Tensor]
    run: Callable[..., Any]
    double: bool = True

    def to(self, device: str, dtype: Optional[torch.dtype] = None) -> Problem:
        """The same numbers elsewhere; integers keep their type."""
        def move(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() and dtype is not None
            return tensor.to(device, dtype if floating else tensor.dtype)

        return self._replace(
            leaves={name: move(t).detach().requires_grad_() for name, t in self.leaves.items()},
            fixed={name: move(t) for name, t in self.fixed.items()})


class Case(NamedTuple):
    """One row: the operators that it covers, how to make the call, and who reaches it.

    Attributes:
        covers: names in ``mmrepro.ops.TABLE`` or ``mmrepro.ops.aten.TABLE``.
        make: from sizes to a problem.
        expect: 'equal', or 'raises' where torch refuses by name and nobody recentres it.
        reference: another definition of the result, for what torch leaves open.
    """

    covers: Tuple[str, ...]
    make: Callable[[Sizes], Problem]
    expect: str = 'equal'
    reference: Optional[Callable[..., Any]] = None


def tensors_of(value: Any) -> List[Tensor]:
    """All tensors of a result, in order; numbers become tensors."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_of(item)]
    if isinstance(value, (int, float)):
        return [torch.tensor(value)]
    return []
