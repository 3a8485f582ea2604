"""Choose the checkpoint that a run continues from, and lock its work directory.

Work directories may be copied.
"""
from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, Callable

from mmengine.dist import is_main_process
from mmengine.runner import CheckpointLoader

from ..config import AUTO, RandomnessConfig
from ..data.passes import DataCursor
from ..errors import CheckpointError, ConfigError, RandomnessError, WorkDirInUse
from ..util.files import remove_partial
from .files import LAST_GOOD, check_file, load, without_code
from .fit import is_weights, judge, lacks, stock_facts

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
        instead = 'the copy has no such file'
        if os.path.isfile(beside):
            instead = f'{beside} is taken instead'
            candidates.append(beside)
        passed.append(f'{pointer} names {named}, in the work directory that this one is a copy of: '
                      f'{instead}')
    elif named:
        candidates.append(named if os.path.isabs(named) or os.path.exists(named) else beside)
        folders.append(os.path.dirname(named) or folder)
    files = [os.path.join(home, name) for home in folders if os.path.isdir(home)
             for name in os.listdir(home) if name.endswith('.pth') and not name.startswith('best_')]
    # the hidden link last: its checkpoint may have been deleted on purpose
    files.sort(key=lambda path: (os.path.basename(path) == LAST_GOOD, -_time_of(path), path))
    distinct: dict[str, str] = {}
    for path in (*candidates, *files):
        distinct.setdefault(os.path.abspath(path), path)
    for path in distinct.values():
        problem = refuse(path)
        if problem is None:
            return path, passed
        passed.append(f'passed over: {path} {problem}')
    return None, passed


def _time_of(path: str) -> int:
    """Return when a file was changed; 0 for a link that leads nowhere, or a file that is gone."""
    with suppress(OSError):
        return os.stat(path).st_mtime_ns
    return 0


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from."""
    path: str
    epoch: int  # the epoch that continues or begins
    iteration: int  # the next iteration, counted from 0
    seed: int | None  # of the run that wrote it; None when unknown
    # facts that mmrepro wrote about that run; empty for a checkpoint of stock MMEngine
    written_by: Mapping[str, Any]
    # of that run, see :mod:`mmrepro.facts.collect`; of stock MMEngine's, the settings
    facts: Mapping[str, Any]
    cursor: DataCursor | None  # how far that run was in its data; None when unknown
    per_epoch: float  # iterations of an epoch of that run; infinite when unknown

    @classmethod
    def of(cls, path: str, content: Mapping[str, Any]) -> ResumePoint:
        meta = content['meta']
        written_by = meta.get('mmrepro', {})
        info = content.get('message_hub', {}).get('runtime_info', {})
        epochs, iterations = info.get('max_epochs'), info.get('max_iters')
        known = isinstance(epochs, int) and isinstance(iterations, int) and epochs > 0
        return cls(path, meta['epoch'], meta['iter'], meta.get('seed'), written_by,
                   written_by.get('facts') or stock_facts(meta),
                   DataCursor(*meta['place']) if 'place' in meta else None,
                   iterations / epochs if known else float('inf'))

    @property
    def report(self) -> str:
        """The resume in lines for the log."""
        text = f'resuming from {self.path}: epoch {self.epoch}, iteration {self.iteration}'
        return text if self.written_by else (
            f'{text}\nit was written without mmrepro: weights, optimizer and schedules continue; '
            'data order and random numbers are those of mmrepro from here on')


def _end_of(train_cfg: Any) -> tuple[str, int] | None:
    """Return the setting of a training loop that says when it ends, and its value, if known."""
    if isinstance(train_cfg, Mapping):
        for name in ('max_epochs', 'max_iters'):
            if isinstance(train_cfg.get(name), int):
                return name, train_cfg[name]
    return None


@dataclass(frozen=True)
class ResumePlan:
    """What a run resumes from, decided before anything is built; :func:`plan_resume` decides.

    :mod:`mmrepro.checkpoint.resuming` carries it out.
    """
    point: ResumePoint | None  # None for a new run
    strict: bool  # ``resume_strict``
    folder: str  # the work directory
    # arguments of the runner that have to change, so that MMEngine chooses no other file
    settings: Mapping[str, Any]
    # lines for the log: files that a run cannot continue from
    passed_over: tuple[str, ...] = ()

    def seeded(self, given: RandomnessConfig) -> RandomnessConfig:
        """Return ``given`` with the seed of the run that is resumed.

        Raises:
            RandomnessError: when ``given`` names another seed.
        """
        if self.point is None or self.point.seed is None:
            return given
        if given.seed is not None and given.seed != self.point.seed:
            raise RandomnessError(
                f'randomness.seed={given.seed!r}, but {self.point.path} comes from a run with seed '
                f'{self.point.seed}; resume with that seed or with seed=None, or start a new run '
                'from the weights: load_from=..., resume=False')
        return given.with_seed(self.point.seed)


def plan_resume(settings: Mapping[str, Any], strict: bool) -> ResumePlan:
    """Choose the checkpoint that a runner resumes from, and check it.

    Args:
        settings: ``resume``, ``load_from``, ``work_dir`` and ``train_cfg`` of the runner. Without
            ``load_from``, the newest complete checkpoint in ``work_dir`` is chosen; beside it, too,
            if that run has not come to its end. With ``resume='auto'``, ``load_from`` names
            weights to begin with where ``work_dir`` has no checkpoint.
        strict: ``resume_strict``; otherwise a named file may lack the optimizer.

    Raises:
        CheckpointError: the named file is missing, damaged, or something else.
        ResumeError: the named file holds weights, but not what a run continues from.
    """
    asked, folder = settings.get('resume'), settings.get('work_dir', '')
    if not asked:
        return ResumePlan(None, strict, folder, {})
    if asked not in (True, AUTO):
        raise ConfigError(f'resume={asked!r}: allowed are True, False and {AUTO!r}')
    named, end = settings.get('load_from'), _end_of(settings.get('train_cfg'))
    if named is None or asked == AUTO:
        point, lines = _own(folder, strict)
        if point is None:
            begin = 'the beginning' if named is None else f'load_from={named}'
            why = 'nothing is left' if lines else f'{folder} has no checkpoint'
            lines.append(f'{why} to resume from: the run starts from {begin}')
    elif lies_in(named, folder):
        return _planned(*_given(named, strict), strict, folder, end)
    else:
        point, lines = _own(folder, strict)
        if point is None or _is_at_end(point, end):  # nobody has named the files of ``lines``
            return _planned(*_given(named, strict, weights=True), strict, folder, end)
    if point is not None and named is not None:
        lines.append(
            f'load_from={named} is not loaded: {folder} has a checkpoint of this run. To begin '
            'with that file again, give another work_dir')
    return _planned(point, lines, strict, folder, end)


def _planned(point: ResumePoint | None, lines: list[str], strict: bool, folder: str,
             end: tuple[str, int] | None) -> ResumePlan:
    if point is None:
        return ResumePlan(None, strict, folder, dict(resume=False), tuple(lines))
    if end is not None and _is_at_end(point, end):
        setting, value = end
        lines = [*lines, f'nothing is left to train: {point.path} was written at iteration '
                         f'{point.iteration}, and {setting}={value}']
    return ResumePlan(point, strict, folder, dict(load_from=point.path, resume=True), tuple(lines))


def _own(folder: str, strict: bool) -> tuple[ResumePoint | None, list[str]]:
    """Return the newest complete checkpoint of the work directory, and lines for the log."""
    last = last_checkpoint_of(folder)
    if '://' in last:
        return _given(last, strict)
    points: dict[str | None, ResumePoint] = {}

    def refuse(path: str) -> str | None:
        try:
            content = load(path, mapped=True, unzipped=False)
        except CheckpointError as error:
            return str(error).replace(f'checkpoint {path} ', '', 1)
        problem = lacks(content)
        if problem is None:
            points[path] = ResumePoint.of(path, content)
        return problem

    path, passed_over = newest_good(folder, refuse)
    return points.get(path), passed_over


def _given(path: str, strict: bool, weights: bool = False) -> tuple[ResumePoint | None, list[str]]:
    """Return a checkpoint by its name; if it may be ``weights``, the run begins with those."""
    if '://' in path:
        # every rank fetches a remote file, as MMEngine does when it loads the file again
        with without_code(functools.partial(load, fresh=True)):
            content = CheckpointLoader.load_checkpoint(path, 'cpu')
    else:
        content = load(path, mapped=True)
    if weights and is_weights(content):
        return None, [f'{path} holds weights, and no state of a training: the run starts from them']
    lines = judge(path, content, strict)
    return ResumePoint.of(path, content), lines


def _is_at_end(point: ResumePoint, end: tuple[str, int] | None) -> bool:
    """Whether a run that continues from ``point`` has been trained to its end."""
    if end is None:
        return False
    setting, value = end
    if setting == 'max_iters':
        return point.iteration >= value
    return point.epoch >= value or point.iteration >= value * point.per_epoch


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
    for written in (folder, os.path.join(folder, 'mmrepro')):
        remove_partial(written)
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
