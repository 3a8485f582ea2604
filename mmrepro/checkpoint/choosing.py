"""Choose the checkpoint of a work directory to continue from, and lock the directory.

Work directories may be copied.
"""
from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import IO, Any, Callable

from mmengine.dist import is_main_process

from ..errors import WorkDirInUse
from .files import LAST_GOOD, check_file, remove_partial

OWNER = os.path.join('mmrepro', 'owner.json')  # in a work directory: who trains there
SHARE = 'MMREPRO_SHARE_WORK_DIR'  # variable: =1 lets several runs write to one folder


def last_checkpoint_of(folder: str) -> str:
    """Return the path in ``last_checkpoint`` of a work directory, or ''."""
    pointer = os.path.join(folder, 'last_checkpoint')
    if not os.path.isfile(pointer):
        return ''
    with open(pointer, 'rb') as file:
        return file.read().decode(errors='replace').strip().replace('\0', '?')


def lies_in(path: str, folder: str) -> bool:
    """Whether a file lies in a work directory, or in the folder of its ``last_checkpoint``."""
    def home(name: str) -> str:
        parent, _, _ = name.rpartition('/')
        return parent if '://' in name else os.path.realpath(os.path.dirname(name) or '.')

    return home(os.path.expanduser(path)) in (
        os.path.realpath(folder),
        *(home(named) for named in [last_checkpoint_of(folder)] if named))


def _beside(path: str, named: str) -> str:
    """Return the path of a file with the name of ``named``, in the folder of ``path``."""
    return os.path.join(os.path.dirname(path), os.path.basename(named))


def _is_copied(pointer: str, named: str) -> bool:
    """Whether the file that ``last_checkpoint`` names lies in another work directory."""
    home = os.path.dirname(os.path.abspath(named))
    if '://' in named or os.path.realpath(home) == os.path.realpath(os.path.dirname(pointer)):
        return False
    # a folder without `last_checkpoint` is CheckpointHook's `out_dir`, unless it is gone
    return os.path.exists(os.path.join(home, 'last_checkpoint')) or (
        not os.path.exists(named) and os.path.isfile(_beside(pointer, named)))


def newest_good(folder: str, refuse: Callable[[str], str | None] = check_file
                ) -> tuple[str | None, list[str]]:
    """Return the newest complete checkpoint of a work directory, and why others were passed over.

    ``last_checkpoint`` goes first; then every ``*.pth`` beside it and in the folder that it names
    (CheckpointHook's ``out_dir``), newest first. In a copy of a work directory the name leads to
    the original: the file beside ``last_checkpoint`` counts, and no other folder. ``refuse``
    returns the problem of a file, or None.
    """
    pointer, named = os.path.join(folder, 'last_checkpoint'), last_checkpoint_of(folder)
    beside = _beside(pointer, named)
    candidates, passed, folders = [], [], [folder]
    if named and _is_copied(pointer, named):
        there = os.path.isfile(beside)
        passed.append(f'{pointer} names {named}, in the work directory that this one is a copy of: '
                      + (f'{beside} is taken instead' if there else 'the copy has no such file'))
        candidates += [beside] * there
    elif named:
        candidates.append(named if os.path.isabs(named) or os.path.exists(named) else beside)
        folders.append(os.path.dirname(named) or folder)
    files = [os.path.join(home, name) for home in folders if os.path.isdir(home)
             for name in os.listdir(home) if name.endswith('.pth') and not name.startswith('best_')]
    # the hidden link last: its checkpoint may have been deleted on purpose. A link may lead nowhere
    files.sort(key=lambda path: (
        os.path.basename(path) == LAST_GOOD,
        -os.stat(path).st_mtime_ns if os.path.exists(path) else 0, path))
    distinct: dict[str, str] = {}
    for path in (*candidates, *files):
        distinct.setdefault(os.path.abspath(path), path)
    for path in distinct.values():
        problem = refuse(path)
        if problem is None:
            return path, passed
        passed.append(f'passed over: {path} {problem}')
    return None, passed


def with_paths_beside(path: str, runtime_info: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``runtime_info`` of a message hub, naming the checkpoints beside ``path``.

    CheckpointHook removes the best checkpoint that is named here when it writes a better one. In a
    copy of a work directory, it would remove the original's file.
    """
    info = dict(runtime_info)
    for name, value in info.items():
        if name.startswith(('last_ckpt', 'best_ckpt')) and isinstance(value, str):
            beside = _beside(os.path.abspath(path), value)
            info[name] = beside if os.path.exists(beside) else value
    return info


_owned: dict[str, tuple[IO[str], int]] = {}  # real path -> its open file, trainings in this process


@contextmanager
def writing(folder: str) -> Iterator[None]:
    """Lock a work directory against other processes in this block; rank 0 locks for all ranks.

    The kernel releases the lock when the process ends, however it ends. A file system without locks
    leaves the directory open.

    Raises:
        WorkDirInUse: another process trains there; names it, its machine, and since when.
    """
    if not is_main_process() or '://' in folder or os.environ.get(SHARE) == '1':
        yield
        return
    path = os.path.realpath(folder)
    file, trainings = _owned.get(path) or (_locked(path), 0)
    _owned[path] = file, trainings + 1
    try:
        yield
    finally:
        file, trainings = _owned.pop(path)
        if trainings > 1:
            _owned[path] = file, trainings - 1
        else:
            file.close()


def is_written(folder: str) -> bool:
    """Whether another process trains in a work directory."""
    owner = os.path.join(folder, OWNER)
    if '://' in folder or os.environ.get(SHARE) == '1' or os.path.realpath(folder) in _owned:
        return False
    if not os.path.exists(owner):  # no run has trained there
        return False
    file, is_ours = _opened(owner)
    with file:
        try:
            _lock(file, is_ours)
        except (BlockingIOError, PermissionError):
            return True
        except OSError:  # a file system without locks
            return False
    return False


def _locked(folder: str) -> IO[str]:
    os.makedirs(os.path.join(folder, 'mmrepro'), exist_ok=True)
    file, is_ours = _opened(os.path.join(folder, OWNER))
    try:
        _lock(file, is_ours)
    except (BlockingIOError, PermissionError) as error:
        with file:
            file.seek(0)
            text = file.read()
        raise WorkDirInUse(
            f'{_owner(text)} trains in {folder}: a second run would mix its logs and checkpoints '
            f'with those of the first. Give another work_dir, or end that process; {SHARE}=1 lets '
            'both write') from error
    except OSError:  # a file system without locks
        return file
    remove_partial(folder)  # of processes that were killed
    if not is_ours:
        return file
    file.truncate(0)
    file.write(json.dumps(dict(pid=os.getpid(), host=socket.gethostname(),
                               since=time.strftime('%Y-%m-%d %H:%M:%S'))) + '\n')
    file.flush()
    return file


def _opened(path: str) -> tuple[IO[str], bool]:
    """Open the lock file of a folder; return the file, and whether this user may write to it.

    Members of a group share folders. A lock on a file that this user may only read still keeps the
    owner of the file out.
    """
    try:
        return open(path, 'a+', encoding='utf-8'), True
    except PermissionError:
        return open(path, encoding='utf-8'), False


def _lock(file: IO[str], is_ours: bool) -> None:
    """Lock a file for this process: its forks (data workers) do not keep the lock."""
    fcntl.lockf(file, (fcntl.LOCK_EX if is_ours else fcntl.LOCK_SH) | fcntl.LOCK_NB)


def _owner(text: str) -> str:
    with suppress(ValueError, KeyError, TypeError):
        owner = json.loads(text)
        return f'process {owner["pid"]} on {owner["host"]} (since {owner["since"]})'
    return 'another process'
