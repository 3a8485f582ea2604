"""What is in force while virtual ranks run: attributes of torch that are replaced meanwhile."""
from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import Any, Callable

import mmengine.logging.logger
import torch
from torch.distributed import distributed_c10d as c10d

from .group import VirtualGroup

# module, attribute, why it is refused
REFUSED: tuple[tuple[str, str, str], ...] = (
    ('torch', 'compile', 'compiled code may be shared by ranks'),
    ('torch.cuda', 'graph', 'a captured graph cannot hand over to another rank'),
    ('torch.cuda', 'make_graphed_callables', 'a captured graph cannot hand over to another rank'),
)


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f'{name} cannot be used with randomness.virtual_ranks: {why}; leave it '
                           'out, or start as many processes as there are ranks without '
                           'virtual_ranks')
    return refuse


@contextmanager
def _replaced(module: ModuleType, **values: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _device_number() -> int:
    """For the names of MMEngine's log files; MMEngine takes LOCAL_RANK for one of a device."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@contextmanager
def _isolated_names() -> Iterator[None]:
    """Every thread has its own register of process groups by name, where torch has one."""
    switch = getattr(torch._C._distributed_c10d, '_set_thread_isolation_mode', None)
    if switch is None:
        yield
        return
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Keep autocast's cache of cast weights until no rank is inside of autocast.

    The cache belongs to the process, the nesting to a thread: a rank that leaves would take away
    what another one has cast. Its next use would cast again, and the gradients of the two would be
    added up in float32 instead of half precision. Entries are found by tensor, and each rank has
    tensors of its own.
    """
    increase, decrease = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    clear = torch.clear_autocast_cache
    inside: set[int] = set()

    def enter() -> int:
        inside.add(threading.get_ident())
        return increase()

    def leave() -> int:
        left = decrease()
        if left == 0:
            inside.discard(threading.get_ident())
        return left

    def clear_if_last() -> None:
        if not inside:
            clear()

    with _replaced(torch, autocast_increment_nesting=enter, autocast_decrement_nesting=leave,
                   clear_autocast_cache=clear_if_last):
        yield
    clear()


@contextmanager
def guarded(new_group: Callable[[list[int]], AbstractContextManager[str]]) -> Iterator[None]:
    """Everything of this module, for the length of a block.

    Args:
        new_group: Called in every rank when torch makes a group of these ranks; the block in which
            it does, with the name of the backend.
    """
    make, barrier = c10d._new_process_group_helper, c10d._store_based_barrier

    def helper(size: int, rank: int, ranks: list[int], backend: Any, *args: Any,
               **kwargs: Any) -> Any:
        if not isinstance(c10d._world.default_pg, VirtualGroup):
            return make(size, rank, ranks, backend, *args, **kwargs)
        with new_group(ranks) as virtual_backend:
            return make(size, rank, ranks, virtual_backend, *args, **kwargs)

    def wait(*args: Any, **kwargs: Any) -> None:
        # the ranks have met when the group was made
        if not isinstance(c10d._world.default_pg, VirtualGroup):
            barrier(*args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(_isolated_names())
        stack.enter_context(autocast_cache())
        stack.enter_context(_replaced(mmengine.logging.logger, _get_device_id=_device_number))
        stack.enter_context(_replaced(
            c10d, _new_process_group_helper=helper, _store_based_barrier=wait))
        for module, name, why in REFUSED:
            stack.enter_context(_replaced(
                sys.modules[module], **{name: _refusal(f'{module}.{name}', why)}))
        yield
