"""Which memory holds a result, and which holds what was there before."""
from __future__ import annotations

import torch


class UninitializedMemory:
    """Storages that ``torch.empty`` and its like made, with the bytes that were written since.

    Writes that are not one stretch of memory (an index, a column) are not followed: the memory
    stays uninitialized, and gets no digest.
    """

    def __init__(self) -> None:
        self._written: dict[int, list[tuple[int, int]]] = {}  # address -> stretches, merged

    def allocated(self, tensor: torch.Tensor) -> None:
        """An operator returned this tensor without having written it."""
        if tensor.numel():
            self._written[_address(tensor)] = []

    def result(self, tensor: torch.Tensor) -> None:
        """An operator returned this tensor as its result: all of its memory is initialized."""
        self._written.pop(_address(tensor), None)

    def overwritten(self, tensor: torch.Tensor) -> None:
        """An operator wrote all elements of this tensor."""
        address = _address(tensor)
        if address not in self._written or not tensor.is_contiguous():
            return
        stretches = sorted([*self._written[address], _stretch(tensor)])
        merged = stretches[:1]
        for start, end in stretches[1:]:
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
        start, end = _stretch(tensor)
        return not any(first <= start and end <= last
                       for first, last in self._written[_address(tensor)])


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _stretch(tensor: torch.Tensor) -> tuple[int, int]:
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    return start, start + tensor.numel() * size
