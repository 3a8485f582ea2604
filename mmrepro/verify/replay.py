"""Train again from a manifest, compare the fingerprints, stop at the first difference."""
from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from ..errors import ConfigError, FingerprintError
from ..facts.compatibility import START
from ..facts.provenance import repeated_environment
from ..fingerprint.divergence import Divergence, compare_logs, difference_up_to
from ..fingerprint.manifest import Manifest, compare_manifests, read_manifest
from ..fingerprint.reader import RankLog, read_ranks, read_run
from ..fingerprint.schema import REPEATED
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints
from ..runs.config_files import merge_options, read_config
from ..runs.launcher import plan, run_all
from ..util.files import checked
from .export import CODE


class ReplayOutcome(NamedTuple):
    """The outcome of a replay."""
    compared: int  # number of equal iterations, before the first difference
    difference: Divergence | None  # the first difference
    environment: list[Any]  # differences between the two manifests
    notes: list[str]  # notes on the files of the original


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
           say: Callable[[str], None] = lambda text: None,
           report: Callable[[list[Any]], None] = lambda rows: None,
           changes: Mapping[str, Any] = {}) -> ReplayOutcome:
    """Train the run in ``run_dir`` again and compare while it runs.

    Args:
        work_dir: of the replay; fingerprints of an earlier replay in it are removed.
        iterations: stop after so many; None: as many as the original has.
        report: is called with the differences of the manifests, as soon as the second exists.
        changes: see :func:`prepare`.
    """
    original, manifest = read_run(run_dir), read_manifest(run_dir)
    checked(manifest.path, manifest.content, FingerprintError, REPEATED)
    if os.path.realpath(work_dir) == os.path.realpath(run_dir):
        raise FingerprintError(f'--work-dir {work_dir} is the run itself; its fingerprints would '
                               'be lost')
    wanted = {rank: log.steps for rank, log in original.ranks.items()}
    if not any(wanted.values()):
        raise FingerprintError(f'{run_dir}: no iteration was recorded')
    last = max(max(steps) for steps in wanted.values() if steps) + 1
    end = min(last, iterations or last)
    config = prepare(manifest, work_dir, changes)
    env = {**repeated_environment(manifest.content), **_exported_code(manifest.path)}
    cwd = manifest.content['cwd']
    whole = end == last and all(log.ended for log in original.ranks.values())
    run = plan('replay', work_dir,
               [Training(os.path.abspath(config), iterations=None if whole else end)], env,
               manifest.content['processes'], cwd if os.path.isdir(cwd) else None)
    started, text = time.monotonic(), ''
    environment: list[Any] | None = None
    logs: dict[int, RankLog] = {}
    difference: Divergence | None = None

    def look() -> bool:
        """Whether what the processes have written so far differs from the original."""
        nonlocal text, environment, logs, difference
        if environment is None:
            with contextlib.suppress(FingerprintError):  # not written yet
                rows = compare_manifests(manifest, read_manifest(work_dir))
                environment = [row for row in rows if row.about != START]
                report(environment)
        logs = read_ranks(work_dir)
        difference = compare_logs(original.ranks, logs, end)
        done = min(len(logs[rank].steps) if rank in logs else 0 for rank in original.ranks)
        if text != f'iteration {done} of {end}':
            text = f'iteration {done} of {end}'
            say(f'{time.monotonic() - started:4.0f} s  {text}')
        return difference is not None

    run_all([run], tick=look)
    difference = difference or difference_up_to(original.ranks, logs, end)
    equal = end if difference is None else difference.iteration
    steps = original.ranks[difference.rank if difference else min(original.ranks)].steps
    return ReplayOutcome(sum(i < equal for i in steps), difference, environment or [],
                         original.notes)
