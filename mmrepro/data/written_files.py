"""Name the files that samples write: what later samples read from them depends on who was first."""
from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mmengine.logging import print_log

# of the samples that are being loaded; None outside
_files: ContextVar[list[str] | None] = ContextVar('files', default=None)
_named: set[str] = set()  # datasets


def _note(event: str, args: tuple[Any, ...]) -> None:
    if event == 'open' and set('wax+').intersection(args[1] or ''):
        files = _files.get()
        if files is not None:
            files.append(str(args[0]))


_once_added = functools.cache(sys.addaudithook)


@contextmanager
def named(dataset: str) -> Iterator[None]:
    """Name the first file that this block opens for writing, once for each dataset.

    The audit hook that sees the files stays in the process.
    """
    _once_added(_note)
    files: list[str] = []
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)
    if files and dataset not in _named:
        _named.add(dataset)
        print_log(
            f'{dataset}: a sample has written {files[0]} while it was loaded. If samples read it, '
            'they depend on which worker was the first: write it before the training', 'current',
            logging.WARNING)
