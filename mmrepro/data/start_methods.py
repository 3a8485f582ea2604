"""Start methods that import mmrepro in the worker before anything else arrives there.

A worker that does not fork unpickles the dataset, and with it imports MMDetection, which asks for
mmcv's operators: with mmcv-lite they exist only once mmrepro is imported. The process object is the
first thing in the pickle, and its class lives here.

The processes of all start methods end as :mod:`mmrepro.data.worker_signals` says.
"""
from __future__ import annotations

import multiprocessing
from multiprocessing import context
from typing import Any

from torch.utils.data import DataLoader

from .worker_signals import ends_workers, note_thread

METHODS: dict[str, type] = {}  # start method -> context


def _own_popen(process: type) -> Any:
    """multiprocessing's way to start a process; :func:`ends_workers` changes how it ends."""
    start = process._Popen

    def _Popen(process_obj: Any) -> Any:
        note_thread(process_obj)
        popen = start(process_obj)
        popen.__class__ = ends_workers(type(popen))
        return popen

    return staticmethod(_Popen)


for _name in ('Fork', 'Spawn', 'ForkServer'):
    if hasattr(context, f'{_name}Process'):  # Windows only spawns
        _process = getattr(context, f'{_name}Process')
        _own = type(f'{_name}Process', (_process, ), {
            '__module__': __name__, '_Popen': _own_popen(_process)})
        globals()[f'{_name}Process'] = _own  # a worker unpickles it by this name
        METHODS[_name.lower()] = type(f'{_name}Context', (getattr(context, f'{_name}Context'), ),
                                      {'__module__': __name__, 'Process': _own})


def use_own_start_method(loader: DataLoader) -> None:
    """Replace the loader's context by ours of the same start method, in place."""
    chosen = (loader.multiprocessing_context or multiprocessing).get_start_method()
    if loader.num_workers > 0 and chosen in METHODS:
        loader.multiprocessing_context = METHODS[chosen]()
