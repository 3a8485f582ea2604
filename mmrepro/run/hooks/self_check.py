"""Repeat some steps of a run, watch steps for unknown operators, and log the counts at its end."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.model import BaseModel, MMDistributedDataParallel
from mmengine.registry import HOOKS

from ...config import is_due
from ...data.passes import judge_disputed
from ...data.sample_check import Disputed, checked
from ...distributed.unwrap import is_compiled, optim_wrappers, param_schedulers, unwrap
from ...errors import ConfigError, SampleDiffersError, UnknownOperatorError
from ...ops.guard import OperatorGuard
from ...selfcheck import forked
from ...selfcheck.observer import BatchComparison
from ...selfcheck.steps import StepCheck
from ...util.libraries import belongs_to_user
from ...util.scoped import around_next_step
from ...util.text import counted, listed

NOT_REPEATED = 'steps are not repeated: {}'
UNREAD = ('{}: samples that are loaded twice differ in {}. The training does not read these '
          'fields: losses and gradients are the same with both results')


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
        if is_compiled(runner.model):
            self._not_repeated = (
                'the model is compiled, and watching its step would compile it differently')
            runner.logger.warning(NOT_REPEATED.format(self._not_repeated))
        elif getattr(model_class, 'train_step', None) is not BaseModel.train_step:
            self._name_own_step(runner, model_class.__name__)

    def _name_own_step(self, runner: Any, name: str) -> None:
        """Say what becomes of the ``train_step`` of a model of the user's, called ``name``."""
        if getattr(type(runner.model), 'train_step', None) is MMDistributedDataParallel.train_step:
            runner.logger.warning(
                f'on several ranks, nothing calls the train_step of {name}: '
                'MMDistributedDataParallel makes its steps from forward(), and trains otherwise '
                "than one rank. On ranks without virtual_ranks, model_wrapper_cfg=dict(type="
                "'MMSeparateDistributedDataParallel') calls it")
        else:
            runner.logger.info(f'{name} has a train_step of its own: only the part before its '
                               'first optimizer step is repeated')

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
        text = 'no sample and no step was repeated'
        if any(counts.values()):
            text = (f'{counted(counts["samples"], "sample")} and '
                    f'{counted(counts["steps"], "step")} were repeated: same bits')
        notes = []
        if self.unread:
            notes.append(f'but for {listed(sorted(self.unread))} of samples, which the training '
                         'does not read')
        if not runner.repro.self_checks.samples:
            notes.append('samples are not repeated: randomness.self_checks.samples=0')
        if self._not_repeated:
            notes.append(NOT_REPEATED.format(self._not_repeated))
        names = _outside_of_passes(runner)
        if names:
            notes.append(f'not repeated: {", ".join(names)}')
        return f'{text} ({"; ".join(notes)})' if notes else text


def _outside_of_passes(runner: Any) -> list[str]:
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


@HOOKS.register_module()
class OperatorGuardHook(Hook):
    """Report, once each, operators that are not known to be deterministic.

    Iterations 1, 2, 4, 8, ... of the run are watched: a step that takes another path later (masks,
    a head that starts late) is still seen, and the cost vanishes. Registered by every run with
    ``deterministic=True`` or ``'warn'``; put it into ``custom_hooks`` to change its settings.

    Args:
        allow: Operators known to repeat, by the name under which they are reported.
        on_unknown: 'warn' logs; 'error' raises :class:`UnknownOperatorError` after the step.
        devices: Types of devices that count.

    Raises:
        ValueError: for another ``on_unknown``, or a text in place of a list.
    """
    priority = 95  # after all hooks that prepare the step

    def __init__(self, allow: Sequence[str] = (), on_unknown: str = 'warn',
                 devices: Sequence[str] = ('cuda',)) -> None:
        if on_unknown not in ('warn', 'error'):
            raise ConfigError(f"OperatorGuardHook: on_unknown={on_unknown!r}: expected 'warn' "
                              "or 'error'")
        for name, given in dict(allow=allow, devices=devices).items():
            if isinstance(given, str):  # its letters would be the names
                raise ConfigError(f'OperatorGuardHook: {name}={given!r}: expected a list, such as '
                                  f'[{given!r}]')
        self._allow, self._devices = tuple(allow), tuple(devices)
        self._error = on_unknown == 'error'
        self._guard: OperatorGuard | None = None
        self._done = 0

    def before_train(self, runner: Any) -> None:
        self._done = 0
        present = {parameter.device.type for parameter in runner.model.parameters()}
        if present & set(self._devices):
            self._guard = OperatorGuard(
                runner.model, self._devices, self._allow,
                None if self._error else lambda operator: runner.logger.warning(str(operator)))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self._done += 1
        if self._guard is not None and is_due(self._done):
            around_next_step(runner.model, self._guard.watched)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        if self._error and self._guard is not None and self._guard.findings:
            raise UnknownOperatorError('\n'.join(map(str, self._guard.findings)))
