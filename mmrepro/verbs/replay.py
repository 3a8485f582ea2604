"""Train again from a manifest, compare the fingerprints, stop at the first difference.

Everything that a repetition needs can be exported into one folder that ``replay`` reads. The
content comes from the files of the run; values that they lack are called "not recorded".
"""
from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from ..errors import DIFFERENT, DONE, ConfigError, FingerprintError
from ..facts.collect import MAX_DIFF, repeated_environment
from ..facts.compatibility import START, FactDifference
from ..fingerprint.divergence import Divergence, compare_logs, difference_up_to
from ..fingerprint.manifest import Manifest, by_last_name, code_of, compare_manifests, read_manifest
from ..fingerprint.reader import NewLines, RecordedRun, read_ranks, read_run
from ..fingerprint.schema import (
    FINGERPRINTS,
    FOLDER,
    MANIFEST,
    STEP,
    VAL,
    fingerprint_name,
)
from ..report.report import Report
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints
from ..runs.config_files import merge_options, read_config
from ..runs.launcher import PlannedRun, plan, run_all
from ..util.text import counted, listed


def prepare(manifest: Manifest, work_dir: str, changes: Mapping[str, Any] = {}) -> str:
    """Write the config of the replay into ``work_dir`` and return its path.

    It is the config of the original, except for the work directory, for checkpoints, which are not
    written, and for ``changes``: settings that say where files are on this machine.

    Raises:
        ConfigError: a change does not fit the config.
        FingerprintError: the run resumed from a checkpoint that does not exist any more.
    """
    resumed = manifest.content['resumed_from']
    if resumed and not os.path.isfile(resumed):
        raise FingerprintError(f'{manifest.path}: the run resumed from {resumed}, which does not '
                               'exist')
    os.makedirs(work_dir, exist_ok=True)
    path = os.path.join(work_dir, 'config.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest.config_text)
    try:
        cfg = read_config(path, imports=False)
    except ConfigError as error:
        raise FingerprintError(f'{manifest.path}: config.text: {error}') from error
    merge_options(cfg, changes)
    cfg.work_dir = os.path.abspath(work_dir)
    cfg.resume, cfg.load_from = bool(resumed), resumed or cfg.get('load_from')
    without_checkpoints(cfg)
    cfg.dump(path)
    return path


def _exported_code(manifest: str) -> dict[str, str]:
    """Return variables that let a repetition import the code that an export has taken along."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(manifest))), CODE)
    if not os.path.isdir(folder):
        return {}
    path = os.pathsep.join(filter(None, [folder, os.environ.get('PYTHONPATH')]))
    # the folder in which it starts, where the code may have been edited, is no place to import from
    return {'PYTHONPATH': path, 'PYTHONSAFEPATH': '1'}


def replay(run_dir: str, work_dir: str, iterations: int | None = None,
           on_progress: Callable[[str], None] = lambda text: None,
           on_differences: Callable[[Sequence[FactDifference]], None] = lambda rows: None,
           changes: Mapping[str, Any] = {}) -> Report:
    """Train a run again, and compare the fingerprints while it trains.

    Args:
        run_dir: work directory of a run that was trained with fingerprints, or a folder that
            :func:`export` has written.
        work_dir: of the replay; fingerprints of an earlier replay in it are removed.
        iterations: stop after so many; None: as many as the original has.
        on_progress: called with lines about the progress.
        on_differences: called with the differences of the manifests, as soon as the second exists.
        changes: see :func:`prepare`.

    Returns:
        A report whose exit code is 0 (the same bits) or 1 (a difference, at which it stopped).

    Raises:
        FingerprintError: the run cannot be repeated; says why.
        TrainingFailed: the training ended with an error.
    """
    original, manifest = read_run(run_dir), read_manifest(run_dir)
    manifest.check_repeatable()
    if os.path.realpath(work_dir) == os.path.realpath(run_dir):
        raise FingerprintError(f'--work-dir {work_dir} is the run itself; its fingerprints would '
                               'be lost')
    wanted = {rank: log.steps for rank, log in original.ranks.items()}
    if not any(wanted.values()):
        raise FingerprintError(f'{run_dir}: no iteration was recorded')
    last = max(max(steps) for steps in wanted.values() if steps) + 1
    end = min(last, iterations or last)
    whole = end == last and all(log.ended for log in original.ranks.values())
    run = _planned(manifest, work_dir, changes, None if whole else end)
    watched = _Watch(original, manifest, work_dir, end, on_progress, on_differences)
    run_all([run], tick=watched.look)
    difference = watched.difference or difference_up_to(
        original.ranks, read_ranks(work_dir), end)
    equal = end if difference is None else difference.iteration
    rank = min(original.ranks) if difference is None else difference.rank
    compared = sum(i < equal for i in original.ranks[rank].steps)
    verdict = f'SAME BITS: {counted(compared, "iteration")} of {run_dir} repeated exactly'
    if difference is not None:
        verdict = (f'DIFFERENT after {counted(compared, "equal iteration")}: {difference.text()} '
                   '(first the original, then the replay)')
    return Report(
        '', verdict, DONE if difference is None else DIFFERENT, notes=list(original.notes),
        data=dict(run=run_dir, work_dir=work_dir, same=difference is None, compared=compared,
                  rank=difference.rank if difference else 0,
                  difference=difference.as_dict() if difference else None,
                  environment=watched.environment or []))


def _planned(manifest: Manifest, work_dir: str, changes: Mapping[str, Any],
             iterations: int | None) -> PlannedRun:
    config = prepare(manifest, work_dir, changes)
    env = {**repeated_environment(manifest.content), **_exported_code(manifest.path)}
    cwd = manifest.content['cwd']
    return plan('replay', work_dir, [Training(os.path.abspath(config), iterations=iterations)],
                env, manifest.content['processes'], cwd if os.path.isdir(cwd) else None)


class _Watch:
    """Compares the lines that a replay has written so far with the original."""

    def __init__(self, original: RecordedRun, manifest: Manifest, work_dir: str, end: int,
                 on_progress: Callable[[str], None],
                 on_differences: Callable[[Sequence[FactDifference]], None]) -> None:
        self._original, self._manifest, self._work_dir = original, manifest, work_dir
        self._end, self._on_progress, self._tell = end, on_progress, on_differences
        self._started, self._said = time.monotonic(), ''
        self.environment: list[FactDifference] | None = None  # None: no manifest is there yet
        self.difference: Divergence | None = None
        self._new = {rank: NewLines(os.path.join(work_dir, FOLDER, fingerprint_name(rank)))
                     for rank in original.ranks}
        self._done = dict.fromkeys(original.ranks, 0)  # iterations, by rank

    def look(self) -> bool:
        """Whether the lines that the processes have written so far differ from the original."""
        if self.environment is None:
            with contextlib.suppress(FingerprintError):  # not written yet
                rows = compare_manifests(self._manifest, read_manifest(self._work_dir))
                self.environment = [row for row in rows if row.about != START]
                self._tell(self.environment)
        if self._differs():  # the first difference in all lines that were written
            self.difference = compare_logs(
                self._original.ranks, read_ranks(self._work_dir), self._end)
        text = f'iteration {min(self._done.values())} of {self._end}'
        if text != self._said:
            self._said = text
            self._on_progress(f'{time.monotonic() - self._started:4.0f} s  {text}')
        return self.difference is not None

    def _differs(self) -> bool:
        """Compare the lines that were written since the last look; a replay has one start."""
        ours, theirs = {}, {}
        for rank, log in self._original.ranks.items():
            records = [*self._new[rank].records()]
            steps = {record['iteration']: record for record in records
                     if record['kind'] == STEP}
            vals = [record for record in records if record['kind'] == VAL]
            self._done[rank] += len(steps)
            theirs[rank] = log._replace(steps=steps, vals=vals)
            times = {val['iteration'] for val in vals}
            ours[rank] = log._replace(
                steps={number: log.steps[number] for number in steps if number in log.steps},
                vals=[val for val in log.vals if val['iteration'] in times])
        return compare_logs(ours, theirs, self._end) is not None


UNKNOWN = 'not recorded'
CODE = 'code'  # folder with the run's own code


def export(run_dir: str, into: str) -> Report:
    """Write all that a repetition needs into a new folder, which ``replay`` reads.

    Raises:
        FingerprintError: the run was not recorded, or the folder exists.
    """
    files = write_export(run_dir, into)
    return Report(
        '', '\n'.join(f'wrote {os.path.join(into, name)}' for name in files),
        advice=[f'look through it before you publish it; mmrepro replay {into} checks it'],
        data=dict(run=run_dir, export=into, files=files))


def write_export(run_dir: str, into: str) -> list[str]:
    """Write the folder and return the files in it, relative to it."""
    run, manifest = read_run(run_dir), read_manifest(run_dir)
    if not any(log.steps for log in run.ranks.values()):
        raise FingerprintError(f'{run_dir}: no iteration was recorded')
    if os.path.exists(into) and (not os.path.isdir(into) or os.listdir(into)):
        raise FingerprintError(f'--export {into}: is there already; choose a new folder')
    os.makedirs(os.path.join(into, FOLDER), exist_ok=True)
    source = os.path.dirname(manifest.path)
    for name in sorted(os.listdir(source)):
        if FINGERPRINTS.fullmatch(name) or MANIFEST.fullmatch(name):
            shutil.copyfile(os.path.join(source, name), os.path.join(into, FOLDER, name))
    texts = {'config.py': manifest.config_text,
             # a lock file of all installed packages for pip
             'requirements.txt': ''.join(f'{name}=={version}\n' for name, version in sorted(
                 (manifest.content.get('packages') or {}).items())),
             # the uncommitted changes of each repository
             **{f'{name}.diff': repository['diff'] for name, repository in by_last_name(
                 manifest.content.get('code') or {}).items() if repository.get('diff')}}
    changed = _own_code(manifest, os.path.join(into, CODE))
    iterations = max(len(log.steps) for log in run.ranks.values())
    texts['README.md'] = _readme(manifest, iterations, sorted(texts), changed, run.notes)
    for name, text in texts.items():
        with open(os.path.join(into, name), 'w', encoding='utf-8') as file:
            file.write(text)
    return sorted(os.path.relpath(os.path.join(folder, name), into)
                  for folder, _, names in os.walk(into) for name in names)


def _own_code(manifest: Manifest, into: str) -> list[str]:
    """Copy the code that the run has kept; return a line for each file, with what it lacks."""
    kept, lines = code_of(manifest.path), []
    digests: dict[str, str] = {}
    if os.path.isfile(kept):
        try:
            with zipfile.ZipFile(kept) as archive:
                archive.extractall(into)  # which changes names that lead out of the folder
                digests = {name: hashlib.sha256(archive.read(name)).hexdigest()
                           for name in archive.namelist()}
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError,
                OSError) as error:
            raise FingerprintError(f'{kept}: no zip file of mmrepro: {error}') from error
    for name, source in sorted((manifest.content.get('sources') or {}).items()):
        lacks, digest = '', digests.get(name.replace(':', '/'))
        if not source['file']:
            lacks = ': typed, and not recorded'
        elif digest is None:
            lacks = ': not in this folder, because it was edited while the run trained'
        elif digest != source['sha256']:
            lacks = ', without what looks like a secret'
        lines.append(f'`{name}`, SHA-256 {source["sha256"][:16]}{lacks}')
    return lines


def _readme(manifest: Manifest, iterations: int, files: list[str], sources: list[str],
            notes: list[str]) -> str:
    content = manifest.content
    machine, facts = content.get('machine') or {}, content.get('facts') or {}
    data = content.get('data') or {}
    images = data.get('images')
    parts = {
        'Check': [
            'Install `requirements.txt`, check out the code (what no package holds is in '
            f'`{CODE}`), get the data, then',
            '`mmrepro replay THIS_FOLDER` (with `--cfg-options` where the data lie elsewhere) '
            'trains again and compares every iteration.',
            'Other hardware or versions may give different bits; `replay` says what differs.'],
        'Run': [
            f'iterations recorded: {iterations}',
            f'ranks: {content.get("world_size", UNKNOWN)}',
            f'processes: {content["processes"]}',
            f'started: {content.get("created") or UNKNOWN}',
            f'command: `{" ".join(content.get("command") or [UNKNOWN])}`',
            f'resumed from: {content.get("resumed_from") or "nothing"}',
            f'initial weights, digest: {content.get("initial_weights") or UNKNOWN}'],
        'Hardware': [f'{name}: {facts.get(f"hardware.{name}") or "none"}'
                     for name in ('cpu', 'cpu_instructions', 'gpu')] + [
            f'platform: {machine.get("platform") or UNKNOWN}'],
        'Code': [f'`{name}`: commit {repository.get("commit") or UNKNOWN}{_changes(repository)}'
                 for name, repository in by_last_name(content.get('code') or {}).items()
                 ] + sources or [UNKNOWN],
        'Data': [f'samples: {data.get("samples") or UNKNOWN}',
                 *_files(data.get('annotations') or {}),
                 'names of the images, SHA-256: '
                 f'{images["sha256"] if images else UNKNOWN}'],
        'Weights that it starts from': _files(content.get('weights') or {}) or ['none'],
        'Environment': [f'`{name}={value}`' for name, value in sorted(
            (content.get('environment') or {}).items())] or ['no variable that matters was set'],
        'Files': [f'`{name}`' for name in [*files, f'{FOLDER}/']],
        'Notes': notes,
    }
    lines = ['# To repeat a run', '']
    for title, entries in parts.items():
        if entries:
            lines += [f'## {title}', '', *(f'- {entry}' for entry in entries), '']
    return '\n'.join(lines)


def _changes(repository: Mapping[str, Any]) -> str:
    diff, new = repository.get('diff') or '', repository.get('untracked') or ()
    cut = ', cut at 1 MiB' if len(diff) == MAX_DIFF else ''
    return (f', with changes that are in this folder{cut}' if diff else '') + (
        f'; files of no commit, which are not in this folder: {listed(new, 20)}' if new else '')


def _files(records: Mapping[str, Any]) -> list[str]:
    return [f'`{name}`: SHA-256 {record["sha256"]}' if 'sha256' in record else
            f'`{name}`: {UNKNOWN} ({record.get("error", "no digest")})'
            for name, record in by_last_name(records).items()]
