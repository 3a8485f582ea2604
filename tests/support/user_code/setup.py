"""The row of a set-up, and how it is trained."""
from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from typing import Any, Callable

from faults.tiny import tiny
from harness import digest
from mmengine.hooks import Hook
from mmengine.runner import Runner

SAVED = 3  # the iteration of the checkpoint from which runs resume, inside the first epoch

SAME, REFUSED, FOUND = 'same bits', 'refused by name', 'found by a self-check'
WARNED = 'warned of by name'  # where it may be as it should be


def _build(cfg: Any) -> Any:
    return Runner.from_cfg(cfg)


def _train(runner: Any) -> None:
    runner.train()


@dataclass(frozen=True)
class Setup:
    """A row.

    Attributes:
        change: called with the config of the tiny run, before it is built.
        outcome: SAME, REFUSED, FOUND or WARNED.
        says: parts of the message, or of a line of the log.
        variations: of the runs that are compared with the first one.
        build: config -> runner.
        drive: what is called with the runner.
    """
    change: Callable[[Any], None]
    outcome: str
    says: tuple[str, ...] = ()
    variations: tuple[str, ...] = ('workers', 'resume')
    build: Callable[[Any], Any] = _build
    drive: Callable[[Any], None] = _train


SETUPS: dict[str, Setup] = {}


def setup(outcome: str, *says: str, **options: Any) -> Callable:
    """Register a function that changes the config, under its name."""
    def register(change: Callable[[Any], None]) -> Callable[[Any], None]:
        assert change.__name__ not in SETUPS, change.__name__
        SETUPS[change.__name__] = Setup(change, outcome, says, **options)
        return change
    return register


def transform(cls: type) -> Callable[[Any], None]:
    """A change that puts a transform in the middle of the pipeline."""
    def change(cfg: Any) -> None:
        from mmengine.registry import TRANSFORMS
        TRANSFORMS.register_module(module=cls, force=True)
        cfg.train_dataloader.dataset.pipeline.insert(2, dict(type=cls.__name__))
    change.__name__ = cls.__name__
    return change


def hook(cls: type, **arguments: Any) -> Callable[[Any], None]:
    """A change that adds a hook."""
    def change(cfg: Any) -> None:
        from mmengine.registry import HOOKS
        HOOKS.register_module(module=cls, force=True)
        cfg.custom_hooks.append(dict(type=cls.__name__, **arguments))
    return change


def by_iterations(cfg: Any) -> None:
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=8, val_interval=100)


def workers(cfg: Any) -> None:
    cfg.train_dataloader.update(num_workers=2)


def resume(cfg: Any) -> None:
    cfg.update(resume=True, load_from=os.path.join(cfg.work_dir, f'iter_{SAVED}.pth'))


VARIATIONS: dict[str, tuple[Callable, ...]] = {
    'workers': (workers, ),
    'resume': (resume, ),
    'workers, resume': (workers, resume),
}


class Look(Hook):
    """Digests of every iteration: the batch, the losses, the weights after the step."""
    priority = 100

    def __init__(self) -> None:
        self.iterations: dict[int, dict] = {}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.iterations[runner.iter] = dict(data=digest(data_batch))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.iterations[runner.iter].update(
            losses={name: float(value.detach()).hex() for name, value in outputs.items()},
            weights=digest(runner.model.state_dict()))


def run(name: str, folder: str, variation: str | None = None) -> dict:
    """Train a set-up in this process; 'error' is the text of what ended it."""
    row = SETUPS[name]
    cfg = tiny(folder)
    cfg.default_hooks = dict(checkpoint=dict(
        type='CheckpointHook', interval=1000 if variation else SAVED, by_epoch=False))
    if row.outcome == WARNED:
        cfg.log_level = 'WARNING'
    row.change(cfg)
    for change in VARIATIONS[variation] if variation else ():
        change(cfg)
    look = Look()
    try:
        runner = row.build(cfg)
        runner.register_hook(look)
        row.drive(runner)
    except Exception:
        return dict(iterations=look.iterations, error=traceback.format_exc())
    return dict(iterations=look.iterations, error='')
