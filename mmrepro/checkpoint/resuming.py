"""Carry out a resume: compare the run with the one it continues, and bring it to its end.

What is resumed is decided in :mod:`mmrepro.checkpoint.choosing`.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.dist import get_rank
from mmengine.hooks import CheckpointHook
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..data import position_of_loader
from ..data.passes import DataCursor, continue_epochs, continue_iterations, cursor_at, seek
from ..data.sampling_orders import is_endless
from ..distributed.elastic import check_starts
from ..distributed.unwrap import unwrap
from ..facts import compatibility, own_code
from ..objects.digests import exact_digest
from ..util.text import listed
from . import rank_state
from .choosing import ResumePlan, with_paths_beside
from .files import load
from .fit import Compatibility, left_out


def check_ranks(plan: ResumePlan) -> None:
    """Let all ranks resume from one iteration. A collective operation.

    Raises:
        AgreementError: ranks have other checkpoints; names them and their machines.
    """
    point = plan.point
    check_starts(plan.folder, 0 if point is None else point.iteration,
                 '' if point is None else point.path)


class Comparison:
    """Compares the facts of a run with those of the run that it resumes, as they become known."""

    def __init__(self, plan: ResumePlan) -> None:
        self._point, self._strict = plan.point, plan.strict
        self._doubts: list[str] = []  # differences that may change bits
        self._said: set[str] = set()  # names of the facts that differ

    def compare(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare this run with the resumed run; returns lines for the log.

        Raises:
            ResumeError: a difference changes bits, with ``resume_strict``.
        """
        if self._point is None or not self._point.facts:
            return []
        if not self._point.written_by:  # stock MMEngine: settings are all that is known
            facts = {name: value for name, value in facts.items() if name.startswith('config.')}
        then = {name: value for name, value in self._point.facts.items()
                if name != compatibility.HISTORY}
        now = own_code.completed(then, facts)
        now.pop(compatibility.HISTORY, None)
        rows = compatibility.differences(then, now)
        self._said.update(row.name for row in rows)
        self._doubts += compatibility.doubts(rows)
        return compatibility.check(self._point.path, rows,
                                   self._strict and bool(self._point.written_by))

    def check_data(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare facts on the dataset, which are known later; returns lines for the log.

        Raises:
            ResumeError: as :meth:`compare`.
        """
        if self._point is None or not any(
                name.startswith('train_') for name in self._point.facts):
            return []
        return self.compare({**self._point.facts, **facts})

    def compare_late(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare facts that became known since :meth:`compare`; returns lines for the log."""
        if self._point is None or not self._point.written_by:
            return []
        return self.compare({**self._point.facts, **{
            name: value for name, value in facts.items() if name not in self._said}})

    @property
    def history(self) -> str:
        """Differences that this and earlier resumes of the run have found; '' for none."""
        if self._point is None:
            return ''
        found = self._point.facts.get(compatibility.HISTORY)
        if self._doubts:
            now = f'resumed at iteration {self._point.iteration} with {"; ".join(self._doubts)}'
            return f'{found}; {now}' if found else now
        return str(found or '')


class Restoration:
    """Restores what MMEngine does not, in this order: a file is read, then training begins.

    Where there is nothing to resume from, nothing is done. Each state is let go when it is back.
    """

    def __init__(self, plan: ResumePlan) -> None:
        self._plan = plan
        # the chosen file was checked when it was chosen; later it may be another
        self._unread = None if plan.point is None else plan.point.path
        self._state: dict[str, Any] = {}
        self._compatibility: Compatibility | None = None
        # iteration to which the data move, and the state from which their order was drawn
        self._start: tuple[int, dict[str, Any]] | None = None

    def read(self, path: str, map_location: Any) -> Any:
        """Read a checkpoint for MMEngine; the chosen file is not checked again the first time."""
        checked, self._unread = path == self._unread, None
        return load(path, map_location, checked=checked, fresh=checked)

    def take_state(self, checkpoint: dict[str, Any], runner: Any) -> None:
        """Keep the state of a loaded checkpoint that :meth:`restore` needs.

        Raises:
            ResumeError: the checkpoint does not fit the run, with ``resume_strict``.
        """
        if self._plan.point is None:
            return
        state = self._state = checkpoint.get('mmrepro', {})
        if state.get('parts'):
            self._compatibility = Compatibility(
                self._plan.point.path, state['parts'], state.get('moving', ()), self._plan.strict)
            self._compatibility.check_restored(runner, checkpoint.get('state_dict', {}))
        _check_weights(self._plan, runner, checkpoint.get('state_dict', {}),
                       state.get('left_out', {}))
        if rank_state.of_rank(state, get_rank()).get('gradients'):
            runner.logger.addFilter(_is_no_lost_gradient)  # MMEngine counts iterations next
        if state.get('passes') and isinstance(runner.train_loop, EpochBasedTrainLoop):
            text = (f'the run that wrote the checkpoint was in pass {state["passes"] + 1} '
                    f'over the data of epoch {checkpoint["meta"]["epoch"]}, and '
                    f'{type(runner.train_loop).__name__} would resume in the first. ')
            runner.logger.warning(compatibility.inexact(
                text, self._plan.strict, 'Resume from a checkpoint of the end of an epoch'))
        hub = checkpoint['message_hub']
        hub['runtime_info'] = with_paths_beside(self._plan.point.path, hub['runtime_info'])

    def restore(self, runner: Any) -> bool:
        """Bring back attributes, gradients and buffers.

        Returns whether the interrupted run ended before a validation that its loop makes here.
        """
        if self._plan.point is None or runner.iter == 0:
            return False
        runner.logger.removeFilter(_is_no_lost_gradient)
        if self._compatibility is not None:
            self._compatibility.training_begins(runner)
        state, self._state = rank_state.of_rank(self._state, get_rank()), {}
        self._start = runner.iter, state.get('order', {})
        for name in rank_state.restore(runner, state):
            runner.logger.warning(f'the checkpoint has state of {name}, which this run lacks')
        if state.get('metrics') is not None:
            # written for a new best score: EarlyStoppingHook had not seen the metrics yet
            seen = [number for number, hook in enumerate(runner.hooks)
                    if isinstance(hook, CheckpointHook)]
            for hook in runner.hooks[seen[-1] + 1:] if seen else ():
                hook.after_val_epoch(runner, metrics=state['metrics'])
        return ('validated' in state and state['validated'] != runner.iter
                and _validates_here(runner, self._plan.point.cursor))

    def seek_data(self, runner: Any) -> None:
        """Move the data at the start of the first epoch, after all hooks that move them."""
        loop, loader = runner.train_loop, runner.train_dataloader
        if self._plan.point is None or self._start is None or position_of_loader(loader) is None:
            return
        if isinstance(loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
            # in an iteration-based loop, DistSamplerSeedHook has put the sampler to its first pass
            (iteration, order), self._start = self._start, None
            seek(loader, *cursor_at(loop, iteration, self._plan.point.cursor), again=order)

    def check_set_up(self, runner: Any) -> None:
        """Compare the parts that hooks have set up, before the first step.

        Raises:
            ResumeError: they differ from those of the resumed run, with ``resume_strict``.
        """
        if self._compatibility is not None:
            self._compatibility.check_set_up(runner)


def continue_loop(plan: ResumePlan, loop: Any) -> None:
    """Let a new training loop count on from the checkpoint."""
    point = plan.point
    if position_of_loader(loop.dataloader) is None:
        return
    if isinstance(loop, IterBasedTrainLoop):
        start = (point.iteration, point.cursor) if point else (0, None)
        continue_iterations(loop, *start)
    elif isinstance(loop, EpochBasedTrainLoop):
        continue_epochs(loop)
    elif point is not None:  # a loop of the user's own: `seek_data` does not know it
        seek(loop.dataloader, *cursor_at(loop, point.iteration, point.cursor))


def check_streams(plan: ResumePlan, runner: Any) -> None:
    """Refuse a position to which the streams of data loading cannot move.

    Raises:
        ResumeError: under ``resume_strict``; otherwise it is a warning.
    """
    if plan.point is None or not runner.iter or runner.repro.worker_seed == 'sample':
        return
    problem = _streams_problem(runner, runner.iter, plan.point.cursor)
    if not problem:
        return
    runner.logger.warning(compatibility.inexact(
        f'randomness.worker_seed={runner.repro.worker_seed!r}, and the run resumes at '
        f'iteration {runner.iter}: {problem}. ', plan.strict and bool(plan.point.written_by),
        "Begin a new run with worker_seed='sample', which resumes from any iteration"
        + ('' if runner.repro.uses_stock_streams else '; or resume from the end of an epoch')))


def _check_weights(plan: ResumePlan, runner: Any, state_dict: Mapping[str, Any],
                   digests: Mapping[str, str]) -> None:
    """Refuse a file without weights that the model does not have by itself.

    Raises:
        ResumeError: under ``resume_strict``; otherwise it is a warning.
    """
    assert plan.point is not None
    lost = [name for name, value in left_out(unwrap(runner.model), state_dict).items()
            if digests.get(name) != exact_digest(value)]
    if lost:
        runner.logger.warning(compatibility.inexact(
            f'{plan.point.path} has no weights of {listed(lost)}, and those of this model are '
            'not those of the run that wrote it. ', plan.strict,
            'Let checkpoints have the whole state_dict, or let the model load these weights '
            'when it is built (init_cfg): a run that resumes does not load load_from'))


def _is_no_lost_gradient(record: logging.LogRecord) -> bool:
    """Drop MMEngine's warning of lost gradients, for a checkpoint that holds them."""
    return 'the gradient of some iterations is lost' not in record.getMessage()


def _validates_here(runner: Any, saved: DataCursor | None) -> bool:
    """Whether MMEngine's loops validate after the last iteration of ``runner``."""
    loop = runner.train_loop
    if runner.val_loop is None:
        return False
    if isinstance(loop, EpochBasedTrainLoop):
        # in the middle of an epoch, and at the end of its batches, the loop comes to it by itself
        if cursor_at(loop, runner.iter, saved).batches:
            return False
        done, last = loop.epoch, loop.max_epochs
    elif isinstance(loop, IterBasedTrainLoop):
        done, last = loop.iter, loop.max_iters
    else:
        return False
    loop._decide_current_val_interval()
    return bool(done >= loop.val_begin and (done % loop.val_interval == 0 or done == last))


def _streams_problem(runner: Any, iteration: int, saved: DataCursor | None) -> str:
    """Return why the streams of workers cannot continue at ``iteration``; '' if they can."""
    if runner.repro.uses_stock_streams:
        return "MMEngine's own streams are sequences, and no checkpoint holds their position"
    loop, loader = runner.train_loop, runner.train_dataloader
    # MMEngine by itself begins a pass again at its end
    ends = position_of_loader(loader) is not None
    if isinstance(loop, IterBasedTrainLoop):
        ends = ends and not is_endless(loader.batch_sampler.sampler)
    done = cursor_at(loop, iteration, saved).batches
    if done > 0 and not (ends and done == len(loader)):
        return ('its streams begin with each pass over the data, and the checkpoint lies within '
                'a pass: what is left of it would be drawn again')
    return ''


def refusal_after(runner: Any, iteration: int) -> str:
    """Return why a resume will refuse a checkpoint of ``iteration``; '' if it will not."""
    if runner.repro.worker_seed == 'sample' or not runner.repro.resume_strict:
        return ''
    return _streams_problem(runner, iteration, None)
