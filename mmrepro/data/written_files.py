"""Name the files that samples write: what later samples read from them depends on who was first."""
from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable

import cv2
import torch
from mmengine.logging import print_log

from ..util.scoped import replaced

# in the address of a SQLite database that is not written
_READ_ONLY = re.compile(r'file:.*[?&](mode=(ro|memory)|immutable=1)\b')
# audit events of Python that make a file -> position of its path
_EVENTS = {'sqlite3.connect': 0, 'os.symlink': 1, 'os.link': 1, 'os.rename': 1}

# of the samples that are being loaded; None outside
_files: ContextVar[list[str] | None] = ContextVar('files', default=None)
_named: set[str] = set()  # datasets


def _note(path: Any) -> None:
    files = _files.get()
    if files is not None and isinstance(path, (str, bytes, os.PathLike)) and path != os.devnull:
        files.append(os.fsdecode(path))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        path = args[_EVENTS[event]]
        if event != 'sqlite3.connect' or not (
                isinstance(path, str) and (path == ':memory:' or _READ_ONLY.match(path))):
            _note(path)
    elif event == 'open':
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR) or set('wax+').intersection(mode or ''):
            _note(path)


def _noting(write: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Return a function that writes a file without an audit event, and notes its path."""
    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _note(args[position] if len(args) > position else kwargs.get(name))
        return write(*args, **kwargs)
    return noted


_once_added = functools.cache(sys.addaudithook)


@contextmanager
def named(dataset: str) -> Iterator[None]:
    """Name the first file that this block opens for writing, once for each dataset.

    The audit hook that sees the files stays in the process.
    """
    _once_added(_audit)
    files: list[str] = []
    token = _files.set(files)
    try:
        with replaced(cv2, imwrite=_noting(cv2.imwrite, 0, 'filename')), \
                replaced(torch, save=_noting(torch.save, 1, 'f')):
            yield
    finally:
        _files.reset(token)
    if files and dataset not in _named:
        _named.add(dataset)
        print_log(
            f'{dataset}: a sample has written {files[0]} while it was loaded. If samples read it, '
            'they depend on which worker was the first: write it before the training', 'current',
            logging.WARNING)
