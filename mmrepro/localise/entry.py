"""What can be localised: two variants of a config, or two runs that were trained."""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..checkpoint.files import load
from ..errors import CheckpointError, FingerprintError
from ..fingerprint.provenance import repeated_environment
from ..fingerprint.reader import RecordedRun, read_run
from ..runs.config_files import read_config, without_mark
from ..runs.progress import ProgressLine, time_left
from .compared_runs import CHANGED, RunSpec, start
from .recording import RecordingPlan
from .search import Localiser, LocaliseResult, first_iteration
from .variation_effect import different_by_design

DEFAULT_ITERATIONS = 20
SEED = 0  # of both runs, where the config has none


def localise_config(config: str, work_dir: str, iterations: int = DEFAULT_ITERATIONS, *,
                    common: Mapping[str, Any] = {},
                    settings: Sequence[Mapping[str, Any]] = ({}, {}),
                    env: Sequence[Mapping[str, str]] = ({}, {}), ranks: int = 1,
                    resume_b: int | None = None, validate_b: int | None = None,
                    values: bool = True) -> LocaliseResult:
    """Train a config as run A and as run B, and find where they diverge.

    Args:
        work_dir: an empty folder.
        common: settings of the config for both runs, by dotted key.
        settings, env: settings and environment variables for A and for B.
        ranks: processes of each run.
        resume_b: end run B before this iteration and resume it.
        validate_b: let run B validate before this iteration.
        values: run once more to measure how far the results of the operator are apart.

    Raises:
        ConfigError: the config cannot be read, or has no such setting.
        TrainingFailed: a training ended with an error.
        ValueError: run B cannot validate, or the runs cannot be compared.
    """
    specs = []
    seeded = [_seed_of(read_config(config, {**common, **options})) for options in settings]
    if seeded == [None, None]:
        print(f'{config} has no randomness.seed, and every run would draw another one: both runs '
              f'get seed {SEED}', file=sys.stderr, flush=True)
        common = {**common, 'randomness.seed': SEED}
    for name, options, variables in zip('AB', settings, env):
        cfg = read_config(config, {**common, **options})
        if validate_b and cfg.get('val_cfg') is None:
            raise ValueError(f'{config} has no val_cfg: run B cannot validate')
        path = os.path.join(work_dir, f'config_{name}.py')
        cfg.dump(path)
        events = dict(resume_at=resume_b, validate_at=validate_b) if name == 'B' else {}
        specs.append(RunSpec(name, path, dict(variables), ranks,
                             asked={**without_mark(options), **variables}, **events))
    return _localiser(specs, work_dir).search(iterations, values)


def localise_runs(path_a: str, path_b: str, work_dir: str, values: bool = True) -> LocaliseResult:
    """Find where two trained runs diverge, from their fingerprints, and repeat them up to there.

    Args:
        path_a, path_b: work directories of the runs.
        work_dir, values: see :func:`localise_config`.

    Raises:
        FingerprintError: a run has no fingerprints or no manifest.
        TrainingFailed, ValueError: see :func:`localise_config`.
    """
    runs = read_run(path_a), read_run(path_b)
    _, found = first_iteration(*runs)
    specs = [_repetition(name, run, found.iteration if found else 0, work_dir)
             for name, run in zip('AB', runs)]
    localiser = _localiser(specs, work_dir)
    for line in different_by_design(runs):
        localiser.say(line)
    for spec in specs:
        if spec.checkpoint:
            localiser.say(f'run {spec.name} continues from {spec.checkpoint}')
    return localiser.explain(*runs, values)


def _seed_of(cfg: Any) -> int | None:
    # MMDetection 2.x has `seed` at the top
    return (cfg.get('randomness') or {}).get('seed', cfg.get('seed'))


def unused_folder(path: str) -> str:
    """``path``, or ``path.1``, ``path.2``, ... when there are files in it."""
    folder, number = path, 0
    while os.path.isdir(folder) and os.listdir(folder):
        number += 1
        folder = f'{path}.{number}'
    return folder


def _localiser(specs: Sequence[RunSpec], work_dir: str) -> Localiser:
    """Its progress goes to the standard error; a terminal shows the iterations as they are done."""
    def launch(spec: RunSpec, folder: str, plan: RecordingPlan) -> None:
        started = time.monotonic()

        def count(done: int, of: int) -> None:
            if sys.stderr.isatty():
                line.say(f'run {spec.name}: {done} of {of} iterations'
                         f'{time_left(time.monotonic() - started, done, of)}')

        with ProgressLine(sys.stderr) as line:
            start(spec, folder, plan, count)

    say = partial(print, file=sys.stderr, flush=True)
    say(CHANGED)
    return Localiser(specs, work_dir, launch, say)


def _repetition(name: str, run: RecordedRun, iteration: int, work_dir: str) -> RunSpec:
    """How to repeat a run up to an iteration: its config, its variables, its nearest checkpoint."""
    if not run.manifests:
        raise FingerprintError(f'{run.work_dir}: has no manifest, so the run cannot be repeated')
    manifest: dict[str, Any] = run.manifests[0]
    path = os.path.join(work_dir, f'config_{name}.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest['config']['text'])
    env = repeated_environment(manifest.get('environment') or {})
    return RunSpec(name, path, env, manifest['processes'],
                   checkpoint=_nearest_checkpoint(run.work_dir, iteration))


def _nearest_checkpoint(folder: str, iteration: int) -> str | None:
    """The last checkpoint of mmrepro that leaves one more iteration before ``iteration``."""
    best: tuple[int, str | None] = (0, None)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            meta = load(path, map_location='meta').get('meta', {}) if name.endswith('.pth') else {}
        except CheckpointError:
            continue
        if 'mmrepro' in meta and best[0] < meta['iter'] < iteration:
            best = meta['iter'], path
    return best[1]
