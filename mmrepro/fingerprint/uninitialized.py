"""Track memory that was allocated and not written."""
from __future__ import annotations

import torch


class UninitializedMemory:
    """Storages allocated by ``torch.empty`` and the like, with the byte ranges written since.

    Writes that are not contiguous (an index, a column) are not followed: the memory stays
    uninitialized, and gets no digest.
    """

    def __init__(self) -> None:
        self._written: dict[int, list[tuple[int, int]]] = {}  # address -> merged byte ranges

    def allocated(self, tensor: torch.Tensor) -> None:
        """Note that an operator returned this tensor without writing it."""
        if tensor.numel():
            self._written[_address(tensor)] = []

    def result(self, tensor: torch.Tensor) -> None:
        """Note that this tensor is the result of an operator: all of its memory is written."""
        self._written.pop(_address(tensor), None)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """Note that an operator wrote all elements of this tensor."""
        address = _address(tensor)
        if address not in self._written or not tensor.is_contiguous():
            return
        ranges = sorted([*self._written[address], _range_of(tensor)])
        merged = ranges[:1]
        for start, end in ranges[1:]:
            if start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._written[address] = merged
        if merged[0] == (0, tensor.untyped_storage().nbytes()):
            del self._written[address]

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether some elements of the tensor may be uninitialized."""
        if not self._written or _address(tensor) not in self._written:
            return False
        if not tensor.is_contiguous():
            return True
        start, end = _range_of(tensor)
        return not any(first <= start and end <= last
                       for first, last in self._written[_address(tensor)])


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    return start, start + tensor.numel() * size
