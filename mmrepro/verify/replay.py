"""Train again from a manifest, compare the fingerprints, stop at the first difference."""
from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..errors import FingerprintError
from ..facts.compatibility import START
from ..fingerprint.divergence import Divergence, compare_logs, first_missing
from ..fingerprint.manifest import Manifest, compare_manifests, read_manifest
from ..fingerprint.provenance import repeated_environment
from ..fingerprint.reader import RankLog, RecordedRun, read_ranks, read_run
from ..fingerprint.schema import FOLDER
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints
from ..runs.launcher import plan, run_all


class ReplayOutcome(NamedTuple):
    """The outcome of a replay."""
    compared: int  # number of equal iterations, before the first difference
    difference: Divergence | None  # the first difference
    environment: list[Any]  # differences between the two manifests
    notes: list[str]  # notes on the files of the original

    @property
    def rank(self) -> int:
        return self.difference.rank if self.difference else 0


def prepare(manifest: Manifest, work_dir: str,
            changes: Mapping[str, Any] | None = None) -> str:
    """Write the config of the replay into ``work_dir`` and return its path.

    It is the config of the original, except for the work directory, for checkpoints, which are not
    written, and for ``changes``: settings that say where files are on this machine.

    Raises:
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
    cfg = Config.fromfile(path, import_custom_modules=False)
    cfg.merge_from_dict(dict(changes or {}))
    cfg.work_dir = os.path.abspath(work_dir)
    cfg.resume, cfg.load_from = bool(resumed), resumed or cfg.get('load_from')
    without_checkpoints(cfg)
    cfg.dump(path)
    return path


def replay(run_dir: str, work_dir: str, iterations: int | None = None,
           say: Callable[[str], None] = lambda text: None,
           report: Callable[[list[Any]], None] = lambda found: None,
           changes: Mapping[str, Any] | None = None) -> ReplayOutcome:
    """Train the run in ``run_dir`` again and compare while it runs.

    Args:
        work_dir: of the replay; fingerprints of an earlier replay in it are removed.
        iterations: stop after so many; None: as many as the original has.
        say: is called with a line on the progress.
        report: is called with the differences of the manifests, as soon as the second exists.
        changes: changed settings of the config, for example where the data are.
    """
    original, manifest = read_run(run_dir), read_manifest(run_dir)
    if os.path.realpath(work_dir) == os.path.realpath(run_dir):
        raise FingerprintError(f'--work-dir {work_dir} is the run itself; its fingerprints would '
                               'be lost')
    wanted = {rank: log.steps for rank, log in original.ranks.items()}
    if not any(wanted.values()):
        raise FingerprintError(f'{run_dir}: no iteration was recorded')
    last = max(max(steps) for steps in wanted.values() if steps) + 1
    end = min(last, iterations or last)
    config = prepare(manifest, work_dir, changes)
    env = repeated_environment(manifest.content['environment'])
    cwd = manifest.content['cwd']
    whole = end == last and all(log.ended for log in original.ranks.values())
    run = plan('replay', work_dir,
               [Training(os.path.abspath(config), iterations=None if whole else end)], env,
               manifest.processes, cwd if os.path.isdir(cwd) else None)
    follower = _Follower(original, manifest, work_dir, end, say, report)
    run_all([run], tick=follower.look)
    return follower.outcome()


class _Follower:
    """Compares what the processes have written so far with the original."""

    def __init__(self, original: RecordedRun, manifest: Manifest, work_dir: str, end: int,
                 say: Callable[[str], None], report: Callable[[list[Any]], None]) -> None:
        self._original, self._manifest, self._end = original, manifest, end
        self._work_dir, self._say, self._report = work_dir, say, report
        self._started, self._text = time.monotonic(), ''
        self._environment: list[Any] | None = None
        self._logs: dict[int, RankLog] = {}
        self._difference: Divergence | None = None

    def look(self) -> bool:
        """Whether the runs differ already."""
        if self._environment is None:
            try:
                found = compare_manifests(self._manifest, read_manifest(self._work_dir))
            except FingerprintError:
                pass  # not written yet
            else:
                self._environment = [row for row in found if row.about != START]
                self._report(self._environment)
        self._logs = read_ranks(os.path.join(self._work_dir, FOLDER))
        self._difference = compare_logs(self._original.ranks, self._logs, self._end)
        done = min(len(self._logs[rank].steps) if rank in self._logs else 0
                   for rank in self._original.ranks)
        text = f'iteration {done} of {self._end}'
        if text != self._text:
            self._text = text
            self._say(f'{time.monotonic() - self._started:4.0f} s  {text}')
        return self._difference is not None

    def outcome(self) -> ReplayOutcome:
        difference = self._difference or first_missing(self._original.ranks, self._logs,
                                                          self._end)
        end = self._end if difference is None else difference.iteration
        steps = self._original.ranks[difference.rank if difference else 0].steps
        return ReplayOutcome(sum(i < end for i in steps), difference, self._environment or [],
                             self._original.notes)
