"""The moments of a training, which each rank writes to a file as they pass.

A line is a JSON list, see :class:`Moment`. The supervisor reads the files while the training runs;
the bits themselves are in the fingerprints of the run.
"""
from __future__ import annotations

import json
import multiprocessing
import os
import time
from typing import Any, NamedTuple

import mmengine.config.config
from mmengine.dist import get_rank
from mmengine.hooks import EMAHook, Hook

from ...digests import state_digest
from ...distributed.unwrap import unwrap
from ...fingerprint.schema import FOLDER

FILE = os.path.join(FOLDER, 'moments.rank{}.jsonl')  # in the work directory


class Moment(NamedTuple):
    """A moment in the training of one rank."""
    # 'begin' of training, 'train' for an iteration, 'trained' after all of its hooks, 'val' for a
    # validation batch, 'save' before a checkpoint is written, 'end' of training
    kind: str
    iteration: int  # number of finished iterations
    time: float  # seconds of the clock that all processes of a machine share
    process: int  # id of the process
    workers: tuple[int, ...] = ()  # ids of its data loader workers
    state: dict[str, str] | None = None  # at the end: digests of everything that was trained


def skip_config_layout() -> None:
    """Let MMEngine write configs without laying out their text, which takes seconds at each save.

    Called before the config is read.
    """
    mmengine.config.config.FormatCode = lambda text, **options: (text, False)


def attach(runner: Any) -> None:
    """Let a runner that is about to train write its moments."""
    for kind in (_FinishedStep, MomentHook):
        runner.register_hook(kind(), priority=kind.priority)


class _Writer(Hook):
    """Appends lines; one write for each, so that a killed process leaves whole lines."""

    def _write(self, runner: Any, kind: str, iteration: int, state: Any = None) -> None:
        workers = tuple(process.pid for process in multiprocessing.active_children())
        moment = Moment(kind, iteration, time.monotonic(), os.getpid(), workers, state)
        path = os.path.join(runner.work_dir, FILE.format(get_rank()))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, 'ab', buffering=0) as file:
            file.write(json.dumps(moment).encode() + b'\n')


class _FinishedStep(_Writer):
    """Writes the end of every step, before a checkpoint can hold it."""
    priority = 2  # after the fingerprint

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._write(runner, 'train', runner.iter + 1)


class MomentHook(_Writer):
    """Writes all other moments."""
    priority = 100

    def before_train(self, runner: Any) -> None:
        self._write(runner, 'begin', runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._write(runner, 'trained', runner.iter + 1)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        self._write(runner, 'val', runner.iter)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._write(runner, 'save', runner.iter)

    def after_train(self, runner: Any) -> None:
        self._write(runner, 'end', runner.iter, final_state(runner))


def final_state(runner: Any) -> dict[str, str]:
    """Digests of everything that training produces; averaged weights are in no fingerprint."""
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict):
        schedulers = [scheduler for several in schedulers.values() for scheduler in several]
    state = dict(weights=unwrap(runner.model).state_dict(),
                 optimizer=runner.optim_wrapper.state_dict(),
                 schedules=[scheduler.state_dict() for scheduler in schedulers])
    for index, hook in enumerate(hook for hook in runner.hooks if isinstance(hook, EMAHook)):
        state[f'EMA {index}'] = hook.ema_model.state_dict()
    return {name: state_digest(value) for name, value in state.items()}


class MomentReader:
    """Reads the new lines of the files of one run."""

    def __init__(self, work_dir: str, ranks: int) -> None:
        self._paths = [os.path.join(work_dir, FILE.format(rank)) for rank in range(ranks)]
        self._read = [0] * ranks  # bytes; what an earlier start has written does not count
        for rank, path in enumerate(self._paths):
            if os.path.exists(path):
                self._read[rank] = os.path.getsize(path)

    def new(self) -> list[list[Moment]]:
        """Return the moments since the last call, for each rank."""
        return [self._new_of(rank) for rank in range(len(self._paths))]

    def _new_of(self, rank: int) -> list[Moment]:
        path = self._paths[rank]
        if not os.path.exists(path) or os.path.getsize(path) == self._read[rank]:
            return []
        with open(path, 'rb') as file:
            file.seek(self._read[rank])
            text, _, _ = file.read().rpartition(b'\n')
        self._read[rank] += len(text) + 1 if text else 0
        return [Moment(*json.loads(line)) for line in text.splitlines()]
