"""A process of a training that tells its supervisor all that its ranks do."""
from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any, NamedTuple

import mmengine.config.config
from mmengine.config import Config
from mmengine.dist import get_rank
from mmengine.hooks import EMAHook, Hook

from ...digests import state_digest
from ...distributed.unwrap import unwrap
from ...runs.startup import on_ranks


class RankEvent(NamedTuple):
    """What a rank reports."""
    rank: int
    # 'begin' of training, 'train' for an iteration, 'trained' after all of its hooks, 'val' for a
    # validation batch, 'metrics' of a validation, 'save' before a checkpoint is written, 'end' of
    # training
    kind: str
    iteration: int  # that was finished, counted from 1; at which training begins or is validated
    content: Any = None  # what must be equal in every run, as text and numbers
    workers: tuple = ()  # process ids of the data loader workers of its process


class _Sender(Hook):
    """What both hooks need."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _send(self, kind: str, iteration: int, content: Any = None) -> None:
        workers = tuple(process.pid for process in multiprocessing.active_children())
        self._connection.send(RankEvent(get_rank(), kind, iteration, content, workers))


class _StepReporter(_Sender):
    """Sends every step before a checkpoint can hold it: a run that is killed after the checkpoint
    does not repeat this step.
    """
    priority = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        losses = {name: float(value.detach()).hex() for name, value in sorted(outputs.items())}
        self._send('train', runner.iter + 1, losses)


class _Reporter(_Sender):
    """Sends all other events."""
    priority = 100

    def before_train(self, runner: Any) -> None:
        self._send('begin', runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._send('trained', runner.iter + 1)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        self._send('val', runner.iter)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self._send('metrics', runner.iter, {name: repr(metrics[name]) for name in sorted(metrics)})

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        self._send('save', runner.iter)

    def after_train(self, runner: Any) -> None:
        self._send('end', runner.iter, final_state(runner))


def final_state(runner: Any) -> dict[str, str]:
    """Digests of everything that training produces."""
    model = unwrap(runner.model)
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict):
        schedulers = [one for several in schedulers.values() for one in several]
    state = dict(weights=model.state_dict(), optimizer=runner.optim_wrapper.state_dict(),
                 schedules=[scheduler.state_dict() for scheduler in schedulers])
    for index, hook in enumerate(hook for hook in runner.hooks if isinstance(hook, EMAHook)):
        state[f'EMA {index}'] = hook.ema_model.state_dict()
    return {name: state_digest(value) for name, value in state.items()}


def train(config: str, variables: dict[str, str], connection: Any, log: str) -> None:
    """Train in this process, which becomes the leader of a process group; ends the process.

    ``connection`` takes every :class:`RankEvent`, the file ``log`` the output.
    """
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    from mmengine.runner import Runner
    # laying out the text of a config takes longer than all the rest of a start
    mmengine.config.config.FormatCode = lambda text, **options: (text, False)
    cfg = Config.fromfile(config)
    os.environ.update(variables)
    # the runner of an earlier start has written its own into the file
    cfg.launcher = 'pytorch' if variables else 'none'

    def main() -> None:
        runner = Runner.from_cfg(cfg)
        for kind in (_StepReporter, _Reporter):
            runner.register_hook(kind(connection), priority=kind.priority)
        runner.train()

    on_ranks(cfg, main)
