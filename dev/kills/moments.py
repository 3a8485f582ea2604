"""The moments of a training: each rank appends them to a file, and a supervisor reads them.

The bits of the training itself are in its fingerprints.
"""
from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import time
from typing import Any, NamedTuple

from mmengine.dist import get_rank
from mmengine.hooks import EMAHook, Hook

from mmrepro.distributed.unwrap import param_schedulers, unwrap
from mmrepro.objects.digests import state_digest
from mmrepro.run.hooks.fingerprint import FingerprintHook

FILE = 'moments.jsonl'  # in the work directory


class Moment(NamedTuple):
    """A moment in the training of one rank; a line of the file is the JSON list of its fields."""
    # 'begin' of training, 'next' iteration begins, 'train' for a finished iteration, 'val' for a
    # validation batch, 'save' before a checkpoint is written, 'end' of training
    kind: str
    iteration: int  # number of finished iterations
    rank: int
    time: float  # seconds of the clock that all processes of a machine share
    process: int  # id of the process
    workers: tuple[Any, ...]  # ids of its data loader workers
    state: dict[str, str] | None  # at the end: digests of everything that was trained


def attach(runner: Any) -> None:
    """Let a runner that is about to train write its moments."""
    runner.register_hook(MomentHook(), priority=MomentHook.priority)


class MomentHook(Hook):
    """Appends a line per moment."""
    # after the fingerprint is written, before a checkpoint can hold the iteration
    priority = FingerprintHook.end_priority + 1

    def _write(self, runner: Any, kind: str, iteration: int, state: Any = None) -> None:
        workers = tuple(process.pid for process in multiprocessing.active_children())
        moment = Moment(kind, iteration, get_rank(), time.monotonic(), os.getpid(), workers, state)
        with open(os.path.join(runner.work_dir, FILE), 'ab', buffering=0) as file:
            file.write(f'\n{json.dumps(moment)}\n'.encode())  # also ends a torn line

    def before_train(self, runner: Any) -> None:
        self._write(runner, 'begin', runner.iter)

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._write(runner, 'next', runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._write(runner, 'train', runner.iter + 1)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        self._write(runner, 'val', runner.iter)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        self._write(runner, 'save', runner.iter)

    def after_train(self, runner: Any) -> None:
        self._write(runner, 'end', runner.iter, final_state(runner))


def final_state(runner: Any) -> dict[str, str]:
    """Return digests of everything that training produces, averaged weights included."""
    state = dict(weights=unwrap(runner.model).state_dict(),
                 optimizer=runner.optim_wrapper.state_dict(),
                 schedules=[scheduler.state_dict() for schedulers in
                            param_schedulers(runner).values() for scheduler in schedulers])
    for index, hook in enumerate(hook for hook in runner.hooks if isinstance(hook, EMAHook)):
        state[f'EMA {index}'] = hook.ema_model.state_dict()
    return {name: state_digest(value) for name, value in state.items()}


class MomentReader:
    """Reads the new moments of a work directory."""

    def __init__(self, work_dir: str) -> None:
        self._file = open(os.path.join(work_dir, FILE), 'ab+', buffering=0)
        self._torn = b''

    def new(self) -> list[Moment]:
        """Return the moments since the last call, without those that a killed process tore."""
        *lines, self._torn = (self._torn + self._file.read()).split(b'\n')
        moments = []
        for line in filter(None, lines):
            with contextlib.suppress(ValueError):  # torn
                moments.append(Moment(*json.loads(line)))
        return moments


def durations(moments: list[Moment]) -> dict[str, float]:
    """Return the median seconds of a step or validation batch, and from the begin of a save on."""
    times: dict[str, list[float]] = dict(step=[], save=[])
    for before, after in zip(moments, moments[1:]):
        if before.kind == 'save':
            times['save'].append(after.time - before.time)
        elif before.kind in ('next', 'val') and after.kind in ('train', 'val'):
            times['step'].append(after.time - before.time)
    return {name: sorted(seconds)[len(seconds) // 2] if seconds else 0.
            for name, seconds in times.items()}
