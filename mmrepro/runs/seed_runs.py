"""Train many seeds of one config, each in a process of its own.

Layout: ``WORK_DIR/CONFIG_NAME/seed_N`` is an ordinary work directory (``STREAM_N`` where only this
stream has seed N); ``result.json`` in it is written when the seed is done, and makes it count as
done the next time.
"""
from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

from mmengine.config import Config

from ..config import RandomnessConfig
from ..errors import PREEMPTED, RandomnessError, SeedsError, TrainingError
from ..seeds import MAX_SEED
from ..util.files import NUMBER, Rule, mismatch, read_json, write_whole
from ..util.text import shorten
from .config_files import read_config
from .launcher import Launch, PlannedRun, TrainingFailed, run_all

RESULT = 'result.json'
MOST = 10_000  # seeds in a range; more are taken for a typing error
LOG = 'seed.log'
# MMDetection's metrics log this instead of reporting a number
NOTHING_FOUND = 'The testing results of the whole dataset is empty'
# settings that say where and how fast a run trains
NOT_COMPARED = ('work_dir', 'resume', 'launcher')

Metrics = dict[str, list[tuple[int, float]]]  # metric -> (step, value) of all validations
_SHAPE = {'config_digest': str, 'metrics': {str: Rule(
    lambda values: mismatch(values, [[NUMBER]]) is None
    and {*map(len, values)} == {2}, 'a list of [step, value]')}}


class SeedFailed(TrainingError):
    """A run has no result, and the study can go on.

    Attributes:
        why: the reason in a few words, for a table.
    """

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class SeedJob(NamedTuple):
    """One seed of one config."""
    label: str  # of the config, for tables
    config: str  # path of the file
    options: tuple[str, ...]  # ``KEY=VALUE`` changes, as in ``train``
    digest: str  # of the effective settings, without the seed
    seed: int
    folder: str  # work directory
    stream: str = ''  # the stream whose root is ``seed``; '': all streams
    root: int = 0  # root of the other streams

    @property
    def name(self) -> str:
        return f'{self.label}, {self.stream or "seed"} {self.seed}'


def parse_seeds(text: str) -> list[int]:
    """Parse ``'0..4'`` or ``'0,1,5..7'``; seeds stay in the order given.

    >>> parse_seeds('0..2,7')
    [0, 1, 2, 7]
    """
    seeds: list[int] = []
    for part in text.split(','):
        low, dots, high = part.strip().partition('..')
        if not low.isdigit() or (dots and not high.isdigit()):
            raise SeedsError(f'--seeds {text}: {part!r} is not allowed; allowed: 3, 0..4, 0,1,5..7')
        first, last = int(low), int(high or low)
        wrong = ''
        if last < first:
            wrong = f'it counts down; write {last}..{first}'
        elif last > MAX_SEED:
            wrong = f'a seed is at most {MAX_SEED}'
        elif last - first >= MOST:
            wrong = f'at most {MOST} seeds'
        if wrong:
            raise SeedsError(f'--seeds {text}: {part.strip()!r} is not allowed: {wrong}')
        seeds += range(first, last + 1)
    double = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if double:
        raise SeedsError(f'--seeds {text}: {double[0]} is listed twice')
    return seeds


def jobs_of(config: str, label: str, seeds: Sequence[int], work_dir: str,
            options: Sequence[str] = (), changes: dict[str, Any] | None = None) -> list[SeedJob]:
    """Return the jobs of one config; ``changes`` is ``options`` parsed."""
    cfg = read_config(config, changes, imports=False)
    settings = {key: value for key, value in cfg.items() if key not in NOT_COMPARED
                and (key != 'load_from' or value)}
    randomness = dict(settings.pop('randomness', None) or {})
    randomness.pop('seed', None)
    text = Config(settings).pretty_text + repr(sorted(randomness.items()))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return [SeedJob(label, config, tuple(options), digest, seed,
                    os.path.join(work_dir, label, f'seed_{seed}')) for seed in seeds]


def vary_stream(job: SeedJob, stream: str, seeds: Sequence[int]) -> list[SeedJob]:
    """Return jobs in which one stream has these seeds, and all other streams the first seed.

    The first job is ``job`` itself, in which all streams have the first seed.
    """
    folder = os.path.dirname(job.folder)
    return [job, *(job._replace(seed=seed, stream=stream, root=job.seed,
                                folder=os.path.join(folder, f'{stream}_{seed}'))
                   for seed in seeds[1:])]


def parse_streams(text: str, config: str, changes: dict[str, Any] | None = None) -> list[str]:
    """Parse ``'init,step'`` into a list of streams that can vary in a config."""
    cfg = read_config(config, changes, imports=False)
    randomness = dict(cfg.get('randomness') or {})
    streams = [name.strip() for name in text.split(',')]
    for name in streams:
        if streams.count(name) > 1:
            raise SeedsError(f'--vary {text}: {name} is listed twice')
        if name in (randomness.get('streams') or {}):
            raise SeedsError(f'--vary {text}: {config} fixes randomness.streams.{name}; '
                             'remove it there')
    try:
        RandomnessConfig.parse(dict(randomness, seed=0, streams={
            **(randomness.get('streams') or {}), **dict.fromkeys(streams, 0)}))
    except RandomnessError as error:
        raise SeedsError(f'--vary {text}: {error}') from error
    return streams


def result_of(job: SeedJob) -> dict[str, Any] | None:
    """Read the result of a seed; None if it is not finished."""
    path = os.path.join(job.folder, RESULT)
    if not os.path.isfile(path):
        return None
    try:
        result: dict[str, Any] = read_json(path, SeedsError, _SHAPE)
    except SeedsError as error:
        raise SeedsError(f'{error}; remove it to run this seed again') from error
    if result['config_digest'] != job.digest:
        raise SeedsError(f'{job.folder} was trained with other settings than {job.config} has now; '
                         'choose another --work-dir, or remove the folder')
    return result


def run_job(job: SeedJob, metrics_of: Callable[[str], Metrics]) -> dict[str, Any]:
    """Train one seed in a fresh process; continue where an earlier attempt was interrupted.

    Raises:
        SeedFailed: the training has failed, or has no metrics.
        TrainingError: it was pre-empted.
    """
    options = list(job.options)
    if job.stream:
        options.append(f'randomness.streams.{job.stream}={job.seed}')
    seed = job.root if job.stream else job.seed
    command = ['mmrepro', 'train', job.config, '--seed', str(seed), '--work-dir', job.folder]
    if glob.glob(os.path.join(glob.escape(job.folder), '*.pth')):
        command.append('--resume')
    if options:
        command += ['--cfg-options', *options]
    log = os.path.join(job.folder, LOG)
    try:
        run_all([PlannedRun(job.label, job.folder, [Launch(command, log)])])
    except TrainingFailed as error:
        if error.code == PREEMPTED:
            raise TrainingError(f'{job.name}: pre-empted, with a checkpoint; the same command '
                                'continues') from error
        output, *_ = (error.finding or str(error).rpartition('\nthe training ended')[0]
                      ).strip().splitlines()[-1:] or ['']
        raise SeedFailed(f'{job.name}: {error}',
                         f'exit code {error.code}: {shorten(output, 100)}') from error
    metrics = metrics_of(job.folder)
    if not metrics:
        with open(log, encoding='utf-8', errors='replace') as file:
            found_nothing = any(NOTHING_FOUND in line for line in file)
        why = ('it was validated, and the detector found nothing at all, for which there is no '
               'metric. Train longer, begin from pretrained weights, or look at the learning rate '
               'and at score_thr of model.test_cfg' if found_nothing else
               'set val_dataloader, val_evaluator and val_interval')
        raise SeedFailed(
            f'{job.name}: the run has no validation metrics (log: {log}); {why}',
            'the detector found nothing' if found_nothing else 'no validation metrics')
    result = dict(seed=job.seed, stream=job.stream or None, config=job.config,
                  config_digest=job.digest, metrics=metrics)
    write_whole(os.path.join(job.folder, RESULT), json.dumps(result, indent=1))
    return result
