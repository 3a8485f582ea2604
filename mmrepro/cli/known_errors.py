"""Which errors of a training reach the user as one line, because the line says everything.

All others keep their traceback.
"""
from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, NamedTuple

from ..runs.reduction import missing_file


class KnownError(NamedTuple):
    """An error that names setting or file, value and what is allowed."""
    error: str  # full name of the class
    module: str = ''  # beginning of the name of the module that raises it; '' for any
    function: str = ''  # that raises it; '' for any


KNOWN = (
    KnownError('mmrepro.errors.RandomnessError'),
    KnownError('mmrepro.errors.DeterminismError'),
    KnownError('mmrepro.errors.CheckpointError'),
    # a `load_from` that is not there
    KnownError('builtins.FileNotFoundError', 'mmrepro.checkpoint.files', 'load'),
    # resumed with other settings, versions or hardware
    KnownError('mmrepro.errors.ResumeError'),
    # an argument of one of our hooks, which refuse theirs in the constructor
    KnownError('builtins.ValueError', 'mmrepro.hooks.', '__init__'),
    # a provider of operators that is not installed
    KnownError('mmrepro.errors.OperatorProviderError'),
)


def known(error: BaseException, cfg: Any, building: bool = False) -> str:
    """What to tell the user instead of a traceback; '' for an error that is not known.

    ``building``: the error came while the runner of ``cfg`` was built.
    """
    for one in _chain(error):
        frame = next((frame for frame, _ in list(walk_tb(one.__traceback__))[-1:]), None)
        names = {f'{cls.__module__}.{cls.__qualname__}' for cls in type(one).__mro__}
        for row in KNOWN:
            if row.error in names and _raised_by(frame, row):
                text = str(one)
                if frame is None or frame.f_code.co_name != '__init__':
                    return text
                # a constructor: its message with the name of its class
                name = type(frame.f_locals.get('self')).__name__
                return text if name in text else f'{name}: {text}'
        if isinstance(one, OSError) and isinstance(one.filename, str):
            missing = missing_file(cfg, one.filename)
            if missing and isinstance(one, FileNotFoundError):
                return f'{missing}. Get the dataset, or change data_root with --cfg-options'
            if building and _is_refused(one, cfg.get('work_dir')):
                return f'work_dir {cfg.work_dir} cannot be made or written to: {one.strerror}'
    return ''


@contextmanager
def one_line(parser: Any, cfg: Any, building: bool = False) -> Iterator[None]:
    """Let known errors of this block end the program with one line and exit code 2."""
    try:
        yield
    except Exception as error:
        text = known(error, cfg, building)
        if not text:
            raise
        parser.error(text)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those of its type that it repeats, as some versions of MMEngine do."""
    inner: BaseException | None = error
    while inner is not None and type(inner) is type(error):
        yield inner
        inner = inner.__cause__ or inner.__context__


def _raised_by(frame: Any, row: KnownError) -> bool:
    if frame is None:
        return not row.module
    return frame.f_globals.get('__name__', '').startswith(row.module) and (
        not row.function or frame.f_code.co_name == row.function)


def _is_refused(error: OSError, folder: str | None) -> bool:
    """Whether the error is that ``folder`` cannot be made, or nothing can be written into it."""
    if not folder or (os.path.isdir(folder) and not isinstance(error, PermissionError)):
        return False
    inner, outer = (os.path.join(os.path.abspath(one), '') for one in (error.filename, folder))
    # of folders that are to be made, the first that fails is named
    return inner.startswith(outer) or outer.startswith(inner)
