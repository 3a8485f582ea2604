"""Write digests of the state of a training after each iteration."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from typing import Any

import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from ...config import is_count
from ...data import position_of_loader
from ...data.samplers import plain
from ...distributed.unwrap import names_of_parameters, optim_wrappers, takes_closure, unwrap
from ...errors import ConfigError
from ...facts import collect, variables
from ...fingerprint import schema
from ...fingerprint.digest import (
    SCHEME,
    Fetched,
    Snapshot,
    gradients_of,
    named_averages,
    named_state,
    value_digest,
)
from ...fingerprint.manifest import complete_manifest, write_manifest
from ...fingerprint.module_recorder import ModuleRecorder
from ...fingerprint.operator_recorder import OperatorLines
from ...fingerprint.schema import Writer
from ...util.scoped import replaced
from ...virtual import whole_tensor
from .self_check import self_checks

RECORDERS = {'module': ModuleRecorder, 'operator': OperatorLines}


@HOOKS.register_module()
class FingerprintHook(Hook):
    """Write a line per iteration to ``WORK_DIR/mmrepro/fingerprints.rankN.jsonl``.

    Args:
        interval: a line for iterations 0, interval, 2 interval, ...
        level: 'step': digests of the batch, losses, gradients, parameters, buffers, optimizer,
            averages; 'parameter': also by name, and norms; 'module': by name, with inputs and
            outputs of every module, forward and backward; 'operator': by name, with inputs and
            outputs of every operator (several times the time of an iteration).

    The hook changes no bit of the training and draws no random number. Gradients are those that
    the optimizer sees (unscaled, clipped), or in iterations without a step those gathered so far.

    Raises:
        ValueError: for an interval or level that is not allowed.
    """
    # the batch as the loader delivered it, and the state before other hooks touch it
    priority = 1
    # at the end of an iteration: after EMAHook, so that averages are those of this iteration; and
    # the line is in the file before CheckpointHook (priority 90) writes a checkpoint of it
    end_priority = 88

    def __init__(self, interval: int = 1, level: str = 'step') -> None:
        if level not in schema.LEVELS:
            raise ConfigError(f'FingerprintHook: level={level!r} is not allowed; allowed: '
                              f'{", ".join(map(repr, schema.LEVELS))}')
        if not is_count(interval):
            raise ConfigError(f'FingerprintHook: interval={interval!r} is not allowed; allowed: 1 '
                              'or more')
        self.interval, self.level = interval, level
        self._writer: Writer | None = None
        self.manifest: str | None = None  # path of what rank 0 has written
        self._reads = 0  # of variables, in that file
        self._step: Snapshot | None = None
        self._details: dict[str, Any] = {}  # of the line that :meth:`end_iteration` writes
        self._end = _EndOfIteration(self)
        self._recorder: Any = None
        self._in_training = ExitStack()  # closed at its end
        self._names: dict[int, str] = {}
        self._seen: list[int] = []

    def before_train(self, runner: Any) -> None:
        if self._end not in runner.hooks:
            runner.register_hook(self._end, priority=self.end_priority)
        model = unwrap(runner.model)
        self._names = {}
        for wrapper in optim_wrappers(runner.optim_wrapper).values():
            self._in_training.callback(
                wrapper.optimizer.register_step_pre_hook(self._before_step).remove)
        if self.level in RECORDERS:
            self._recorder = RECORDERS[self.level](model)
            self._in_training.callback(self._recorder.remove)
        self._open(runner)

    def _open(self, runner: Any) -> None:
        """Begin the file of this start of the training."""
        folder = os.path.join(runner.work_dir, schema.FOLDER)
        variables.share()  # before the workers start
        manifest = write_manifest(runner, folder) if get_rank() == 0 else None
        self.manifest = manifest and os.path.join(folder, manifest)
        self._writer = self._in_training.enter_context(closing(
            Writer(os.path.join(folder, schema.fingerprint_name(get_rank())))))
        self._write(schema.START, format=schema.FORMAT, level=self.level, interval=self.interval,
                    rank=get_rank(), world_size=get_world_size(), scheme=SCHEME,
                    iteration=runner.iter, manifest=manifest)

    def record_variables(self) -> None:
        """Add the environment variables to the manifest that were read since it was written."""
        reads = variables.reads()
        if self.manifest is not None and len(reads) != self._reads:
            self._reads = len(reads)
            complete_manifest(self.manifest, dict(variables=collect.other_variables(reads)))

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.record_variables()
        self._step = None
        if not self._is_due(runner.iter):
            return
        if not self._names:  # weights may be divided at the end of ``before_train``
            self._names = names_of_parameters(unwrap(runner.model))
        self._step, self._seen = Snapshot(), []
        self._add_batch(self._step, data_batch)
        if self._recorder is not None:
            self._recorder.start()

    def _is_due(self, iteration: int) -> bool:
        """Whether this iteration, counted from 0, gets a line."""
        return iteration % self.interval == 0

    def _add_batch(self, step: Snapshot, data_batch: Any) -> None:
        step.add_digests('data', ['data'], value_digest(data_batch).view(1))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing in this block: a pass of the step that is thrown away."""
        modules = replaced(self._recorder, recording=False) if isinstance(
            self._recorder, ModuleRecorder) else nullcontext()
        with replaced(self, _step=None), modules:
            yield

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._step is None or takes_closure(args, kwargs):
            return
        parameters = [tensor for group in optimizer.param_groups for tensor in group['params']]
        # an optimizer may step twice in an iteration, as in adversarial training
        times = self._seen.count(id(optimizer))
        self._seen.append(id(optimizer))
        self._step.add('gradients', [
            (f'{name}@{times}' if times else name, gradient)
            for name, gradient in gradients_of(self._names, parameters)])

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        step = self._step
        if step is None:
            return
        calls = self._recorder.stop() if self._recorder is not None else {}
        # hooks that are called later step the schedules
        lr = {name: [float(value).hex() for value in values]
              for name, values in runner.optim_wrapper.get_lr().items()}
        self._details = dict(lr=lr, **calls)
        model = unwrap(runner.model)
        if not self._seen:
            step.add('gradients', gradients_of(self._names, list(model.parameters())))
        step.add('parameters', [(name, value.data) for name, value in model.named_parameters()])
        step.add('buffers', list(model.named_buffers()))
        step.add('optimizer', named_state(self._names, runner.optim_wrapper))
        losses = {name: value for name, value in (outputs or {}).items() if _is_number(value)}
        step.add_numbers('losses', list(losses), list(losses.values()))
        if self.level == 'parameter':
            names, parameters = zip(*model.named_parameters())
            step.add_numbers(schema.NORMS, names, torch._foreach_norm([
                whole_tensor(parameter.data) for parameter in parameters]))

    def end_iteration(self, runner: Any) -> None:
        """Write the line of the iteration, when hooks have updated their averages."""
        step, self._step = self._step, None
        if step is not None:
            step.add('averages', named_averages(runner.hooks))
            self._write(schema.STEP, **self._line(runner, step.fetch()))

    def _line(self, runner: Any, content: Fetched) -> dict[str, Any]:
        """Return the line of an iteration."""
        details: dict[str, Any] = {}
        if self.level != 'step':
            details[schema.BY_NAME] = {state: content.by_name(state) for state in schema.STATES}
        if self.level == 'parameter':
            details[schema.NORMS] = content.floats(schema.NORMS)
        loader_position = position_of_loader(runner.train_dataloader)
        drawn = loader_position.current if loader_position is not None else None
        return dict(iteration=runner.iter, epoch=runner.epoch,
                    batch=dict(positions=_positions(drawn),
                               indices=[*map(plain, drawn or ())] or None,
                               data=content.by_name('data')['data']),
                    losses=content.floats('losses'),
                    **{state: content.combined(state) for state in schema.STATES},
                    **self._details, **details, **self.extra(runner))

    def extra(self, runner: Any) -> dict[str, Any]:
        """Return further fields of an iteration's line; comparisons ignore them."""
        return {}

    def _write(self, kind: str, **values: Any) -> None:
        if self._writer is not None:
            self._writer.write(dict(kind=kind, **values))

    def after_val_epoch(self, runner: Any, metrics: dict[str, float] | None = None) -> None:
        if metrics:
            self._write_metrics(runner, metrics)

    def _write_metrics(self, runner: Any, metrics: Mapping[str, Any], **more: Any) -> None:
        self._write(schema.VAL, iteration=runner.iter, epoch=runner.epoch, metrics={
            name: float(value).hex() for name, value in metrics.items() if _is_number(value)},
            **more)

    def after_train(self, runner: Any) -> None:
        self.record_variables()
        counts = self_checks(runner)
        checks = {schema.SELF_CHECKS: counts} if counts else {}
        self._write(schema.END, iteration=runner.iter, **checks)
        if self.manifest is not None:
            complete_manifest(self.manifest, checks)
        self.close()

    def close(self) -> None:
        """Close the file and remove the recorders; may be called at any time."""
        self._in_training.close()
        self._recorder = self._writer = None


class _EndOfIteration(Hook):
    """Calls :meth:`FingerprintHook.end_iteration`, at another priority."""

    def __init__(self, fingerprints: FingerprintHook) -> None:
        self._fingerprints = fingerprints

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: dict[str, Any] | None = None) -> None:
        self._fingerprints.end_iteration(runner)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    if isinstance(value, (int, float)):
        return True
    with suppress(Exception):  # of an array of several numbers, or whatever a class raises
        return hasattr(value, '__float__') and isinstance(float(value), float)
    return False


def _positions(batch: tuple[Any, ...] | None) -> list[int] | None:
    positions: list[Any] = [getattr(index, 'position', None) for index in batch or ()]
    return positions if positions and None not in positions else None
