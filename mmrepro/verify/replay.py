"""Train again from a manifest; compare the fingerprints, stop at the first difference."""
from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..errors import FingerprintError
from ..fingerprint.difference import (
    ComparedField,
    Divergence,
    before,
    first_differing_metric,
    first_divergence,
)
from ..fingerprint.manifest import Manifest, compare_manifests, read_manifest
from ..fingerprint.provenance import environment
from ..fingerprint.reader import RankLog, RecordedRun, read_ranks, read_run
from ..fingerprint.schema import FOLDER
from ..runs.child import Training
from ..runs.config_edits import without_checkpoints
from ..runs.launcher import POLL, LaunchedTraining, killed_at_exit, launch_of

# recorded variables that belong to the machine and the launcher of the original
NOT_REPLAYED = ('WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'SLURM_NTASKS', 'CUDA_VISIBLE_DEVICES',
                'NVIDIA_VISIBLE_DEVICES', 'MMREPRO_RESTARTED')
# what a replay changes itself, or what says only when and where it ran
BY_DESIGN = ('created', 'command', 'cwd', 'work_dir', 'config.default_hooks.checkpoint',
             'environment.MMREPRO_')


class ReplayOutcome(NamedTuple):
    """What a replay came to."""
    compared: int  # iterations that agree, before the first difference
    difference: Divergence | None  # the first one
    environment: list[Any]  # differences between the two manifests
    notes: list[str]  # what a reader of the original's files should know

    @property
    def rank(self) -> int:
        return self.difference.rank if self.difference else 0


def prepare(manifest: Manifest, work_dir: str,
            changes: Mapping[str, Any] | None = None) -> str:
    """Write the config of the replay into ``work_dir`` and return its path.

    It is the original's, except for where results go (no checkpoints are written), and for
    ``changes``: settings that say where files lie on this machine.

    Raises:
        FingerprintError: the run began in the middle, at a checkpoint that is gone.
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
        say: is told the progress, one line.
        report: is told the differences between the manifests, as soon as the second exists.
        changes: settings of the config that differ, for example where the data lie.

    Raises:
        FingerprintError: the original cannot be read or has no iterations.
        TrainingFailed: the training ended with an error.
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
    shutil.rmtree(os.path.join(work_dir, FOLDER), ignore_errors=True)
    config = prepare(manifest, work_dir, changes)
    then = manifest.content['environment']
    env = {name: then.get(name) for name in {*then, *environment()} if name not in NOT_REPLAYED}
    cwd = manifest.content['cwd']
    whole = end == last and all(log.ended for log in original.ranks.values())
    processes = manifest.processes
    log = 'output.txt' if processes == 1 else 'output.rank{rank}.txt'
    launch = launch_of(Training(os.path.abspath(config), iterations=None if whole else end),
                       os.path.join(os.path.abspath(work_dir), log), env, processes,
                       cwd if os.path.isdir(cwd) else None)
    training = LaunchedTraining(launch)
    with killed_at_exit({'replay': training}):
        return _follow(training, work_dir, original, manifest, end, say, report)


def _follow(training: LaunchedTraining, work_dir: str, original: RecordedRun, manifest: Manifest,
            end: int, say: Callable[[str], None],
            report: Callable[[list[Any]], None]) -> ReplayOutcome:
    """Compare what the processes have written so far, until they end or differ."""
    around: list[Any] | None = None
    started, difference, ended, text = time.monotonic(), None, False, ''
    while not ended and difference is None:
        ended = training.poll()
        if around is None:
            try:
                found = compare_manifests(manifest, read_manifest(work_dir))
            except FingerprintError:
                pass  # not written yet
            else:
                around = [one for one in found if not one.name.startswith(BY_DESIGN)]
                report(around)
        logs = read_ranks(os.path.join(work_dir, FOLDER))
        difference = compare_logs(original.ranks, logs, end)
        done = min(len(logs[rank].steps) if rank in logs else 0 for rank in original.ranks)
        new = f'iteration {done} of {end}'
        if new != text:
            text = new
            say(f'{time.monotonic() - started:4.0f} s  {text}')
        if not ended and difference is None:
            time.sleep(POLL)
    if difference is None:
        lacking = {rank: [i for i in log.steps
                          if i < end and (rank not in logs or i not in logs[rank].steps)]
                   for rank, log in original.ranks.items()}
        rank = min((rank for rank in lacking if lacking[rank]),
                   key=lambda rank: lacking[rank][0], default=None)
        if rank is not None:
            difference = Divergence(lacking[rank][0], {
                rank: (ComparedField('iteration', 'there', None), )})
    steps = original.ranks[difference.rank if difference else 0].steps
    compared = len([i for i in steps
                    if i < (end if difference is None else difference.iteration)])
    return ReplayOutcome(compared, difference, around or [], original.notes)


def compare_logs(original: Mapping[int, RankLog], logs: Mapping[int, RankLog],
                 end: int) -> Divergence | None:
    """The first difference before iteration ``end``: of an iteration, else of a validation."""
    original = before(original, end)
    return first_divergence(original, logs) or first_differing_metric(original, logs)
