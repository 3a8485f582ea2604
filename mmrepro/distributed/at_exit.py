"""End the threads of gloo before the interpreter ends.

A thread of gloo that lets go of a tensor takes the interpreter's lock; where the interpreter is
ending by then, the process aborts with 'terminate called without an active exception' (PyTorch
#179291, #190489). The threads of a process group are joined when nothing refers to it any more. So
groups are destroyed at the end, and what still refers to them lets go: a model that is a global of
the program, garbage that was not collected. After an error they stay, because a collective
operation may be under way, and joining would wait for the other ranks.
"""
from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable
from typing import Any, Callable
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import lost_ranks

_holders: WeakKeyDictionary[Any, tuple[str, ...]] = WeakKeyDictionary()


def let_go_at_exit(holder: Any, *attributes: str) -> None:
    """Delete the attributes of an object, which refer to process groups, before groups are left."""
    _holders[holder] = attributes


def leave_at_exit(groups: Callable[[], Iterable[Any]]) -> None:
    """Destroy the groups that a function returns at the end; None: all there are."""
    atexit.register(_leave, groups)


def _leave(groups: Callable[[], Iterable[Any]]) -> None:
    if getattr(sys, 'last_value', None) is not None or lost_ranks.has_failed():
        return
    for holder, attributes in list(_holders.items()):
        for name in attributes:
            vars(holder).pop(name, None)
    for group in groups():
        if dist.is_initialized() and (group is None or group in c10d._world.pg_map):
            dist.destroy_process_group(group)
