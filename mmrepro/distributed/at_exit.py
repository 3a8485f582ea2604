"""End the threads of gloo before the interpreter shuts down.

A thread of gloo needs the GIL to release a tensor. If the interpreter is already shutting down, the
process aborts with 'terminate called without an active exception' (PyTorch #179291, #190489). The
threads are joined once nothing refers to their process group. So process groups are destroyed at
exit, and references to them (a model in a global variable, garbage that was not collected) are
dropped first. After an error nothing is destroyed: a collective operation may still be pending, and
joining would wait for the other ranks.
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
    """Drop these attributes, which refer to process groups, before the groups are destroyed."""
    _holders[holder] = attributes


def leave_at_exit(groups: Callable[[], Iterable[Any]]) -> None:
    """Destroy the groups that ``groups()`` returns at exit; an item None stands for all."""
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
