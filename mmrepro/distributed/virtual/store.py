"""Waiting in the store of a process group, where other virtual ranks may have to run meanwhile."""
from __future__ import annotations

import time
from datetime import timedelta
from typing import List

import torch.distributed as dist

from .scheduler import current

__all__ = ['wait_in_store']


def wait_in_store(store: dist.Store, names: List[str], timeout: timedelta) -> None:
    """``store.wait(names, timeout)``; a virtual rank lets others run until the names are there.

    Raises:
        RuntimeError: they were not there in time, or the store is lost.
        Deadlock: no other virtual rank can set them.
    """
    scheduler = current()
    if scheduler is None:
        store.wait(names, timeout)
        return
    end = time.monotonic() + timeout.total_seconds()
    scheduler.wait(lambda: store.check(names) or time.monotonic() > end,
                   f'the store, for {", ".join(names)}', outside=True)
    if not store.check(names):
        raise RuntimeError(f'{", ".join(names)} did not appear in the store within {timeout}')
