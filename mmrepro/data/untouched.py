"""A copy of a dataset that keeps nothing of the samples which the dataset has loaded."""
from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from ..reachable import Walk, inside

MAX_ITEMS = 2000  # of a container; larger ones hold annotations, which copies share
MAX_BYTES = 1 << 20  # of an array or tensor, likewise
MAX_OBJECTS = 10_000  # visited; the nearest ones first


def copied(dataset: Any) -> Any | None:
    """Return a copy of a dataset and its transforms; None where something cannot be copied.

    Annotations and modules are not copied.
    """
    copies: dict[int, Any] = {}  # by id of the original; what is shared is its own copy
    walk = Walk([('', dataset)], MAX_OBJECTS)
    for path, thing in walk:
        if isinstance(thing, nn.Module) or _is_large(thing):
            copies[id(thing)] = thing
        else:
            walk.add(inside(thing, path))
    try:
        duplicate = copy.deepcopy(dataset, copies)
    except Exception:  # an open file, a lock, a database: whatever a dataset holds
        return None
    for key, part in list(copies.items()):
        for name, value in list(getattr(part, '__dict__', {}).items()) if key != id(part) else ():
            if isinstance(value, weakref.ref) and id(value()) in copies:
                # mmcv's cache_randomness refers to its transform in this way
                setattr(part, name, weakref.ref(copies[id(value())]))
    return duplicate


def _is_large(thing: Any) -> bool:
    if isinstance(thing, (np.ndarray, torch.Tensor)):
        return thing.nbytes > MAX_BYTES
    return isinstance(thing, (list, dict, set)) and len(thing) > MAX_ITEMS
