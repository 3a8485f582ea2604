"""Repeat some steps of a run, and say at its end how much was repeated."""
from __future__ import annotations

from typing import Any

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS

from ...config import is_due
from ...data.passes import judge_disputed
from ...data.sample_check import Disputed, checked
from ...distributed.unwrap import optim_wrappers, param_schedulers, unwrap
from ...errors import SampleDiffersError
from ...selfcheck import forked
from ...selfcheck.batches import BatchComparison
from ...selfcheck.steps import StepCheck
from ...util.libraries import belongs_to_user
from ...util.scoped import around_next_step
from ...util.text import listed

NOT_REPEATED = 'steps are not repeated: {}'
UNREAD = ('{}: samples that are loaded twice differ in {}. The training does not read it: losses '
          'and gradients are the same with both')


@HOOKS.register_module()
class SelfCheckHook(Hook):
    """Repeats steps of a run; every run with ``deterministic=True`` has this hook.

    The steps of iterations 1, 2, 4, 8, ..., counted from the start of the training, and of every
    ``randomness.self_checks.steps``-th run twice, see :mod:`mmrepro.selfcheck.steps`.
    """
    priority = 99  # around the step that others watch

    def __init__(self) -> None:
        self.steps = 0
        self._interval = 0
        self._not_repeated: str | None = None  # why
        self._in_copies = False
        self._disputed: Disputed | None = None  # the coming batch, if its samples differ
        self.unread: set[str] = set()  # fields of samples that differ and that no step has read

    def before_train(self, runner: Any) -> None:
        self.steps, self._interval = 0, runner.repro.self_checks.steps
        self._not_repeated = None
        if not self._interval:
            self._not_repeated = 'randomness.self_checks.steps=0'
            return
        self._in_copies = forked.is_possible(runner.model)
        model_class = type(unwrap(runner.model))
        if hasattr(runner.model.train_step, '_torchdynamo_orig_callable'):
            self._not_repeated = (
                'the model is compiled, and watching its step would compile it differently')
            runner.logger.warning(NOT_REPEATED.format(self._not_repeated))
        elif getattr(model_class, 'train_step', None) is not BaseModel.train_step:
            runner.logger.info(
                f'{model_class.__name__} has a train_step of its own: what comes before its first '
                'optimizer step is repeated')

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if self._not_repeated:
            return
        # recorders leave out the passes that are thrown away
        paused = [hook.paused for hook in runner.hooks if hasattr(hook, 'paused')]
        check = None
        if is_due(runner.iter + 1, self._interval):
            check = StepCheck(
                runner, paused, self._done, self._copy_failed if self._in_copies else None)
        check = self._comparing(runner, paused, check)
        if check is not None:
            around_next_step(runner.model, check)

    # ------------------------------------------------ samples that differ when loaded again

    def before_train_epoch(self, runner: Any) -> None:
        # without repeated steps, nothing tells what the training reads
        judge_disputed(runner.train_loop.dataloader,
                       None if self._not_repeated else self._dispute)

    def _dispute(self, disputed: Disputed) -> None:
        """Keep a batch for its step, which is the next one or an error."""
        self._disputed = disputed

    def _comparing(self, runner: Any, paused: list[Any], check: Any) -> Any:
        """Return ``check``, after a comparison if samples of the batch differ.

        Raises:
            SampleDiffersError: ranks take no common comparison here.
        """
        disputed, self._disputed = self._disputed, None
        several = get_world_size() > 1  # which compare together where steps are repeated
        if several and check is None and disputed is not None and not self.unread.issuperset(
                disputed.fields):
            raise SampleDiffersError(disputed.message)
        if check is None and several or disputed is None and not several:
            return check

        def unread(disputed: Disputed) -> None:
            if not self.unread.issuperset(disputed.fields):
                self.unread.update(disputed.fields)
                name = type(runner.train_loop.dataloader.dataset).__name__
                runner.logger.info(UNREAD.format(name, listed(disputed.fields)))

        return BatchComparison(runner, paused, disputed, unread, check)

    def _done(self, runner: Any, problem: str | None) -> None:
        self.steps += problem is None
        if problem:
            self._not_repeated = problem
            runner.logger.warning(NOT_REPEATED.format(problem))

    def _copy_failed(self, runner: Any, problem: str) -> None:
        self._in_copies = False
        runner.logger.warning(
            f'the step of iteration {runner.iter} was not repeated: the copy of the '
            f'process {problem}. From here on, steps are repeated in the process itself')

    def after_train(self, runner: Any) -> None:
        judge_disputed(runner.train_loop.dataloader, None)
        runner.logger.info(self.summary(runner))

    def counts(self, runner: Any) -> dict[str, int]:
        """Return how many samples and steps this process and its workers have repeated."""
        loops = (runner._train_loop, runner._val_loop, runner._test_loop)
        # by id: loops may share a loader
        loaders = {id(loader): loader for loader in (
            getattr(loop, 'dataloader', None) for loop in loops)}
        return dict(samples=sum(map(checked, loaders.values())), steps=self.steps)

    def summary(self, runner: Any) -> str:
        """Return the last line of the log."""
        counts = self.counts(runner)
        text = (f'{counts["samples"]:,} samples and {counts["steps"]:,} steps were repeated: same '
                'bits')
        notes = []
        if not runner.repro.self_checks.samples:
            notes.append('samples are not repeated: randomness.self_checks.samples=0')
        if self._not_repeated:
            notes.append(NOT_REPEATED.format(self._not_repeated))
        names = _not_repeated(runner)
        if names:
            notes.append(f'not repeated: {", ".join(names)}')
        return f'{text} ({"; ".join(notes)})' if notes else text


def _not_repeated(runner: Any) -> list[str]:
    """Return the classes of the user that work outside of forward and backward passes."""
    wrappers = optim_wrappers(runner.optim_wrapper).values()
    parts = [*runner.hooks, *wrappers, *(wrapper.optimizer for wrapper in wrappers),
             *sum(param_schedulers(runner).values(), []), runner.train_loop]
    return list(dict.fromkeys(type(part).__name__ for part in parts
                              if belongs_to_user(type(part).__module__)))


def self_checks(runner: Any) -> dict[str, int]:
    """Return the counts of a runner's :class:`SelfCheckHook`; {} if it has none."""
    return next((hook.counts(runner) for hook in runner.hooks if isinstance(hook, SelfCheckHook)),
                {})
