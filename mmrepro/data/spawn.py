"""Start methods that import mmrepro in the worker before anything else arrives there.

A worker that does not fork unpickles the data set, and with it imports MMDetection, which asks for
mmcv's operators: with mmcv-lite they exist only once mmrepro is imported. The process object is the
first thing in the pickle, and its class lives here.
"""
from __future__ import annotations

import multiprocessing
from multiprocessing import context
from typing import Optional

from torch.utils.data import DataLoader

__all__ = ['use_own_start_method']

METHODS = {}

if hasattr(context, 'SpawnProcess'):

    class SpawnProcess(context.SpawnProcess):
        """A spawned process."""

    class SpawnContext(context.SpawnContext):
        """The 'spawn' start method."""
        Process = SpawnProcess

    METHODS['spawn'] = SpawnContext

if hasattr(context, 'ForkServerProcess'):

    class ForkServerProcess(context.ForkServerProcess):
        """A process of the fork server."""

    class ForkServerContext(context.ForkServerContext):
        """The 'forkserver' start method."""
        Process = ForkServerProcess

    METHODS['forkserver'] = ForkServerContext


def _start_method(loader: DataLoader) -> Optional[str]:
    chosen = loader.multiprocessing_context
    if chosen is None:
        return multiprocessing.get_start_method()
    return chosen.get_start_method()


def use_own_start_method(loader: DataLoader) -> None:
    """Replace the loader's context by ours of the same start method, in place."""
    if loader.num_workers > 0 and _start_method(loader) in METHODS:
        loader.multiprocessing_context = METHODS[_start_method(loader)]()
