"""Export what is needed to repeat a run into one folder that ``replay`` reads.

Everything comes from the files of the run; values that they lack are called "not recorded".
"""
from __future__ import annotations

import hashlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import FingerprintError
from ..facts.provenance import MAX_DIFF
from ..fingerprint.manifest import Manifest, by_last_name, code_of, read_manifest
from ..fingerprint.reader import read_run
from ..fingerprint.schema import FINGERPRINTS, FOLDER, MANIFEST
from ..report.report import Report
from ..util.text import listed

UNKNOWN = 'not recorded'
CODE = 'code'  # folder with the run's own code


def export(run_dir: str, into: str) -> Report:
    """Write what is needed to repeat a run into a new folder, which ``replay`` reads.

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
        'Data': [f'samples: {data.get("samples", UNKNOWN)}',
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
