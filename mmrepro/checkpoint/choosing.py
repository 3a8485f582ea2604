"""Which checkpoint of a work directory a run continues from; work directories may be copied."""
from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Callable

from .files import check_file


def _pointed(folder: str) -> str:
    """What ``last_checkpoint`` of a work directory names; '' for nothing."""
    pointer = os.path.join(folder, 'last_checkpoint')
    if not os.path.exists(pointer):
        return ''
    with open(pointer) as file:
        return file.read().strip()


def _is_copied(folder: str, named: str) -> bool:
    """Whether the file that ``last_checkpoint`` names lies in another work directory."""
    home = os.path.dirname(os.path.abspath(named))
    if '://' in named or not os.path.isfile(os.path.join(folder, os.path.basename(named))):
        return False
    # a folder without `last_checkpoint` is CheckpointHook's `out_dir`, unless it is gone
    return os.path.realpath(home) != os.path.realpath(folder) and (
        not os.path.exists(named) or os.path.exists(os.path.join(home, 'last_checkpoint')))


def is_remote(settings: Mapping[str, Any]) -> bool:
    """Whether the checkpoint that a run with these settings resumes from is for MMEngine to fetch.

    Args:
        settings: ``load_from`` and ``work_dir``.
    """
    return '://' in (settings.get('load_from') or _pointed(settings['work_dir']))


def newest_good(folder: str, refuse: Callable[[str], str | None] = check_file
                ) -> tuple[str | None, list[str]]:
    """The newest complete checkpoint of a work directory, and what was passed over and why.

    ``last_checkpoint`` goes first; then every ``*.pth`` beside it and in the folder that it names
    (CheckpointHook's ``out_dir``), newest first. In a copy of a work directory the name leads to
    the original: the file beside ``last_checkpoint`` counts, and no other folder.

    Args:
        refuse: what is wrong with a file, or None.
    """
    candidates: list[str] = []
    folders = [folder]
    passed: list[str] = []
    named = _pointed(folder)
    if named:
        beside = os.path.join(folder, os.path.basename(named))
        if _is_copied(folder, named):
            passed.append(f'{os.path.join(folder, "last_checkpoint")} names {named}, in the work '
                          f'directory that this one is a copy of: {beside} is taken instead')
            candidates.append(beside)
        else:
            candidates.append(named if os.path.isabs(named) or os.path.exists(named) else beside)
            folders.append(os.path.dirname(named) or folder)
    found = [os.path.join(one, name) for one in folders if os.path.isdir(one)
             for name in os.listdir(one)
             if name.endswith('.pth') and not name.startswith('best_')]
    candidates += sorted(found, key=lambda path: (-os.stat(path).st_mtime_ns, path))
    seen = set()
    for path in candidates:
        if os.path.abspath(path) in seen:
            continue
        seen.add(os.path.abspath(path))
        problem = refuse(path)
        if problem is None:
            return path, passed
        passed.append(f'passed over: {path} {problem}')
    return None, passed


def with_paths_beside(path: str, runtime_info: dict[str, Any]) -> dict[str, Any]:
    """``runtime_info`` of a message hub that names the checkpoints beside the one at ``path``.

    CheckpointHook removes the best checkpoint that it is told of here when there is a better one.
    In a copy of a work directory that would be the original's.
    """
    found = dict(runtime_info)
    for name, value in found.items():
        if name.startswith(('last_ckpt', 'best_ckpt')) and isinstance(value, str):
            beside = os.path.join(os.path.dirname(os.path.abspath(path)), os.path.basename(value))
            found[name] = beside if os.path.exists(beside) else value
    return found
