"""Detect that the dataset of the main process has changed since workers got their copy of it.

Workers load from the dataset as it was when they started; the main process would load from the
dataset as it is. So a change has to end the workers, or the number of workers would matter.
"""
from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ..generator_kinds import GENERATORS
from ..reachable import (
    CONTAINERS,
    MAX_ITEMS,
    Named,
    Walk,
    attributes,
    belongs_to_user,
    items,
    slot_names,
)

MAX_OBJECTS = 2000  # visited; the nearest ones first
MAX_ELEMENTS = 1024  # of an array or tensor: larger ones are annotations

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_OPAQUE = (type, torch.nn.Module, *GENERATORS)  # their content is not that of a dataset


def _bytes(array: Any) -> bytes:
    if isinstance(array, torch.Tensor):
        array = array.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return bytes(array.tobytes())


def _is_small_array(thing: Any) -> bool:
    if isinstance(thing, np.ndarray):
        return thing.size <= MAX_ELEMENTS and not thing.dtype.hasobject
    return (isinstance(thing, torch.Tensor) and thing.numel() <= MAX_ELEMENTS
            and thing.device.type == 'cpu' and thing.layout == torch.strided
            and not thing.is_quantized)


class _Part(NamedTuple):
    """An object that can be changed in place: how to read it, and what was read."""
    path: str
    read: Callable[[Any], Any]
    thing: Any
    before: Any

    def same(self) -> bool:
        try:
            return bool(self.read(self.thing) == self.before)
        except (TypeError, ValueError, RuntimeError):  # arrays have no single truth
            return False

    def items(self) -> list[Named]:
        """Return path and value of what the object held."""
        if not isinstance(self.before, CONTAINERS):
            return []
        return items(self.before, self.path, self.read in (vars, attributes))


def _as_is(thing: Any) -> Any:
    return thing


def _part(path: str, thing: Any) -> _Part | None:
    if isinstance(thing, CONTAINERS):
        if len(thing) > MAX_ITEMS:
            return _Part(path, len, thing, len(thing))
        return _Part(path, _as_is, thing, copy.copy(thing))
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return _Part(path, _bytes, thing, _bytes(thing)) if _is_small_array(thing) else None
    if isinstance(thing, _OPAQUE):
        return None
    if slot_names(thing) and belongs_to_user(type(thing).__module__):
        return _Part(path, attributes, thing, attributes(thing))
    return _Part(path, vars, thing, dict(vars(thing))) if hasattr(thing, '__dict__') else None


class DatasetSnapshot:
    """The content of a dataset and of everything that it holds, as it was."""

    def __init__(self, dataset: Any) -> None:
        self._parts: list[_Part] = list(self._visit(dataset))

    @staticmethod
    def _visit(dataset: Any) -> Iterator[_Part]:
        walk = Walk([('dataset', dataset)], MAX_OBJECTS)
        for path, thing in walk:
            part = _part(path, thing)
            if part is not None:
                yield part
                walk.add(named for named in part.items() if not isinstance(named[1], _PLAIN))

    def change(self) -> str | None:
        """Return the path of something that has changed since, or None."""
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
