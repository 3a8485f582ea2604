"""Where in its loop a resumed run begins, and what MMEngine's loops do there."""
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..data import placement_of
from ..data.cursor import DataCursor, where
from ..data.sampling_orders import is_endless


def cursor_in_epoch(runner: Any, saved: DataCursor | None) -> DataCursor:
    """Where a resumed epoch-based loop begins; ``saved`` is the checkpoint's cursor, if any."""
    if saved is not None and saved.epoch == runner.epoch:
        return saved
    return DataCursor(runner.epoch,
                      runner.iter - runner.epoch * len(runner.train_dataloader))


def validation_is_due(runner: Any, saved: DataCursor | None) -> bool:
    """Whether MMEngine's loops validate after the last iteration of ``runner``."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    if isinstance(loop, EpochBasedTrainLoop):
        # in the middle of an epoch, and at the end of its batches, the loop comes to it by itself
        if cursor_in_epoch(runner, saved).batches:
            return False
        now, last = loop.epoch, loop.max_epochs
    elif isinstance(loop, IterBasedTrainLoop):
        now, last = loop.iter, loop.max_iters
    else:
        return False
    loop._decide_current_val_interval()
    return now >= loop.val_begin and (now % loop.val_interval == 0 or now == last)


def _within_a_pass(runner: Any, saved: DataCursor | None) -> bool:
    """Whether a resumed run begins after some batches of a pass over the data, not at its end."""
    loop, loader = runner.train_loop, runner.train_dataloader
    ends = placement_of(loader) is not None  # MMEngine by itself begins a pass again at its end
    if isinstance(loop, IterBasedTrainLoop):
        done = where(loader, runner.iter, saved).batches
        ends = ends and not is_endless(loader.batch_sampler.sampler)
    else:
        done = cursor_in_epoch(runner, saved).batches
    return done > 0 and not (ends and done == len(loader))


def streams_problem(runner: Any, saved: DataCursor | None) -> tuple[str, str] | None:
    """Why streams that belong to workers cannot continue, and what to do instead; or None."""
    config = runner.repro
    of_loop = config.legacy and isinstance(runner.train_loop, IterBasedTrainLoop)
    if config.legacy and (not config.step_seed or of_loop):
        return "MMEngine's own streams are sequences, and no checkpoint holds their position", ''
    if _within_a_pass(runner, saved):
        return ('its streams begin with each pass over the data, and the checkpoint lies within '
                'one: what is left of it would be drawn anew',
                'Resume from a checkpoint of the end of an epoch; or ')
    return None


def refusal_after(runner: Any, iteration: int) -> str:
    """Why a resume will refuse a checkpoint that ``runner`` writes after an iteration; or ''."""
    if runner.repro.worker_seed == 'sample' or not runner.repro.resume_strict:
        return ''
    then = SimpleNamespace(repro=runner.repro, train_loop=runner.train_loop, iter=iteration,
                           train_dataloader=runner.train_dataloader, epoch=runner.epoch)
    problem = streams_problem(then, None)
    return '' if problem is None else problem[0]
