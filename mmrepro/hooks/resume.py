"""Make a resumed run the uninterrupted one: data position, gradients, state in attributes."""
from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

from mmengine.dist import get_rank
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..checkpoint import rank_state
from ..checkpoint.completeness import check_readable, judge
from ..config import RandomnessError
from ..data import placement_of
from ..data.cursor import CountedIterator, DataCursor, seek, where
from ..data.sampling_orders import is_endless
from ..facts.compatibility import ResumeError

__all__ = ['ResumeHook', 'check_streams', 'validation_is_due']

# settings of CheckpointHook that take from its files what a resumed run needs
LEFT_OUT = ('save_optimizer', 'save_param_scheduler')


def _all_states(schedulers: Any) -> Iterator[Dict[str, Any]]:
    """State dicts of one list of schedulers, or of a list by optimizer."""
    for one in schedulers.values() if isinstance(schedulers, dict) else [schedulers]:
        yield from one


def place_in_epoch(runner: Any) -> DataCursor:
    """Where a resumed epoch-based loop begins."""
    place = runner._point.place if runner._point is not None else None
    epoch = runner.epoch
    done = runner.iter - epoch * len(runner.train_dataloader)
    return place if place is not None and place[0] == epoch else (epoch, done)


def validation_is_due(runner: Any) -> bool:
    """Whether MMEngine's loops validate after the last iteration of ``runner``."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    if isinstance(loop, EpochBasedTrainLoop):
        # in the middle of an epoch, and at the end of its batches, the loop comes to it by itself
        if place_in_epoch(runner)[1]:
            return False
        now, last = loop.epoch, loop.max_epochs
    elif isinstance(loop, IterBasedTrainLoop):
        now, last = loop.iter, loop.max_iters
    else:
        return False
    loop._decide_current_val_interval()
    return now >= loop.val_begin and (now % loop.val_interval == 0 or now == last)


def lies_within_a_pass(runner: Any) -> bool:
    """Whether a resumed run begins after some batches of a pass over the data, not at its end."""
    loop, loader = runner.train_loop, runner.train_dataloader
    ends = placement_of(loader) is not None  # MMEngine by itself begins a pass again at its end
    if isinstance(loop, IterBasedTrainLoop):
        done = where(loader, runner.iter, runner._point and runner._point.place)[1]
        ends = ends and not is_endless(loader.batch_sampler.sampler)
    else:
        done = place_in_epoch(runner)[1]
    return done > 0 and not (ends and done == len(loader))


def check_streams(runner: Any) -> None:
    """Refuse a place that the streams of data loading cannot be brought to.

    Raises:
        ResumeError: under ``resume_strict``; otherwise it is a warning.
    """
    config = runner.repro
    if not runner._resume or runner.iter == 0 or config.worker_seed == 'sample':
        return
    of_loop = config.legacy and isinstance(runner.train_loop, IterBasedTrainLoop)
    if config.legacy and (not config.step_seed or of_loop):
        why = "MMEngine's own streams are sequences, and no checkpoint holds their place"
        instead = ''
    elif lies_within_a_pass(runner):
        why = ('its streams begin with each pass over the data, and the checkpoint lies within '
               'one: what is left of it would be drawn anew')
        instead = 'Resume from a checkpoint of the end of an epoch; or '
    else:
        return
    text = (f'randomness.worker_seed={config.worker_seed!r}, and the run resumes at iteration '
            f'{runner.iter}: {why}. ')
    stock = runner._point is not None and not runner._point.written_by
    if config.resume_strict and not stock:
        raise ResumeError(
            f"{text}{instead or 'Either '}go on with another result: "
            "randomness.resume_strict=False; or begin a new run with worker_seed='sample', which "
            'resumes from any iteration')
    runner.logger.warning(f'{text}The result is not that of the uninterrupted run')


def check_hooks(runner: Any) -> None:
    """Say at the start what no checkpoint will hold.

    Raises:
        RandomnessError: for more than one EMAHook.
    """
    averages = [f'{type(hook).__name__}({hook.ema_cfg})' for hook in runner.hooks
                if isinstance(hook, EMAHook)]
    if len(averages) > 1:
        raise RandomnessError(
            f'{" and ".join(averages)}: checkpoints have one place for averages of weights '
            '(ema_state_dict), and a validation leaves one in the place of the model, which all '
            'of them swap with theirs. One EMAHook is allowed')
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook):
            left_out = [f'{name}=False' for name in LEFT_OUT if not getattr(hook, name)]
            if left_out:
                runner.logger.warning(
                    f'{" and ".join(left_out)} of CheckpointHook: a run can not be resumed from '
                    'such checkpoints, and automatic resume passes over them')


def behind_checkpoints(runner: Any) -> List[Hook]:
    """The hooks that are called after the last CheckpointHook."""
    places = [number for number, hook in enumerate(runner.hooks)
              if isinstance(hook, CheckpointHook)]
    return runner.hooks[places[-1] + 1:] if places else []


@HOOKS.register_module()
class ResumeHook(Hook):
    """Runs after all other hooks, so that none of them moves the data again."""
    priority = 100

    def __init__(self) -> None:
        self._state: Optional[Dict[str, Any]] = None
        self._start: Optional[int] = None
        self._began: Optional[Tuple[int, int]] = None  # an epoch, the iteration at which it began

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._began = runner.epoch, runner.iter - batch_idx

    def _place(self, runner: Any, meta: Dict[str, Any]) -> DataCursor:
        iterator = getattr(runner.train_loop, 'dataloader_iterator', None)
        if isinstance(iterator, CountedIterator):
            return iterator.cursor
        epoch, began = self._began or (None, 0)
        return meta['epoch'], meta['iter'] - began if meta['epoch'] == epoch else 0

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        state = rank_state.own_state(runner)
        checkpoint['mmrepro'] = dict(attributes=state['attributes'],
                                     gradients=rank_state.portable(state['gradients']),
                                     buffers=rank_state.portable(rank_state.unsaved_buffers(runner)),
                                     ranks=runner._other_ranks,
                                     counts=rank_state.counts(runner),
                                     metrics=runner._metrics,
                                     validated=runner._validated)
        checkpoint['meta']['place'] = list(self._place(runner, checkpoint['meta']))
        for state in _all_states(checkpoint.get('param_schedulers', [])):
            # OneCycle's has a function in it, which its class has anyway; a checkpoint is data
            for name in [name for name, value in state.items() if callable(value)]:
                del state[name]
        check_readable(checkpoint)

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        if runner._resume:
            self._state = checkpoint.get('mmrepro')
            if runner._point is None:  # MMEngine has fetched it from a remote place
                for line in judge('the checkpoint', checkpoint, runner.repro.resume_strict):
                    runner.logger.warning(line)

    def before_train(self, runner: Any) -> None:
        check_hooks(runner)
        if not runner._resume or runner.iter == 0:
            return
        self._start = runner.iter
        state = self._state or {}
        unknown = rank_state.restore(runner, state)
        unknown += rank_state.restore(runner, state.get('ranks', {}).get(get_rank(), {}))
        for place in unknown:
            runner.logger.warning(f'the checkpoint has state of {place}, which this run lacks')
        if state.get('metrics') is not None:
            # it was written for a new best score; EarlyStoppingHook had not seen the metrics yet
            for hook in behind_checkpoints(runner):
                hook.after_val_epoch(runner, metrics=state['metrics'])
        if 'validated' in state and state['validated'] != runner.iter and validation_is_due(runner):
            # checkpoints are written before it; best checkpoints and early stopping depend on it
            runner.logger.info(f'the run ended before the validation at iteration {runner.iter}: '
                               'it comes first')
            runner.val_loop.run()

    def before_train_epoch(self, runner: Any) -> None:
        loop, loader = runner.train_loop, runner.train_dataloader
        if self._start is None or placement_of(loader) is None:
            return
        if isinstance(loop, EpochBasedTrainLoop):
            seek(loader, *place_in_epoch(runner))
            self._start = None
        elif isinstance(loop, IterBasedTrainLoop):
            # DistSamplerSeedHook has put the sampler back to its first pass
            seek(loader, *where(loader, self._start, runner._point and runner._point.place))
            self._start = None
