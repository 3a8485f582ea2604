"""One rank of a training process that tells its supervisor all that it does."""
from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any, Dict, NamedTuple, Optional

import mmengine.config.config
from mmengine.config import Config
from mmengine.hooks import EMAHook, Hook

from ...digests import state_digest
from ...distributed.unwrap import unwrap

__all__ = ['Event', 'Seat', 'train']


class Event(NamedTuple):
    """What a rank reports.

    Attributes:
        kind: 'begin' of training, 'train' for an iteration, 'turned' behind all of its
            hooks, 'val' for a validation batch, 'metrics'
            of a validation, 'save' before a checkpoint is written, 'end' of training.
        iteration: that was finished, counted from 1; at which training begins or is validated.
        content: what must be equal in every run, as text and numbers.
        workers: process ids of its data loader workers.
    """
    kind: str
    iteration: int
    content: Any = None
    workers: tuple = ()


class Seat(NamedTuple):
    """Which rank of how many, and where they meet."""
    rank: int
    world: int
    port: Optional[int] = None

    def environment(self) -> Dict[str, str]:
        return dict(RANK=str(self.rank), WORLD_SIZE=str(self.world), LOCAL_RANK=str(self.rank),
                    MASTER_ADDR='127.0.0.1', MASTER_PORT=str(self.port))


class _Sender(Hook):
    """What both hooks need."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _send(self, kind: str, iteration: int, content: Any = None) -> None:
        workers = tuple(process.pid for process in multiprocessing.active_children())
        self._connection.send(Event(kind, iteration, content, workers))


class _StepReporter(_Sender):
    """Sends every step before a checkpoint can hold it: a run that is killed behind the checkpoint
    does not do this step again.
    """
    priority = 0

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        losses = {name: float(value.detach()).hex() for name, value in sorted(outputs.items())}
        self._send('train', runner.iter + 1, losses)


class _Reporter(_Sender):
    """Sends an :class:`Event` at every other turn."""
    priority = 100

    def before_train(self, runner: Any) -> None:
        self._send('begin', runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self._send('turned', runner.iter + 1)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        self._send('val', runner.iter)

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self._send('metrics', runner.iter, {name: repr(metrics[name]) for name in sorted(metrics)})

    def before_save_checkpoint(self, runner: Any, checkpoint: Dict) -> None:
        self._send('save', runner.iter)

    def after_train(self, runner: Any) -> None:
        self._send('end', runner.iter, final_state(runner))


def final_state(runner: Any) -> Dict[str, str]:
    """Digests of all that training has made."""
    model = unwrap(runner.model)
    schedulers = runner.param_schedulers or []
    if isinstance(schedulers, dict):
        schedulers = [one for several in schedulers.values() for one in several]
    state = dict(weights=model.state_dict(), optimizer=runner.optim_wrapper.state_dict(),
                 schedules=[scheduler.state_dict() for scheduler in schedulers])
    for index, hook in enumerate(hook for hook in runner.hooks if isinstance(hook, EMAHook)):
        state[f'EMA {index}'] = hook.ema_model.state_dict()
    return {name: state_digest(value) for name, value in state.items()}


def train(config: str, seat: Seat, connection: Any, log: str) -> None:
    """Train in this process, which becomes the leader of a process group; ends the process."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    from mmengine.runner import Runner
    # laying out the text of a config takes longer than all the rest of a start
    mmengine.config.config.FormatCode = lambda text, **options: (text, False)
    cfg = Config.fromfile(config)
    if seat.world > 1:
        os.environ.update(seat.environment())
        cfg.launcher = 'pytorch'
    runner = Runner.from_cfg(cfg)
    for kind in (_StepReporter, _Reporter):
        runner.register_hook(kind(connection), priority=kind.priority)
    runner.train()
