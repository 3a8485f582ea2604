"""Refuse caches of functions that read the rank: the ranks of a process would share one answer."""
from __future__ import annotations

import functools
import gc
import inspect
from types import CodeType

from ..distributed.scheduler import current
from ..errors import RandomnessError
from ..util.libraries import belongs_to_user

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
