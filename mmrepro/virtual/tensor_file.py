"""Tensors that wait in a file until they are saved, and take memory only while they are read."""
from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes at which a tensor begins


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class TensorFile:
    """A file without a name, of tensors.

    Args:
        folder: Of the file. None, or where it cannot be written: tensors stay in memory.
        tensors: Of the sizes and types of those that will be kept, in any order.
    """

    def __init__(self, folder: str | None, tensors: Iterable[Tensor]) -> None:
        self._file: Any = None
        self._map: mmap.mmap | None = None
        self._end = 0
        size = sum(map(_room, tensors))
        if folder is None or not size:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
            self._file.truncate(size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError:  # not a folder to write to, or a file system that does not map files
            pass

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values whose memory is the file."""
        if self._map is None or not tensor.numel():
            return tensor
        flat, begin = tensor.contiguous().view(-1), self._end
        array: Any = flat.view(torch.uint8).numpy()
        content, done = memoryview(array), 0
        try:
            while done < len(content):  # through the map, the file would take memory
                done += os.pwrite(self._file.fileno(), content[done:], begin + done)
        except OSError:  # no room
            return tensor
        self._end += _room(tensor)
        return torch.frombuffer(self._map, dtype=flat.dtype, count=flat.numel(),
                                offset=begin).view(tensor.shape)

    def let_go(self) -> None:
        """Free the memory of what has been read."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
