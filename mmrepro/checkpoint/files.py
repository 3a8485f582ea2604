"""Checkpoint files: written whole or not at all, loaded without running code.

A sealed file ends in a ZIP archive comment, ``mmrepro sha256 <64 hex digits>`` over all bytes
before it (APPNOTE.TXT 4.3.16); torch and ``zipfile`` read it as before.
"""
from __future__ import annotations

import errno
import fcntl
import functools
import io
import logging
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, BinaryIO, Callable
from urllib.parse import urlparse

import torch
from mmengine.fileio import get
from mmengine.logging import print_log

from ..errors import CheckpointError, MissingCheckpointError
from ..objects.digests import file_digest
from ..util.files import partial_of
from ..util.scoped import replaced
from .safe_loading import ADDING, safe_load

# of file systems that do not flush folders (CIFS, 9p, some FUSE): the file itself is on the disk
NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)

_HASH = re.compile(r'-[0-9a-f]{8,}\.\w+$')  # of its content, in the name of a published file
HTTP = ('http://', 'https://')

UNZIPPED = b'\x80\x02'  # first bytes of a file of torch before 1.6: a pickle
MARK = b'mmrepro sha256 '
LAST_GOOD = '.last_good.pth'  # hard link to the newest checkpoint that a run can continue from

_END = struct.Struct('<4s4H2LH')  # end of central directory; the last field is the comment's length
_END_MAGIC = b'PK\x05\x06'
_COMMENT = len(MARK) + 64


def seal(path: str) -> None:
    """Append the digest to a checkpoint that torch has just written, and bring it to the disk.

    Raises:
        CheckpointError: when the file is not in torch's ZIP format.
    """
    size = os.path.getsize(path)
    body = size - _END.size
    with open(path, 'r+b') as file:
        file.seek(max(body, 0))
        end = file.read()
        if len(end) != _END.size or end[:4] != _END_MAGIC:
            raise CheckpointError(f'{path} is not in the ZIP format of torch.save')
        file.seek(body)
        file.write(_END.pack(*_END.unpack(end)[:-1], _COMMENT))
        digest = file_digest(file, size)
        file.seek(size)
        file.write(MARK + digest.encode())
        file.flush()
        os.fsync(file.fileno())


def is_sealed(path: str) -> bool:
    """Whether a file ends as the checkpoints of a run do: a file of somebody else does not."""
    with suppress(OSError), open(path, 'rb') as file:
        file.seek(max(0, os.path.getsize(path) - _COMMENT))
        return file.read(len(MARK)) == MARK
    return False


def check_file(path: str) -> str | None:
    """Return the problem of a checkpoint file, or None. A file needs no digest."""
    try:
        with open(path, 'rb') as file:
            return _check_content(file)
    except OSError as error:
        return f'cannot be read ({error.strerror})'


def _check_content(file: BinaryIO) -> str | None:
    tail_size = _END.size + _COMMENT
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 'is empty'
    file.seek(max(0, size - tail_size))
    tail = file.read()
    sealed = len(tail) == tail_size and tail.startswith(_END_MAGIC)
    if sealed and tail[_END.size:] != MARK + file_digest(file, size - _COMMENT).encode():
        return 'is damaged (its digest does not match its contents)'
    return _check_archive(file, tail, sealed)


def _check_archive(file: BinaryIO, tail: bytes, sealed: bool) -> str | None:
    """Check an archive; without digest, by the checksums of its records."""
    start = tail.rfind(_END_MAGIC)
    whole = start >= 0 and len(tail) - start >= _END.size
    if not whole or _END.unpack_from(tail, start)[-1] != len(tail) - start - _END.size:
        return 'is truncated or not a checkpoint (no end record)'
    try:
        with zipfile.ZipFile(file) as archive:
            # torch.save compresses nothing, and a few bytes may become any number
            if any(record.compress_type for record in archive.infolist()):
                return 'is not a checkpoint (its records are compressed)'
            broken = None if sealed else archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error) as error:
        return f'is truncated or not a checkpoint ({error})'
    return None if broken is None else f'is damaged (in {broken})'


STRETCH = 64 << 20  # bytes that are written between two calls of `let_go`


class _Stream:
    """A file for ``torch.save``, which may abort the process where a file raises an error."""

    def __init__(self, file: BinaryIO, let_go: Callable[[], None]) -> None:
        self._file, self._let_go = file, let_go
        self._count = 0  # bytes since the last call of it
        self.error: OSError | None = None

    def write(self, content: Any) -> int:
        size = memoryview(content).nbytes
        try:
            if self.error is None:
                self._file.write(content)
        except OSError as error:
            self.error = error
        self._count += size
        if self._count >= STRETCH:
            self._count = 0
            self._let_go()
        return size

    def flush(self) -> None:
        pass


def write_content(checkpoint: Mapping[str, Any], filename: str, let_go: Callable[[], None],
                  **options: Any) -> None:
    """Write a checkpoint as MMEngine's ``save_checkpoint`` does, without the whole file in memory.

    Args:
        checkpoint: The content.
        filename: Of a local file.
        let_go: Called from time to time, to free the memory of tensors that were written.
        options: Of MMEngine's function; for files that are not local.

    Raises:
        OSError: the file cannot be written; names it.
    """
    os.makedirs(os.path.dirname(os.path.abspath(filename)), exist_ok=True)
    try:
        with open(filename, 'wb') as file:
            stream: Any = _Stream(file, let_go)
            torch.save(checkpoint, stream)
            if stream.error is not None:
                raise stream.error
    except OSError as error:  # of a write, which knows no name
        error.filename = error.filename or filename
        raise


def replace_with(partial: str, path: str, complete: bool = True) -> None:
    """Seal ``partial`` and put it at ``path`` in one step.

    A hard link keeps the newest ``complete`` file alive, from which a run can continue: MMEngine's
    CheckpointHook removes the old checkpoint before it writes the new one, and its best checkpoints
    have no optimizer.
    """
    seal(partial)
    os.replace(partial, path)
    _flush_folder(os.path.dirname(os.path.abspath(path)))
    if not complete:
        return
    keep = os.path.join(os.path.dirname(path), LAST_GOOD)
    link = partial_of(os.path.join(os.path.dirname(path), LAST_GOOD.lstrip('.')))
    with suppress(FileNotFoundError):  # of a killed process that had this one's number
        os.remove(link)
    try:
        os.link(path, link)
    except OSError:  # a file system without hard links: the file itself has to do
        return
    os.replace(link, keep)


def _flush_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
    finally:
        os.close(folder)


def load(path: str, map_location: Any = 'cpu', mapped: bool = False, unzipped: bool = True,
         checked: bool = False, fresh: bool = False) -> Any:
    """Load a checkpoint; it cannot run code.

    Args:
        path: of a local file, or what a file backend of MMEngine fetches: 's3://bucket/a.pth'.
        mapped: tensors are views of the file, which is read when they are used. Not for tensors
            that outlive the file's contents.
        unzipped: accept the format of torch before 1.6, which is no zip file and cannot be checked
            beforehand.
        checked: :func:`check_file` has accepted the local file already.
        fresh: fetch a file of the web, also where torch keeps one with its name.

    Raises:
        MissingCheckpointError: no such file.
        CheckpointError: damaged, or it holds objects that are not on the allow-list.
    """
    if '://' in path:
        return _load_remote(path, map_location, path.startswith(HTTP) and not fresh)
    path = os.path.expanduser(path)
    if not os.path.isfile(path):
        raise MissingCheckpointError(f'checkpoint {path} does not exist')
    problem = None if checked else check_file(path)
    if problem is not None and not (unzipped and _is_unzipped(path)):
        raise CheckpointError(f'checkpoint {path} {problem}')
    return _load_file(path, path, map_location, mapped and problem is None)


def _load_remote(url: str, map_location: Any, kept: bool) -> Any:
    """Load a remote file; ``kept``: that of its name in torch's cache, if there is one."""
    if kept:
        path = _downloaded(url)
        problem = check_file(path)
        if problem is not None and not _is_unzipped(path):
            raise CheckpointError(f'checkpoint {url} {problem}; it is kept as {path}')
        return _load_file(url, path, map_location)
    file = _fetched(url)
    problem = _check_content(file)
    if problem is not None and not file.getvalue().startswith(UNZIPPED):
        raise CheckpointError(f'checkpoint {url} {problem}')
    file.seek(0)
    return _load_file(url, file, map_location)


def _fetched(url: str) -> io.BytesIO:
    """Return the content of a remote file, which a file backend of MMEngine fetches."""
    try:
        return io.BytesIO(get(url))
    except KeyError as error:  # MMEngine's table of prefixes
        raise CheckpointError(f'checkpoint {url} cannot be fetched (no file backend of MMEngine is '
                              f'registered for {error})') from error
    except Exception as error:  # clients of object stores have classes of their own
        kind = '' if isinstance(error, OSError) else f'{type(error).__name__}: '
        raise CheckpointError(f'checkpoint {url} cannot be fetched ({kind}{error})') from error


def _downloaded(url: str) -> str:
    """Return the path of a file of the web in torch's cache, which processes share."""
    folder = os.path.join(torch.hub.get_dir(), 'checkpoints')
    path = os.path.join(folder, os.path.basename(urlparse(url).path))
    if os.path.isfile(path):  # whole: a download gets its name when it is complete
        if not _HASH.search(path):  # as in epoch_12.pth, which files of other runs are called, too
            print_log(f'{url} is not fetched: torch keeps a file of this name, {path}; delete it '
                      'if it is of another run', 'current', logging.WARNING)
        return path
    if not os.path.basename(path):
        raise CheckpointError(f'checkpoint {url} cannot be fetched (the address names no file)')
    os.makedirs(folder, exist_ok=True)
    with open(f'{path}.lock', 'w') as lock:
        with suppress(OSError):  # a file system without locks: each rank may download it
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            try:
                torch.hub.download_url_to_file(url, path, progress=os.isatty(0))
            except (OSError, HTTPException) as error:
                raise CheckpointError(f'checkpoint {url} cannot be fetched ({error})') from error
    return path


def _load_file(path: str, file: str | io.BytesIO, map_location: Any, mapped: bool = False) -> Any:
    try:
        return safe_load(file, map_location, mapped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f'checkpoint {path} holds something that is not data and could run code; it was not '
            f'loaded. If you trust it: mmrepro.checkpoint.safe_loading.allow_list() has what is '
            f'accepted, {ADDING}.\n{error}') from error
    except torch.cuda.OutOfMemoryError:  # a damaged pickle may ask for any memory of the host
        raise
    except Exception as error:  # a damaged pickle may raise anything
        line, *_ = f'{type(error).__name__}: {error}'.splitlines()
        raise CheckpointError(f'checkpoint {path} is damaged ({line})') from error


def _is_unzipped(path: str) -> bool:
    with suppress(OSError), open(path, 'rb') as file:
        return file.read(2) == UNZIPPED
    return False


@contextmanager
def without_code(read: Callable[[str, Any], Any] = load) -> Iterator[None]:
    """Let MMEngine load no checkpoint that runs code, in this block.

    Args:
        read: ``(path, map_location)``, for local files, the web, and what file backends fetch.
            Other schemes have their own loaders, with this module's instead of ``torch.load``.
    """
    from mmengine.runner import checkpoint

    def reading(loader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loader)  # the log has its name
        def load(filename: str, map_location: Any = None, **options: Any) -> Any:
            # without the barrier of MMEngine's: a virtual rank would let others run in this block
            return read(filename, map_location)
        return load

    def guarded(loader: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(loader)
        def load(filename: str, map_location: Any = None) -> Any:
            def of_torch(file: Any, map_location: Any = map_location, *args: Any,
                         **options: Any) -> Any:
                return _load_file(filename, file, map_location)

            from_http = ours[checkpoint.load_from_http]
            with replaced(torch, load=of_torch), replaced(checkpoint, load_from_http=from_http):
                return loader(filename, map_location)
        return load

    ours = {stock: reading(stock) for stock in (
        checkpoint.load_from_local, checkpoint.load_from_ceph, checkpoint.load_from_http)}
    loader = checkpoint.CheckpointLoader
    with replaced(loader, _schemes={prefix: ours.get(function) or guarded(function)
                                    for prefix, function in loader._schemes.items()}):
        yield
