"""The heap of glibc, in a process whose ranks take turns on a CPU.

A rank that waits in its backward pass keeps small blocks between large ones that it has freed.
Where images of the next rank have other sizes, its blocks do not fit there, and the heap grows.
"""
from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..distributed.process_group import has_accelerator
from ..distributed.scheduler import current

# of malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE = 1 << 20  # bytes of a block outside of the heap, in a repeated step
LARGEST = 32 << 20  # in others: the limit of glibc's own adjustment


@functools.cache
def _glibc() -> Any:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == 'glibc' else None


def _is_shared(scheduler: Any) -> bool:
    return scheduler is not None and len(scheduler.ranks) > 1 and not has_accelerator() \
        and _glibc() is not None


def share(scheduler: Any) -> None:
    """Let ranks use memory that others have freed: glibc gives every thread a separate arena."""
    global _kept_apart
    if _kept_apart:
        _kept_apart = False
        _end_apart()
    if _is_shared(scheduler):
        _glibc().mallopt(M_ARENA_MAX, 1)


def trim() -> None:
    """Give free memory back to the system."""
    if _glibc() is not None:
        _glibc().malloc_trim(0)


_kept_apart = False  # large blocks, until ranks of this process begin anew


def keep_large_blocks_apart() -> None:
    """Let large blocks come from the system, and go back at once, from now on: on a CPU only."""
    global _kept_apart
    if not has_accelerator() and _glibc() is not None:
        _kept_apart = True
        trim()
        _glibc().mallopt(M_MMAP_THRESHOLD, LARGE)


def _end_apart() -> None:
    _glibc().mallopt(M_MMAP_THRESHOLD, LARGEST)
    _glibc().mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)


@contextmanager
def large_blocks_apart() -> Iterator[None]:
    """Let large blocks for which the heap has no room come from the system, and go back at once.

    This takes more time, but the heap does not grow. For repeated steps: they are rare, and they
    make the heap grow more than other steps do.
    """
    shared = _is_shared(current()) and not _kept_apart
    if shared:
        trim()
        _glibc().mallopt(M_MMAP_THRESHOLD, LARGE)
    try:
        yield
    finally:
        if shared:
            _end_apart()
        elif _kept_apart:
            trim()
