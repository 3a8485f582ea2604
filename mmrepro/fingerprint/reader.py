"""Read the files of a run, whole or torn: missing and torn parts become notes, not errors."""
from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import EmptyFingerprints, FingerprintError
from ..util.files import checked, parse_json, read_json
from ..util.text import listed, not_a
from . import schema
from .schema import FOLDER

START_LINE = f'{{"kind":"{schema.START}"'.encode()


class RankLog(NamedTuple):
    """The fingerprints of one rank."""
    path: str
    starts: list[dict[str, Any]]  # header lines, one for each start of the training
    steps: dict[int, dict[str, Any]]  # by iteration; of repeated iterations the last
    vals: list[dict[str, Any]]  # lines of validations, in order
    ended: bool  # whether the last start trained to its end
    notes: list[str]  # a torn line, iterations that differ between two starts
    changed: tuple[int, ...] = ()  # iterations that a later start trained again to different bits


class RecordedRun(NamedTuple):
    """The manifests of all starts and the fingerprints of all ranks in a work directory."""
    work_dir: str
    manifests: list[dict[str, Any]]
    ranks: dict[int, RankLog]
    notes: list[str]


def read_ranks(work_dir: str) -> dict[int, RankLog]:
    """Return rank -> fingerprints in ``work_dir/mmrepro``; empty where there is no such folder."""
    return read_files(os.path.join(work_dir, FOLDER), schema.FINGERPRINTS)


def read_files(folder: str, names: re.Pattern[str]) -> dict[int, RankLog]:
    """Return rank -> lines of the files in a folder with these names; the rank is the first group.
    """
    present = os.listdir(folder) if os.path.isdir(folder) else ()
    files = {int(match[1]): match[0] for match in filter(None, map(names.fullmatch, present))}
    return {rank: read_rank(os.path.join(folder, files[rank])) for rank in sorted(files)}


class NewLines:
    """The lines of a file that is being written, each of which is read once.

    Args:
        path: of a file that need not exist yet.
    """

    def __init__(self, path: str) -> None:
        self._path, self._begin = path, 0

    def read(self) -> list[bytes]:
        """Return the whole lines that were written since the last call."""
        try:
            with open(self._path, 'rb') as file:
                file.seek(self._begin)
                content = file.read()
        except FileNotFoundError:
            return []
        end = content.rfind(b'\n') + 1
        self._begin += end
        return content[:end].splitlines()

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the new records of a fingerprint file."""
        for line in self.read():
            record = parse_json(self._path, line, FingerprintError, {'kind': str})
            yield checked(self._path, record, FingerprintError,
                          schema.SHAPES.get(record['kind'], object))


def read_run(work_dir: str) -> RecordedRun:
    """Read ``work_dir/mmrepro``; ``work_dir`` may be that folder itself.

    Raises:
        FingerprintError: the folder does not exist or has no fingerprints, or a file is damaged
            other than by a torn last line.
    """
    if not os.path.isdir(work_dir):
        raise FingerprintError(not_a('run', work_dir))
    work_dir = os.path.normpath(work_dir)
    if os.path.basename(work_dir) == FOLDER and not os.path.isdir(os.path.join(work_dir, FOLDER)):
        work_dir = os.path.dirname(work_dir) or '.'
    folder = os.path.join(work_dir, FOLDER)
    if not os.path.isdir(folder):
        raise FingerprintError(f'{work_dir}: has no folder {FOLDER}{only_checkpoints(work_dir)}; a '
                               'run writes it with mmrepro train --fingerprint, or FingerprintHook '
                               'in its config')
    ranks = read_ranks(work_dir)
    if ranks and not any(log.starts or log.steps for log in ranks.values()):
        raise EmptyFingerprints(f'{ranks[min(ranks)].path} is empty: the run ended before it wrote '
                                'an iteration')
    if not ranks:
        raise FingerprintError(f'{folder}: has no file {schema.fingerprint_name(0)}; the run ended '
                               'before its training began, or the folder belongs to something else')
    names = sorted((int(match[1] or 0), match[0])
                   for match in filter(None, map(schema.MANIFEST.fullmatch, os.listdir(folder))))
    manifests = [read_manifest_file(os.path.join(folder, name)) for _, name in names]
    notes = [f'rank {rank}: {note}' for rank, log in sorted(ranks.items()) for note in log.notes]
    if not manifests:
        notes.append(f'{folder}: has no manifest.json')
    world_size = max((start['world_size'] for log in ranks.values() for start in log.starts),
                     default=1)
    # a damaged file may name any number of ranks
    missing = [*itertools.islice((str(i) for i in range(world_size) if i not in ranks), 9)]
    if missing:
        more = ', ...' if len(missing) > 8 else ''
        notes.append(f'{folder}: no fingerprints of rank {", ".join(missing[:8])}{more} of '
                     f'{world_size}')
    return RecordedRun(work_dir, manifests, ranks, notes)


def only_checkpoints(folder: str) -> str:
    """Return the part of a message that names the checkpoints in a folder without a run."""
    names = sorted(name for name in os.listdir(folder) if name.endswith('.pth'))
    return f'; it holds {listed(names)}, but checkpoints alone are no run' if names else ''


def read_manifest_file(path: str) -> dict[str, Any]:
    """Return the content of a manifest."""
    content = read_json(path, FingerprintError)
    if not isinstance(content, dict) or content.get('kind') != 'manifest':
        raise FingerprintError(f'{path}: not a manifest of mmrepro')
    _check_format(path, content)
    manifest: dict[str, Any] = checked(path, content, FingerprintError, schema.MANIFEST_SHAPE)
    return manifest


def _check_format(where: str, content: dict[str, Any]) -> None:
    if content.get('format') != schema.FORMAT:
        raise FingerprintError(f'{where}: format {content.get("format")!r} is not known to this '
                               f'version of mmrepro, which reads format {schema.FORMAT}')


def read_rank(path: str) -> RankLog:
    """Read one ``fingerprints.rankN.jsonl``."""
    log = RankLog(path, [], {}, [], False, [])
    ended = False
    earlier: dict[int, dict[str, Any]] = {}
    differing: list[int] = []
    again: list[dict[str, Any]] = []  # validations that a new start may make once more
    for where, record in json_lines(path, {'kind': str}, log.notes):
        checked(where, record, FingerprintError, schema.SHAPES.get(record['kind'], object))
        ended = record['kind'] == schema.END
        if record['kind'] == schema.START:
            _check_format(where, record)
            log.starts.append(record)
            # iterations of an earlier start from there on were lost
            for lost in [i for i in log.steps if i >= record['iteration']]:
                earlier[lost] = log.steps.pop(lost)
            log.vals[:] = [val for val in log.vals if 0 < val['iteration'] <= record['iteration']]
            again = [val for val in log.vals if val['iteration'] == record['iteration']]
        elif record['kind'] == schema.VAL:
            if again and again[0]['iteration'] == record['iteration']:
                del log.vals[-len(again):]
            again = []
            log.vals.append(record)
        elif record['kind'] == schema.STEP:
            iteration = record['iteration']
            before = earlier.pop(iteration, {})
            if any(before[key] != record[key] for key in before if key in record):
                differing.append(iteration)
            log.steps[iteration] = record
    if differing:
        log.notes.append(f'{len(differing)} of the iterations that were trained again after a new '
                         f'start differ from the first time, the first is {differing[0]}')
    if not log.starts:
        log.notes.append(f'{path} has no start line')
    return log._replace(ended=ended, changed=tuple(differing),
                        steps=dict(sorted(log.steps.items())))


def lines_of(path: str) -> list[bytes]:
    """Return the lines of a file."""
    try:
        with open(path, 'rb') as file:
            return file.read().split(b'\n')
    except OSError as error:
        raise FingerprintError(f'{path}: {error.strerror}') from error


def json_lines(path: str, shape: Any, notes: list[str],
               tail: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each line of JSON; torn lines become notes.

    A killed process tears one of the last ``tail`` lines, or the line above that of a new start.
    """
    lines = lines_of(path)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f'{path}, line {number}'
        try:
            value = parse_json(where, line, FingerprintError)
        except FingerprintError:
            if number <= len(lines) - tail and not lines[number].startswith(START_LINE):
                raise
            notes.append(f'{where}: torn off, the process was killed while writing')
        else:
            yield where, checked(where, value, FingerprintError, shape)
