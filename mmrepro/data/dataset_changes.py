"""Notice that the dataset of the main process has changed since workers got their copy of it.

Workers load from the dataset as it was when they started. The main process itself would load from
the dataset as it is, so a change has to end the workers, or the number of workers would matter.
"""
from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from .generators import GENERATORS

MAX_OBJECTS = 2000  # looked at; the nearest ones first
MAX_ITEMS = 64  # of a list or dict: longer ones are annotations
MAX_ELEMENTS = 1024  # of an array or tensor: larger ones are annotations

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (dict, list, tuple, deque)
_OPAQUE = (type, torch.nn.Module, *GENERATORS)  # their content is not that of a dataset


def _bytes(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return array.tobytes()


def _is_small_array(thing: Any) -> bool:
    if isinstance(thing, np.ndarray):
        return thing.size <= MAX_ELEMENTS and not thing.dtype.hasobject
    return (isinstance(thing, torch.Tensor) and thing.numel() <= MAX_ELEMENTS
            and thing.device.type == 'cpu' and thing.layout == torch.strided
            and not thing.is_quantized)


class _Part(NamedTuple):
    """Something that can be changed in place: how to read it, and what was read."""
    path: str
    read: Callable[[Any], Any]
    thing: Any
    before: Any

    def same(self) -> bool:
        try:
            return bool(self.read(self.thing) == self.before)
        except (TypeError, ValueError, RuntimeError):  # arrays have no single truth
            return False

    def items(self) -> Iterable[tuple[str, Any]]:
        """(path, value) of what it held."""
        if isinstance(self.before, dict):
            own = self.read is vars
            return [(f'{self.path}.{key}' if own else f'{self.path}[{key!r}]', value)
                    for key, value in self.before.items()]
        if isinstance(self.before, (list, tuple, deque)):
            return [(f'{self.path}[{i}]', value) for i, value in enumerate(self.before)]
        return ()


def _as_is(thing: Any) -> Any:
    return thing


def _part(path: str, thing: Any) -> _Part | None:
    if isinstance(thing, _CONTAINERS):
        if len(thing) > MAX_ITEMS:
            return _Part(path, len, thing, len(thing))
        return _Part(path, _as_is, thing, copy.copy(thing))
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return _Part(path, _bytes, thing, _bytes(thing)) if _is_small_array(thing) else None
    if isinstance(thing, _OPAQUE) or not hasattr(thing, '__dict__'):
        return None
    return _Part(path, vars, thing, dict(vars(thing)))


class DatasetSnapshot:
    """What a dataset and everything that it holds looked like."""

    def __init__(self, dataset: Any) -> None:
        self._parts: list[_Part] = list(self._visit(dataset))

    @staticmethod
    def _visit(dataset: Any) -> Iterator[_Part]:
        seen = {id(dataset)}  # parts keep what they were made of, so ids stay theirs
        queue = deque([('dataset', dataset)])
        for _ in range(MAX_OBJECTS):
            if not queue:
                return
            part = _part(*queue.popleft())
            if part is None:
                continue
            yield part
            for path, value in part.items():
                if not isinstance(value, _PLAIN) and id(value) not in seen:
                    seen.add(id(value))
                    queue.append((path, value))

    def change(self) -> str | None:
        """Path of something that is different now, or None."""
        for part in self._parts:
            if not part.same():
                return _first_change(part)
        return None


def _first_change(part: _Part) -> str:
    now = _Part(part.path, part.read, part.thing, part.read(part.thing))
    before, after = dict(part.items()), dict(now.items())
    for path in (*after, *before):
        if path not in before or path not in after:
            return path
        # in lists, as identity counts first within a container
        if not _Part(path, _as_is, [after[path]], [before[path]]).same():
            return path
    return part.path
