"""Resume: choose the checkpoint, read it once, and bring a runner to where it ends."""
from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmengine.dist import get_rank
from mmengine.hooks import CheckpointHook
from mmengine.runner import CheckpointLoader, EpochBasedTrainLoop, IterBasedTrainLoop

from ..config import AUTO, RandomnessConfig
from ..data import position_of_loader
from ..data.passes import DataCursor, continue_epochs, continue_iterations, cursor_at, seek
from ..data.sampling_orders import is_endless
from ..distributed.elastic import check_starts
from ..distributed.unwrap import unwrap
from ..errors import CheckpointError, ConfigError, RandomnessError
from ..facts import compatibility, own_code
from ..objects.digests import exact_digest
from ..util.text import listed
from . import rank_state
from .choosing import last_checkpoint_of, lies_in, newest_good, with_paths_beside
from .files import load, without_code
from .fit import Compatibility, is_weights, judge, lacks, left_out, stock_facts


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from."""
    path: str
    epoch: int  # the epoch that continues or begins
    iteration: int  # the next iteration, counted from 0
    seed: int | None  # of the run that wrote it; None when unknown
    # facts that mmrepro wrote about that run; empty for a checkpoint of stock MMEngine
    written_by: Mapping[str, Any]
    # of that run, see :mod:`mmrepro.facts.collect`; of stock MMEngine's, the settings
    facts: Mapping[str, Any]
    cursor: DataCursor | None  # how far that run was in its data; None when unknown
    per_epoch: float  # iterations of an epoch of that run; infinite when unknown

    @classmethod
    def of(cls, path: str, content: Mapping[str, Any]) -> ResumePoint:
        meta = content['meta']
        written_by = meta.get('mmrepro', {})
        info = content.get('message_hub', {}).get('runtime_info', {})
        epochs, iterations = info.get('max_epochs'), info.get('max_iters')
        known = isinstance(epochs, int) and isinstance(iterations, int) and epochs > 0
        return cls(path, meta['epoch'], meta['iter'], meta.get('seed'), written_by,
                   written_by.get('facts') or stock_facts(meta),
                   DataCursor(*meta['place']) if 'place' in meta else None,
                   iterations / epochs if known else float('inf'))

    @property
    def report(self) -> str:
        """The resume in lines for the log."""
        text = f'resuming from {self.path}: epoch {self.epoch}, iteration {self.iteration}'
        return text if self.written_by else (
            f'{text}\nit was written without mmrepro: weights, optimizer and schedules continue; '
            'data order and random numbers are those of mmrepro from here on')


def _end_of(train_cfg: Any) -> tuple[str, int] | None:
    """Return the setting of a training loop that says when it ends, and its value, if known."""
    if isinstance(train_cfg, Mapping):
        for name in ('max_epochs', 'max_iters'):
            if isinstance(train_cfg.get(name), int):
                return name, train_cfg[name]
    return None


class Resume:
    """The resume of one runner. Where there is nothing to resume from, its methods do nothing.

    A file is checked once, and its tensors are read once, when MMEngine asks for them.

    Args:
        settings: ``resume``, ``load_from``, ``work_dir`` and ``train_cfg`` of the runner. Without
            ``load_from``, the newest complete checkpoint in ``work_dir`` is chosen; beside it, too,
            if that run has not come to its end. With ``resume='auto'``, ``load_from`` names
            weights to begin with where ``work_dir`` has no checkpoint.
        strict: ``resume_strict``; otherwise a named file may lack the optimizer.

    Raises:
        CheckpointError: the named file is missing, damaged, or something else.
        ResumeError: the named file holds weights, but not what a run continues from.
    """

    def __init__(self, settings: Mapping[str, Any], strict: bool) -> None:
        self.point: ResumePoint | None = None  # the checkpoint; None for a new run
        # lines for the log: files that a run cannot continue from, how it differs from the resumed
        self.passed_over: list[str] = []
        self.differences: list[str] = []
        self.doubts: list[str] = []  # differences that may change bits
        self._said: set[str] = set()  # names of the facts that differ
        self._strict = strict
        self._asked, self._folder = settings.get('resume'), settings.get('work_dir', '')
        self._checked: str | None = None  # a file that need not be checked when it is read
        self._state: dict[str, Any] = {}
        self._compatibility: Compatibility | None = None
        self._start: int | None = None  # iteration to which the data still have to move
        self._order: dict[str, Any] = {}  # state from which the order of data was drawn
        self.loop: Any = None  # the training loop, once it was built and moved
        if not self._asked:
            return
        if self._asked not in (True, AUTO):
            raise ConfigError(f'resume={self._asked!r}: allowed are True, False and {AUTO!r}')
        folder, named = self._folder, settings.get('load_from')
        self._end = _end_of(settings.get('train_cfg'))
        if named is None or self._asked == AUTO:
            self._take_own(folder)
            if self.point is None:
                begin = 'the beginning' if named is None else f'load_from={named}'
                self.passed_over.append(
                    f'nothing is left to resume from: the run starts from {begin}'
                    if self.passed_over else f'{folder} has no checkpoint to resume from: the run '
                    f'starts from {begin}')
        elif not lies_in(named, folder):
            self._take_own(folder)
            if self.point is not None and self._at_end:
                self.point = self._checked = None
            if self.point is None:
                self.passed_over = []  # of files that nobody has named
        if self.point is None and named is not None and self._asked != AUTO:
            self._take(named, weights=not lies_in(named, folder))
        elif self.point is not None and named is not None:
            self.passed_over.append(
                f'load_from={named} is not loaded: {folder} has a checkpoint of this run. To begin '
                'with that file again, give another work_dir')
        if self.point is not None and self._end is not None and self._at_end:
            setting, end = self._end
            self.passed_over.append(
                f'nothing is left to train: {self.point.path} was written at iteration '
                f'{self.point.iteration}, and {setting}={end}')

    def _take_own(self, folder: str) -> None:
        """Choose the newest complete checkpoint of the work directory, if there is one."""
        if '://' in last_checkpoint_of(folder):
            self._take(last_checkpoint_of(folder))
        else:
            _, self.passed_over = newest_good(folder, self._refuse)

    def _take(self, path: str, weights: bool = False) -> None:
        """Choose a file by its name; if it may be ``weights``, the run begins with those."""
        if '://' in path:
            # every rank fetches a remote file, as MMEngine does when it loads the file again
            with without_code(functools.partial(load, fresh=True)):
                content = CheckpointLoader.load_checkpoint(path, 'cpu')
        else:
            content = load(path, mapped=True)
        if weights and is_weights(content):
            self.passed_over.append(
                f'{path} holds weights, and no state of a training: the run starts from them')
            return
        self.passed_over = judge(path, content, self._strict)
        self.point, self._checked = ResumePoint.of(path, content), path

    @property
    def _at_end(self) -> bool:
        """Whether the resumed run has been trained to its end."""
        if self.point is None or self._end is None:
            return False
        name, end = self._end
        if name == 'max_iters':
            return self.point.iteration >= end
        return self.point.epoch >= end or self.point.iteration >= end * self.point.per_epoch

    def _refuse(self, path: str) -> str | None:
        """Choose the checkpoint at ``path``, or return why a run cannot continue from it."""
        try:
            content = load(path, mapped=True, unzipped=False)
        except CheckpointError as error:
            return str(error).replace(f'checkpoint {path} ', '', 1)
        problem = lacks(content)
        if problem is None:
            self.point, self._checked = ResumePoint.of(path, content), path
        return problem

    # ------------------------------------------------------------------------- at the start

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of the runner that have to change, so that MMEngine chooses no other file."""
        if self.point is not None:
            return dict(load_from=self.point.path, resume=True)
        return dict(resume=False) if self._asked else {}

    def check_ranks(self) -> None:
        """Let all ranks resume from one iteration. A collective operation.

        Raises:
            AgreementError: ranks have other checkpoints; names them and their machines.
        """
        point = self.point
        check_starts(self._folder, 0 if point is None else point.iteration,
                     '' if point is None else point.path)

    def log(self, logger: Any) -> None:
        """Log what was passed over, what is resumed, and how this run differs."""
        for line in self.passed_over:
            logger.warning(line)
        if self.point is not None:
            logger.info('\n'.join([self.point.report, *self.differences]))

    def seeded(self, given: RandomnessConfig) -> RandomnessConfig:
        """Return ``given`` with the seed of the run that is resumed.

        Raises:
            RandomnessError: when ``given`` names another seed.
        """
        if self.point is None or self.point.seed is None:
            return given
        if given.seed is not None and given.seed != self.point.seed:
            raise RandomnessError(
                f'randomness.seed={given.seed!r}, but {self.point.path} comes from a run with seed '
                f'{self.point.seed}; resume with that seed or with seed=None, or start a new run '
                'from the weights: load_from=..., resume=False')
        return given.with_seed(self.point.seed)

    def check_data(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare facts on the dataset, which are known later; returns lines for the log.

        Raises:
            ResumeError: as :meth:`compare`.
        """
        if self.point is None or not any(
                name.startswith('train_') for name in self.point.facts):
            return []
        return self.compare({**self.point.facts, **facts})

    def compare_late(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare facts that became known since :meth:`compare`; returns lines for the log."""
        if self.point is None or not self.point.written_by:
            return []
        return self.compare({**self.point.facts, **{
            name: value for name, value in facts.items() if name not in self._said}})

    @property
    def history(self) -> str:
        """Differences that this and earlier resumes of the run have found; '' for none."""
        if self.point is None:
            return ''
        found = self.point.facts.get(compatibility.HISTORY)
        if self.doubts:
            now = f'resumed at iteration {self.point.iteration} with {"; ".join(self.doubts)}'
            return f'{found}; {now}' if found else now
        return str(found or '')

    def compare(self, facts: Mapping[str, Any]) -> list[str]:
        """Compare this run with the resumed run; returns lines for the log.

        Raises:
            ResumeError: a difference changes bits, with ``resume_strict``.
        """
        if self.point is None or not self.point.facts:
            return []
        if not self.point.written_by:  # stock MMEngine: settings are all that is known
            facts = {name: value for name, value in facts.items() if name.startswith('config.')}
        then = {name: value for name, value in self.point.facts.items()
                if name != compatibility.HISTORY}
        now = own_code.completed(then, facts)
        now.pop(compatibility.HISTORY, None)
        rows = compatibility.differences(then, now)
        self._said.update(row.name for row in rows)
        self.doubts += compatibility.doubts(rows)
        return compatibility.check(self.point.path, rows,
                                   self._strict and bool(self.point.written_by))

    def continue_loop(self, loop: Any) -> None:
        """Let a new training loop count on from the checkpoint."""
        self.loop = loop
        if position_of_loader(loop.dataloader) is None:
            return
        if isinstance(loop, IterBasedTrainLoop):
            start = (self.point.iteration, self.point.cursor) if self.point else (0, None)
            continue_iterations(loop, *start)
        elif isinstance(loop, EpochBasedTrainLoop):
            continue_epochs(loop)
        elif self.point is not None:  # a loop of the user's own: `seek_data` does not know it
            seek(loop.dataloader, *cursor_at(loop, self.point.iteration, self.point.cursor))

    # ------------------------------------------------------------------------- the content

    def read(self, path: str, map_location: Any) -> Any:
        """Read a checkpoint for MMEngine; the chosen file was checked when it was chosen."""
        checked, self._checked = path == self._checked, None
        return load(path, map_location, checked=checked, fresh=checked)

    def take_state(self, checkpoint: dict[str, Any], runner: Any) -> None:
        """Keep the state of a loaded checkpoint that :meth:`restore` needs.

        Raises:
            ResumeError: the checkpoint does not fit the run, with ``resume_strict``.
        """
        if self.point is None:
            return
        self._state = checkpoint.get('mmrepro', {})
        parts = self._state.get('parts')
        if parts:
            self._compatibility = Compatibility(self.point.path, parts, self._strict)
            self._compatibility.check_restored(runner)
        self._check_weights(runner, checkpoint.get('state_dict', {}))
        of_rank = self._state.get('ranks', {}).get(get_rank(), {})
        if self._state.get('gradients') or of_rank.get('gradients'):
            runner.logger.addFilter(_is_no_lost_gradient)  # MMEngine counts iterations next
        if self._state.get('passes') and isinstance(runner.train_loop, EpochBasedTrainLoop):
            text = (f'the run that wrote the checkpoint was in pass {self._state["passes"] + 1} '
                    f'over the data of epoch {checkpoint["meta"]["epoch"]}, and '
                    f'{type(runner.train_loop).__name__} would resume in the first. ')
            runner.logger.warning(compatibility.inexact(
                text, self._strict, 'Resume from a checkpoint of the end of an epoch'))
        hub = checkpoint['message_hub']
        hub['runtime_info'] = with_paths_beside(self.point.path, hub['runtime_info'])

    def _check_weights(self, runner: Any, state_dict: Mapping[str, Any]) -> None:
        """Refuse a file without weights that the model does not have by itself.

        Raises:
            ResumeError: under ``resume_strict``; otherwise it is a warning.
        """
        assert self.point is not None
        digests = self._state.get('left_out', {})
        lost = [name for name, value in left_out(unwrap(runner.model), state_dict).items()
                if digests.get(name) != exact_digest(value)]
        if lost:
            runner.logger.warning(compatibility.inexact(
                f'{self.point.path} has no weights of {listed(lost)}, and those of this model are '
                'not those of the run that wrote it. ', self._strict,
                'Let checkpoints have the whole state_dict, or let the model load these weights '
                'when it is built (init_cfg): a run that resumes does not load load_from'))

    # ------------------------------------------------------------------------- in training

    def check_streams(self, runner: Any) -> None:
        """Refuse a position to which the streams of data loading cannot move.

        Raises:
            ResumeError: under ``resume_strict``; otherwise it is a warning.
        """
        if self.point is None or not runner.iter or runner.repro.worker_seed == 'sample':
            return
        problem = _streams_problem(runner, runner.iter, self._cursor)
        if not problem:
            return
        runner.logger.warning(compatibility.inexact(
            f'randomness.worker_seed={runner.repro.worker_seed!r}, and the run resumes at '
            f'iteration {runner.iter}: {problem}. ', self._strict and bool(self.point.written_by),
            "Begin a new run with worker_seed='sample', which resumes from any iteration"
            + ('' if runner.repro.uses_stock_streams else '; or resume from the end of an epoch')))

    @property
    def _cursor(self) -> DataCursor | None:
        # read late, because dev/control.py moves it
        return None if self.point is None else self.point.cursor

    def restore(self, runner: Any) -> bool:
        """Bring back attributes, gradients and buffers.

        Returns whether the interrupted run ended before a validation that its loop makes here.
        """
        if self.point is None or runner.iter == 0:
            return False
        self._start = runner.iter
        runner.logger.removeFilter(_is_no_lost_gradient)
        if self._compatibility is not None:
            self._compatibility.training_begins(runner)
        state, self._state = self._state, {}
        of_rank = state.get('ranks', {}).get(get_rank(), {})
        self._order = {**state.get('order', {}), **of_rank.get('order', {})}
        lost = rank_state.restore(runner, state)
        lost += rank_state.restore(runner, of_rank)
        for name in lost:
            runner.logger.warning(f'the checkpoint has state of {name}, which this run lacks')
        if state.get('metrics') is not None:
            # written for a new best score: EarlyStoppingHook had not seen the metrics yet
            seen = [number for number, hook in enumerate(runner.hooks)
                    if isinstance(hook, CheckpointHook)]
            for hook in runner.hooks[seen[-1] + 1:] if seen else ():
                hook.after_val_epoch(runner, metrics=state['metrics'])
        return ('validated' in state and state['validated'] != runner.iter
                and _validates_here(runner, self._cursor))

    def check_set_up(self, runner: Any) -> None:
        """Compare the parts that hooks have set up, before the first step.

        Raises:
            ResumeError: they differ from those of the resumed run, with ``resume_strict``.
        """
        if self._compatibility is not None:
            self._compatibility.check_set_up(runner)

    def seek_data(self, runner: Any) -> None:
        """Move the data at the start of the first epoch, after all hooks that move them."""
        loop, loader = runner.train_loop, runner.train_dataloader
        if self._start is None or position_of_loader(loader) is None:
            return
        if isinstance(loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
            # in an iteration-based loop, DistSamplerSeedHook has put the sampler to its first pass
            seek(loader, *cursor_at(loop, self._start, self._cursor), again=self._order)
            self._start = None


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
