"""One training in a process of its own, as far as asked: what ``verify`` and ``replay`` start.

    python -m mmrepro.runs.child CONFIG --iterations 6 [--resume] [--kill-after 3] [...]
"""
from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any, Optional, Sequence

from mmengine.config import Config
from mmengine.hooks import Hook

from .stopping import StopTraining, train_until_stopped

__all__ = ['TurnHook', 'main']

PRIORITY = 100  # after the checkpoint of the iteration is written


class TurnHook(Hook):
    """Ends, kills or validates after an iteration, counted from 1."""
    priority = PRIORITY
    validated = False  # so far

    def __init__(self, iterations: Optional[int] = None, kill_after: Optional[int] = None,
                 validate_after: Optional[int] = None) -> None:
        self._iterations, self._kill, self._validate = iterations, kill_after, validate_after

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Optional[dict] = None) -> None:
        done = runner.iter + 1
        if done == self._validate:
            runner.val_loop.run()
            runner.model.train()
            self.validated = True
        if done == self._iterations:
            raise StopTraining

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)


def main(argv: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    parser.add_argument('--iterations', type=int)
    parser.add_argument('--kill-after', type=int)
    parser.add_argument('--validate-after', type=int)
    parser.add_argument('--resume', action='store_true')
    args = parser.parse_args(argv)

    from .start import build_runner, restart_if_incomplete
    cfg = Config.fromfile(args.config)
    randomness = cfg.get('randomness') or {}
    restart_if_incomplete(os.environ, randomness.get('deterministic', False),
                          randomness.get('num_threads'))
    cfg.resume = args.resume or cfg.get('resume', False)
    runner = build_runner(cfg)
    runner.register_hook(TurnHook(args.iterations, args.kill_after, args.validate_after),
                         priority=PRIORITY)
    train_until_stopped(runner)
    return 0


if __name__ == '__main__':
    sys.exit(main())
