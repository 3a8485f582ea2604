"""Start methods that import mmrepro in the worker before anything else arrives there.

A worker that does not fork unpickles the dataset, and with it imports MMDetection, which asks for
mmcv's operators: with mmcv-lite they exist only once mmrepro is imported. The process object is the
first thing in the pickle, and its class lives here.

The processes of all start methods end as :mod:`mmrepro.data.worker_signals` says.
"""
from __future__ import annotations

import multiprocessing
from multiprocessing import context
from typing import Any, Optional

from torch.utils.data import DataLoader

from .worker_signals import ends_workers

__all__ = ['use_own_start_method']

METHODS = {}


def _own_popen(process: type) -> Any:
    """multiprocessing's way to start a process, with another way to end it."""
    start = process._Popen

    def _Popen(process_obj: Any) -> Any:
        popen = start(process_obj)
        popen.__class__ = ends_workers(type(popen))
        return popen

    return staticmethod(_Popen)


if hasattr(context, 'ForkProcess'):

    class ForkProcess(context.ForkProcess):
        """A forked process."""
        _Popen = _own_popen(context.ForkProcess)

    class ForkContext(context.ForkContext):
        """The 'fork' start method."""
        Process = ForkProcess

    METHODS['fork'] = ForkContext

if hasattr(context, 'SpawnProcess'):

    class SpawnProcess(context.SpawnProcess):
        """A spawned process."""
        _Popen = _own_popen(context.SpawnProcess)

    class SpawnContext(context.SpawnContext):
        """The 'spawn' start method."""
        Process = SpawnProcess

    METHODS['spawn'] = SpawnContext

if hasattr(context, 'ForkServerProcess'):

    class ForkServerProcess(context.ForkServerProcess):
        """A process of the fork server."""
        _Popen = _own_popen(context.ForkServerProcess)

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
