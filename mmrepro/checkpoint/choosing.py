"""Choose the checkpoint of a work directory to continue from; work directories may be copied."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable

from .files import LAST_GOOD, check_file


def pointed(folder: str) -> str:
    """Return what ``last_checkpoint`` of a work directory names; '' for nothing."""
    pointer = os.path.join(folder, 'last_checkpoint')
    if not os.path.isfile(pointer):
        return ''
    with open(pointer, 'rb') as file:
        return file.read().decode(errors='replace').strip().replace('\0', '?')


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
    """Return the newest complete checkpoint of a work directory, and what was passed over and why.

    ``last_checkpoint`` goes first; then every ``*.pth`` beside it and in the folder that it names
    (CheckpointHook's ``out_dir``), newest first. In a copy of a work directory the name leads to
    the original: the file beside ``last_checkpoint`` counts, and no other folder. ``refuse``
    returns the problem of a file, or None.
    """
    pointer, named = os.path.join(folder, 'last_checkpoint'), pointed(folder)
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

    CheckpointHook removes the best checkpoint that this names when there is a better one. In a copy
    of a work directory that would be the original's.
    """
    info = dict(runtime_info)
    for name, value in info.items():
        if name.startswith(('last_ckpt', 'best_ckpt')) and isinstance(value, str):
            beside = _beside(os.path.abspath(path), value)
            info[name] = beside if os.path.exists(beside) else value
    return info
