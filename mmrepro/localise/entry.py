"""Localise a difference of two variants of a config, or of two trained runs."""
from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..checkpoint.completeness import damage
from ..checkpoint.files import load
from ..errors import CheckpointError, ConfigError, FingerprintError
from ..facts.provenance import repeated_environment
from ..fingerprint.reader import RecordedRun, read_run
from ..fingerprint.schema import REPEATED
from ..runs.config_edits import SEED, fix_seed, seed_of
from ..runs.config_files import read_config, without_mark
from ..runs.progress import progress_line
from ..util.files import checked
from .compared_runs import CHANGED, RunSpec, start
from .recording import RecordingPlan
from .search import Localiser, LocaliseResult, first_iteration
from .variation_effect import different_by_design

DEFAULT_ITERATIONS = 20


def localise_config(config: str, work_dir: str, iterations: int = DEFAULT_ITERATIONS, *,
                    common: Mapping[str, Any] = {},
                    settings: Sequence[Mapping[str, Any]] = ({}, {}),
                    env: Sequence[Mapping[str, str]] = ({}, {}), ranks: int = 1,
                    resume_b: int | None = None, validate_b: int | None = None,
                    values: bool = True) -> LocaliseResult:
    """Train a config as run A and as run B, and find their first difference.

    The arguments are those of :func:`mmrepro.verbs.localise`; ``work_dir`` is an empty folder,
    and ``common`` are the settings of both runs.
    """
    specs = []
    configs = [read_config(config, {**common, **options}) for options in settings]
    if all(seed_of(cfg) is None for cfg in configs):
        print(f'{config} has no randomness.seed, and every run would draw another one: both runs '
              f'get seed {SEED}', file=sys.stderr, flush=True)
        for cfg in configs:
            fix_seed(cfg)
    for name, cfg, options, variables in zip('AB', configs, settings, env):
        if validate_b and cfg.get('val_cfg') is None:
            raise ConfigError(f'{config} has no val_cfg: run B cannot validate')
        path = os.path.join(work_dir, f'config_{name}.py')
        cfg.dump(path)
        events: dict[str, Any] = dict(
            resume_at=resume_b, validate_at=validate_b) if name == 'B' else {}
        specs.append(RunSpec(name, path, dict(variables), ranks,
                             asked={**without_mark(options), **variables}, **events))
    return _localiser(specs, work_dir).search(iterations, values)


def localise_runs(path_a: str, path_b: str, work_dir: str, values: bool = True) -> LocaliseResult:
    """Find the first difference of two trained runs: repeat them up to their divergence."""
    runs = read_run(path_a), read_run(path_b)
    _, first = first_iteration(*runs)
    specs = [_repetition(name, run, first.iteration if first else 0, work_dir)
             for name, run in zip('AB', runs)]
    localiser = _localiser(specs, work_dir)
    for line in different_by_design(runs):
        localiser.say(line)
    for spec in specs:
        if spec.checkpoint:
            localiser.say(f'run {spec.name} continues from {spec.checkpoint}')
    return localiser.explain(*runs, values)


def unused_folder(path: str) -> str:
    """Return ``path``, or the first of ``path.1``, ``path.2``, ... without files in it."""
    folder, number = path, 0
    while os.path.isdir(folder) and os.listdir(folder):
        number += 1
        folder = f'{path}.{number}'
    return folder


def _localiser(specs: Sequence[RunSpec], work_dir: str) -> Localiser:
    """Return a localiser that reports its progress on the standard error."""
    def launch(spec: RunSpec, folder: str, plan: RecordingPlan) -> None:
        with progress_line(sys.stderr) as tell:
            start(spec, folder, plan, tell)

    say = partial(print, file=sys.stderr, flush=True)
    say(CHANGED)
    return Localiser(specs, work_dir, launch, say)


def _repetition(name: str, run: RecordedRun, iteration: int, work_dir: str) -> RunSpec:
    """Return how to repeat a run up to an iteration: config, variables, nearest checkpoint."""
    if not run.manifests:
        raise FingerprintError(f'{run.work_dir}: has no manifest, so the run cannot be repeated')
    manifest: dict[str, Any] = checked(
        f'{run.work_dir}: manifest.json', run.manifests[0], FingerprintError, REPEATED)
    path = os.path.join(work_dir, f'config_{name}.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest['config']['text'])
    return RunSpec(name, path, repeated_environment(manifest), manifest['processes'],
                   checkpoint=_nearest_checkpoint(run.work_dir, iteration))


def _nearest_checkpoint(folder: str, iteration: int) -> str | None:
    """Return the last checkpoint of mmrepro with at least one iteration before ``iteration``."""
    best: tuple[int, str | None] = (0, None)
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        try:
            content = load(path, map_location='meta') if name.endswith('.pth') else {}
        except CheckpointError:
            continue
        meta = {} if damage(content) else content['meta']
        if 'mmrepro' in meta and best[0] < meta['iter'] < iteration:
            best = meta['iter'], path
    return best[1]
