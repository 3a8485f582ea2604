"""Environment variables that code outside of libraries reads: a part of what a run depends on.

While :func:`watch` is in effect, ``os.environ`` notes who asks for a variable. Whether the code
belongs to a library is decided later.
"""
from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, NamedTuple

_WRAPPERS = ('os', 'collections.abc')  # modules of getenv(), get(), setdefault(), ...
_PLAIN: Any = type(os.environ)


class Read(NamedTuple):
    """The first read of a variable by one line of code."""
    name: str
    value: str | None  # None: it was not set
    module: str  # of the code
    file: str
    line: int


_reads: dict[tuple[str, str, int], Read] = {}
_shared: Any = None  # file for the reads of forked workers, and the process that made it
_thread = threading.local()  # `copying`: the code and the instruction that copy all variables


class _Watched(_PLAIN):
    """``os.environ`` that notes its readers; copies of the whole environment are no reads."""

    def keys(self) -> Any:
        frame = sys._getframe(1)
        _thread.copying = frame.f_code, frame.f_lasti
        return super().keys()

    def __getitem__(self, name: str) -> str:
        try:
            value: str = super().__getitem__(name)
        except KeyError:
            _note(name, None, sys._getframe(1))
            raise
        _note(name, value, sys._getframe(1))
        return value


def _note(name: str, value: str | None, frame: Any) -> None:
    while frame.f_back and frame.f_globals.get('__name__') in _WRAPPERS:
        if frame.f_code.co_name in ('__iter__', 'copy'):  # of items() and values()
            return
        frame = frame.f_back
    key = name, frame.f_code.co_filename, frame.f_lineno
    if key in _reads or getattr(_thread, 'copying', None) == (frame.f_code, frame.f_lasti):
        return
    _reads[key] = read = Read(name, value, str(frame.f_globals.get('__name__')), *key[1:])
    if _shared is not None and _shared[1] != os.getpid():
        os.write(_shared[0].fileno(), json.dumps(read).encode() + b'\n')


def watch(active: bool = True) -> None:
    """Note who reads ``os.environ`` from now on; no longer with ``active=False``."""
    os.environ.__class__ = _Watched if active else _PLAIN


def share() -> None:
    """Let worker processes that fork from now on report their reads."""
    global _shared
    if _shared is None or _shared[1] != os.getpid():
        import tempfile
        _shared = tempfile.TemporaryFile(), os.getpid()


def reads() -> list[Read]:
    """Return the reads by code outside of libraries until now, forked workers included."""
    from ..util.libraries import is_code_of_user  # not needed to note a read
    found = list(_reads.values())
    if _shared is not None:
        size = os.fstat(_shared[0].fileno()).st_size
        lines = os.pread(_shared[0].fileno(), size, 0).splitlines()
        found += [Read(*json.loads(line)) for line in lines]
    return [read for read in found if is_code_of_user(read.module, read.file)]
