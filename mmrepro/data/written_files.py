"""Name the files that samples write: what later samples read from them depends on who was first."""
from __future__ import annotations

import functools
import logging
import sys
from contextvars import ContextVar
from typing import Any

from mmengine.logging import print_log

# of the sample that is being loaded; None outside
watching: ContextVar[list[str] | None] = ContextVar('watching', default=None)


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == 'open' and set('wax+').intersection(args[1] or ''):
        files = watching.get()
        if files is not None:
            files.append(str(args[0]))


@functools.cache
def watch() -> None:
    """Let :data:`watching` collect files that are opened for writing. It cannot be undone."""
    sys.addaudithook(_note)


_named: set[str] = set()  # datasets


def warn(dataset: str, files: list[str]) -> None:
    """Name the first file, once for each dataset in this process."""
    if files and dataset not in _named:
        _named.add(dataset)
        print_log(
            f'{dataset}: a sample has written {files[0]} while it was loaded. If samples read it, '
            'they depend on which worker was the first: write it before the training', 'current',
            logging.WARNING)
