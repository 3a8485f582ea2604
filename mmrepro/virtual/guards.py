"""Attributes that are replaced while virtual ranks run, and caches that are refused.

The attributes are of torch and MMEngine. A cached function that reads the rank is refused: the
ranks of a process would share one answer.
"""
from __future__ import annotations

import functools
import gc
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, Callable

import mmengine.logging.logger
import torch
from torch.distributed import distributed_c10d as c10d

from ..distributed.scheduler import Baton, current
from ..errors import RandomnessError, VirtualRanksError
from ..util.libraries import belongs_to_user
from ..util.scoped import replaced
from .world import ThreadLocalWorld

# module, attribute, why it is refused
REFUSED: tuple[tuple[str, str, str], ...] = (
    ('torch', 'compile', 'compiled code may be shared by ranks'),
    ('torch.cuda', 'graph', 'a captured graph cannot hand over to another rank'),
    ('torch.cuda', 'make_graphed_callables', 'a captured graph cannot hand over to another rank'),
)


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise VirtualRanksError(
            f'{name} cannot be used with randomness.virtual_ranks: {why}; leave it out, or start '
            'as many processes as there are ranks without virtual_ranks')
    return refuse


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Keep autocast's cache of cast weights until no rank is inside of autocast.

    The cache belongs to the process, the nesting to a thread: a rank that leaves would drop the
    weights that another rank has cast. Their next use would cast again, and the gradients of the
    two casts would be added up in float32 instead of half precision. Entries are found by tensor,
    and each rank has its own tensors.
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

    with replaced(torch, autocast_increment_nesting=enter, autocast_decrement_nesting=leave,
                   clear_autocast_cache=clear_if_last):
        yield
    clear()


@contextmanager
def guarded(baton: Baton) -> Iterator[None]:
    """Put everything of this module, and the worlds of the ranks, into force for a block.

    Raises:
        RuntimeError: virtual ranks run in this process already.
    """
    if isinstance(c10d._world, ThreadLocalWorld):
        raise VirtualRanksError('virtual ranks run in this process already')
    make, barrier = c10d._new_process_group_helper, c10d._store_based_barrier
    world = ThreadLocalWorld(c10d._world, baton)

    def new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any,
                  **kwargs: Any) -> Any:
        worlds = getattr(world, 'virtual', None)
        if worlds is None:  # a group of the real processes
            return make(size, rank, ranks, backend, *args, **kwargs)
        with worlds.new_group(ranks) as virtual_backend:
            return make(size, rank, ranks, virtual_backend, *args, **kwargs)

    def wait(*args: Any, **kwargs: Any) -> None:
        if not hasattr(world, 'virtual'):  # virtual ranks have met when the group was made
            barrier(*args, **kwargs)

    with ExitStack() as stack:
        # newer torch: gives each thread its own registry of process groups by name
        isolate = getattr(torch._C._distributed_c10d, '_set_thread_isolation_mode', bool)
        isolate(True)
        stack.callback(isolate, False)
        stack.enter_context(autocast_cache())
        # in the names of log files; MMEngine takes LOCAL_RANK for the number of a device
        stack.enter_context(replaced(
            mmengine.logging.logger, _get_device_id=lambda:
            torch.cuda.current_device() if torch.cuda.is_initialized() else 0))
        stack.enter_context(replaced(c10d, _world=world, _new_process_group_helper=new_group,
                                     _store_based_barrier=wait))
        for module, name, why in REFUSED:
            stack.enter_context(replaced(
                sys.modules[module], **{name: _refusal(f'{module}.{name}', why)}))
        yield


READERS = {'get_rank', 'get_dist_info', 'get_local_rank', 'get_node_local_rank', 'is_main_process',
           'is_master'}


def _reads(code: CodeType) -> set[str]:
    """Return names and variables that tell the rank, in a function and in functions inside."""
    names = READERS.intersection(code.co_names)
    if {'environ', 'getenv'}.intersection(code.co_names):
        names |= {'RANK', 'LOCAL_RANK'}.intersection(map(str, code.co_consts))
    return names.union(*(_reads(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def refuse_cached_ranks() -> None:
    """Raise RandomnessError on virtual ranks for a cached function that reads the rank."""
    scheduler = current()
    # the first rank looks for all ranks of its process
    if scheduler is None or scheduler.me is not scheduler.ranks[0]:
        return
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper:
            function = inspect.unwrap(cache)
            names = READERS & {getattr(function, '__name__', '')}
            if belongs_to_user(str(cache.__module__)) and hasattr(function, '__code__'):
                names |= _reads(function.__code__)
            if names:
                raise RandomnessError(
                    f'{cache.__module__}.{function.__qualname__} reads {min(names)} and caches the '
                    'answer (functools.lru_cache or cache), and virtual ranks of a process share '
                    'it: remove the cache, or give the rank as an argument')
