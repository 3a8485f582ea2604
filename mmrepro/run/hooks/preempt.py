"""Leave when asked to: finish the iteration, write a checkpoint, end with exit code 75.

Schedulers send SIGTERM or SIGUSR1 some time before they kill. MMEngine dies of both.
"""
from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...checkpoint.resuming import refusal_after
from ...config import is_count
from ...distributed.agreement import RepeatedFlag, agree
from ...distributed.skipped_steps import StepsTaken
from ...distributed.unwrap import ema_hooks, optim_wrappers
from ...errors import PREEMPTED, ConfigError, Preempted
from ...util.files import write_whole
from ...util.scoped import restore_handlers
from ...util.text import counted

FILE_NAME = 'preempted.pth'

# signal that announces the end -> its sender
SIGNALS = {
    'SIGTERM': 'Slurm, Kubernetes, torchrun and cloud machines, some seconds before SIGKILL',
    'SIGUSR1': 'Slurm with --signal=USR1@SECONDS; users, who want a checkpoint now',
}


@HOOKS.register_module()
class PreemptHook(Hook):
    """Saves a checkpoint and ends the run when a signal announces the end.

    Every reproducible runner has one; put another into ``custom_hooks`` to change it.

    Args:
        signals: names of signals; none turns pre-emption off.
        exit_code: of the process.
        interval: Iterations after which the ranks tell each other of a signal; None: as many as
            take about two seconds.

    Raises:
        ValueError: for a name that is no signal, or SIGINT, whose meaning stays; for an interval
            that is none of 1, 2, ...
    """
    priority = 100

    def __init__(self, signals: Sequence[str] = tuple(SIGNALS),
                 exit_code: int = PREEMPTED, interval: int | None = None) -> None:
        if interval is not None and not is_count(interval):
            raise ConfigError(f'PreemptHook(interval={interval!r}): allowed are 1, 2, ... or None')
        for name in signals:
            if name not in signal.Signals.__members__ or name in ('SIGINT', 'SIGKILL', 'SIGSTOP'):
                raise ConfigError(f'PreemptHook(signals={signals!r}): {name!r} cannot announce an '
                                  f'end; for example {", ".join(SIGNALS)}')
        self.signals, self.exit_code = tuple(signals), exit_code
        self._received: int | None = None
        self._before: dict[int, Any] = {}
        self._active = False  # all ranks have the same
        self._interval = interval
        self._training = self._validating = RepeatedFlag(interval)
        self._steps: StepsTaken | None = None
        self._common_batches: int | float = float('inf')

    # ------------------------------------------------------------------------- the signals

    def _receive(self, number: int, frame: Any) -> None:
        # nothing else is safe here: logging and locks may be in use right now
        self._received = number

    def begin(self, runner: Any) -> None:
        """Replace the handlers, for a training; only the main thread of a process may do so."""
        if not self.signals:
            return
        if threading.current_thread() is threading.main_thread():
            self._received = None
            for name in self.signals:
                number = getattr(signal, name)
                self._before[number] = signal.signal(number, self._receive)
        else:
            runner.logger.info('this is not the main thread: signals are left as they are')
        self._training = RepeatedFlag(self._interval)
        self._active = True

    def end(self) -> None:
        """Put the handlers back. May be called at any time."""
        self._active = False
        if self._steps is not None:
            self._steps.close()
        restore_handlers(self._before)
        self._before = {}

    # ------------------------------------------------------------------------- the events

    def before_train(self, runner: Any) -> None:
        self._steps = StepsTaken(optim_wrappers(runner.optim_wrapper).values(), runner.iter)

    def before_train_epoch(self, runner: Any) -> None:
        if self._steps is not None:
            self._steps.begin_epoch()

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if self._steps is not None:
            self._steps.end(runner.iter)
        if self._active and self._training.up(self._received is not None):
            self._leave(runner, runner.iter + 1)

    def before_val_epoch(self, runner: Any) -> None:
        if self._active:
            # some ranks may have a batch more than others, and only they come to its event
            self._validating = RepeatedFlag(self._interval)
            self._common_batches = agree('validation', len(runner.val_loop.dataloader), min)

    def after_val_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                       outputs: Any = None) -> None:
        if batch_idx < self._common_batches and self._active and self._validating.up(
                self._received is not None):  # a signal reaches ranks at different times
            # the checkpoint has the trained weights; the resumed run validates from the start
            runner.lifecycle.evaluated.leave()
            for hook in ema_hooks(runner.hooks):  # their averages are in the model
                hook._swap_ema_parameters()
            self._leave(runner, runner.iter)

    def _leave(self, runner: Any, iteration: int) -> None:
        number = self._received
        reason = signal.Signals(number).name if number is not None else 'another rank'
        runner.logger.warning(f'pre-empted by {reason}: writing a checkpoint')
        runner.save_checkpoint(runner.work_dir, FILE_NAME, by_epoch=False,
                               meta=dict(epoch=runner.epoch, iter=iteration))
        path = os.path.join(runner.work_dir, FILE_NAME)
        if is_main_process():
            # MMEngine writes it in the encoding of the locale
            write_whole(os.path.join(runner.work_dir, 'last_checkpoint'), path, encoding=None)
        refusal = refusal_after(runner, iteration)
        how = 'continue with --resume' if not refusal else (
            f'--resume will refuse it with worker_seed={runner.repro.worker_seed!r} ({refusal}), '
            'unless randomness.resume_strict=False accepts a different result')
        runner.logger.warning(f'pre-empted after {counted(iteration, "iteration")}: {path}; '
                              f'{how}. Leaving with exit code {self.exit_code}')
        runner.visualizer.close()
        # a launcher ends all ranks when one has ended, and rank 0 may still write
        agree('the end', None, len)
        raise Preempted(self.exit_code, path, iteration)


def stop_announced(runner: Any) -> bool:
    """Whether a signal has reached this process that announces its end."""
    return any(hook._received is not None for hook in runner.hooks
               if isinstance(hook, PreemptHook))


@contextmanager
def signal_handlers(runner: Any) -> Iterator[None]:
    """Train in this block; afterwards all handlers are back, however the training ended."""
    ours = [hook for hook in runner._hooks if isinstance(hook, PreemptHook)]
    # after hooks that were registered meanwhile: when they have run, the iteration is finished
    runner._hooks = [hook for hook in runner._hooks if hook not in ours] + ours
    try:
        for hook in ours:
            hook.begin(runner)
        yield
    finally:
        for hook in ours:
            hook.end()
