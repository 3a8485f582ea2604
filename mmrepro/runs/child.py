"""The process of one training, which every comparison of runs starts.

    python -m mmrepro.runs.child '{"config": "CONFIG", "iterations": 6}'
"""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, NamedTuple

from ..config import randomness_of
from ..errors import DIFFERENT, DONE, USAGE, SelfCheckError, TooShortError
from .config_files import read_config
from .startup import build_runner, on_ranks, restart_for

# prefix of the line of output with the message of a failed self-check, as JSON
FINDING = '@mmrepro-finding '
# prefix of the line that says why a training has not begun
REFUSAL = '@mmrepro-refusal '


class Training(NamedTuple):
    """The config to train, and the iterations."""
    config: str  # path
    work_dir: str | None = None  # instead of the config's
    settings: dict[str, Any] = {}  # changes of the config, by dotted key
    launcher: str = 'none'  # as in MMEngine: 'none', or 'pytorch' for several ranks
    resume: bool = False  # continue from ``checkpoint``, or from the latest in the work directory
    checkpoint: str | None = None  # path
    # numbers of iterations, counted from the first of the run
    iterations: int | None = None  # end after so many; None: all
    whole: bool = False  # do not begin if the training has fewer
    kill_after: int | None = None  # kill this process after so many
    validate_after: int | None = None  # validate after so many
    prepare: str | None = None  # 'module:function', called before the config is read
    attach: str | None = None  # 'module:function', called with the runner, and ``given``
    given: dict[str, Any] = {}  # keyword arguments of that function
    save: str | None = None  # name of a checkpoint in the work directory, written at the end


def train_here(training: Training) -> None:
    """Train in this process."""
    if training.prepare is not None:
        resolve_name(training.prepare)()
    cfg = read_config(training.config)
    if any(name.startswith('randomness.') for name in training.settings):
        # a dotted name does not fit into virtual_ranks=8
        cfg.randomness = randomness_of(cfg).as_dict()
    cfg.merge_from_dict(training.settings)
    cfg.launcher = training.launcher
    cfg.work_dir = training.work_dir or cfg.get('work_dir')
    if training.resume:
        cfg.resume, cfg.load_from = True, training.checkpoint
    on_ranks(cfg, lambda: _train(cfg, training))


def _train(cfg: Any, training: Training) -> None:
    from .stopping import InterruptHook, StopTraining  # imports torch: after the restart
    runner = build_runner(cfg)
    runner.register_hook(InterruptHook(training.iterations, training.kill_after,
                                       training.validate_after, training.whole),
                         priority=InterruptHook.priority)
    if training.attach is not None:
        resolve_name(training.attach)(runner, **training.given)
    done = None
    try:
        runner.train()
    except StopTraining as stop:
        done = stop.done
    if training.save is not None:
        iteration = runner.iter if done is None else done
        runner.save_checkpoint(runner.work_dir, training.save, by_epoch=False,
                               meta=dict(epoch=runner.epoch, iter=iteration))


def outcome(training: Training) -> int:
    """Train in this process, print the finding of a self-check, and return the exit code."""
    try:
        train_here(training)
    except SelfCheckError as error:
        print(f'\n{FINDING}{json.dumps(str(error))}', flush=True)
        return DIFFERENT
    except TooShortError as error:
        print(f'\n{REFUSAL}{json.dumps(str(error))}', flush=True)
        return USAGE
    return DONE


def main(argv: Sequence[str] | None = None) -> int:
    training = Training(**json.loads((sys.argv[1:] if argv is None else argv)[0]))
    restart_for(read_config(training.config, imports=False))
    return outcome(training)


if __name__ == '__main__':
    sys.exit(main())
