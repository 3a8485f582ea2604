"""Detect that the dataset of the main process has changed since workers got their copy of it.

Workers load from the dataset as it was when they started; the main process would load from the
dataset as it is. So a change has to end the workers, or the number of workers would matter.
"""
from __future__ import annotations

import copy
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from .. import reachable
from ..another_process import UserVariables
from ..digests import as_bytes
from ..generator_kinds import GENERATORS
from . import dataset_tree

MAX_OBJECTS = 2000  # visited; the nearest ones first
MAX_ELEMENTS = 1024  # of an array or tensor: larger ones are annotations

_OPAQUE = (type, torch.nn.Module, *GENERATORS)  # their content is not that of a dataset


def _bytes(array: Any) -> bytes:
    content = as_bytes(array).numpy() if isinstance(array, torch.Tensor) else array
    return bytes(content.tobytes())


def _is_small_array(thing: Any) -> bool:
    if isinstance(thing, np.ndarray):
        return thing.size <= MAX_ELEMENTS and not thing.dtype.hasobject
    return (isinstance(thing, torch.Tensor) and thing.numel() <= MAX_ELEMENTS
            and thing.device.type == 'cpu' and thing.layout == torch.strided
            and not thing.is_quantized)


def _reader(thing: Any) -> Callable[[Any], Any] | None:
    """Return the function that reads what can change in an object; None: nothing can."""
    if isinstance(thing, reachable.CONTAINERS):
        return (lambda content: content) if len(thing) <= reachable.MAX_ITEMS else len
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return _bytes if _is_small_array(thing) else None
    if isinstance(thing, _OPAQUE):
        return None
    if reachable.slot_names(thing) and reachable.belongs_to_user(type(thing).__module__):
        return reachable.attributes
    return vars if hasattr(thing, '__dict__') else None


class _Part(NamedTuple):
    """An object that can be changed in place, how to read it, and a copy of what was read."""
    path: str
    thing: Any
    read: Callable[[Any], Any]
    content: Any

    def items(self) -> list[tuple[str, Any]]:
        """Return path and value of what the object held."""
        if not isinstance(self.content, reachable.CONTAINERS):
            return []
        return reachable.items(self.content, self.path, self.read in (vars, reachable.attributes))


def _equal(content: Any, now: Any) -> bool:
    try:
        return bool(content == now)
    except (TypeError, ValueError, RuntimeError):  # arrays have no single truth
        return False


class DatasetSnapshot:
    """The content of a dataset and of everything that it holds, as it was."""

    def __init__(self, dataset: Any) -> None:
        self._parts: list[_Part] = []
        walk = reachable.Walk([('dataset', dataset)], MAX_OBJECTS)
        for path, thing in walk:
            read = _reader(thing)
            if read is not None:
                part = _Part(path, thing, read, copy.copy(read(thing)))
                self._parts.append(part)
                walk.add(item for item in part.items() if not isinstance(item[1], reachable.PLAIN))

    def change(self) -> str | None:
        """Return the path of something that has changed since, or None."""
        for part in self._parts:
            now = part.read(part.thing)
            if not _equal(now, part.content):
                return _first_change(part, part._replace(content=now))
        return None


def _first_change(part: _Part, now: _Part) -> str:
    before, after = dict(part.items()), dict(now.items())
    for path in (*after, *before):
        # in lists, which compare their items by identity first: arrays have no single truth
        if path not in before or path not in after or not _equal([after[path]], [before[path]]):
            return path
    return part.path


def variables_of(dataset: Any) -> UserVariables:
    """Capture the variables of the modules of datasets and their transforms."""
    return UserVariables([*dataset_tree.datasets(dataset), *dataset_tree.pipelines(dataset)])
