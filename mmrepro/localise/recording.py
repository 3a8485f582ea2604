"""Record one iteration of a run: data, operators, hooks, and the state in between.

Recording reads and never writes: it draws no random number and changes no bit of the training.
"""
from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from torch.utils._python_dispatch import _disable_current_modes

from ..data import placement_of
from ..distributed.unwrap import unwrap
from ..fingerprint.operator_recorder import OperatorRecorder
from ..fingerprint.records import Record, read_records, write_records
from ..runs.stopping import StopTraining
from . import run_state
from .sample_recorder import Samples, leaves, read_samples

__all__ = ['Plan', 'attach', 'read_stream']

# what hooks do between two training steps; the iterations of a validation change no weights
HOOK_METHODS = (
    'before_train_epoch', 'before_train_iter', 'after_train_iter', 'after_train_epoch',
    'before_val', 'before_val_epoch', 'after_val_epoch', 'after_val', 'before_save_checkpoint',
    '_before_epoch', '_before_iter', '_after_iter', '_after_epoch')
OWN = 'mmrepro.'  # package of the hooks that draw and write nothing of the training's
ATTACHED_PRIORITY = 0  # before_train has to come before anything that could train


class Plan(NamedTuple):
    """What to do in one run of one side.

    Attributes:
        folder: where the files go; it exists.
        stop: the run ends after this iteration, counted from 0.
        record: iteration to record; None for none.
        wanted: places of the samples of that iteration, in any epoch; None records all samples.
        keep: rank -> number of an operator's record whose tensors are written as well.
    """
    folder: str
    stop: int
    record: Optional[int] = None
    wanted: Optional[Tuple[int, ...]] = None
    keep: Optional[Dict[int, int]] = None


def attach(runner: Any, plan: Plan) -> None:
    """Let a runner, before it trains, record what ``plan`` asks for and end where it says.

    The end is the exception :class:`StopTraining`, out of ``runner.train()``.
    """
    recording = _Recording(runner, plan)
    runner.register_hook(_Attached(recording), priority=ATTACHED_PRIORITY)
    if plan.record is not None:
        recording.watch_loaders()


def read_stream(folder: str, rank: int, *others: str) -> List[Record]:
    """All records of a side: samples of the batch first, then the iteration in its order.

    Args:
        others: folders of other sides, the samples of whose batches count as well: where a
            transform turns a sample down, the batch has another, and the one turned down may be
            what differs.
    """
    places = []
    for one in (folder, *others):
        with open(_batch(one, rank), encoding='utf-8') as file:
            places.append(json.load(file))
    samples = read_samples(folder, rank)
    if all(places):
        wanted = {f'sample {epoch}.{position}' for some in places for epoch, position in some}
        samples = [record for record in samples if record.path.split('/')[0] in wanted]
    return samples + read_records(_operators(folder, rank))


def _operators(folder: str, rank: int) -> str:
    return os.path.join(folder, f'operators.rank{rank}.jsonl')


def _batch(folder: str, rank: int) -> str:
    return os.path.join(folder, f'batch.rank{rank}.json')


class _Attached(Hook):
    """The loop exists from before_train on."""
    priority = ATTACHED_PRIORITY

    def __init__(self, recording: _Recording) -> None:
        self._recording = recording

    def before_train(self, runner: Any) -> None:
        self._recording.take_over(runner.train_loop)


class _Recording:
    """The work of :func:`attach`."""

    def __init__(self, runner: Any, plan: Plan) -> None:
        self._runner, self._plan = runner, plan
        self._recorder: Optional[OperatorRecorder] = None
        self._wrapped: List[Tuple[Hook, str]] = []

    def watch_loaders(self) -> None:
        """Record the transforms of the training data; before worker processes exist."""
        plan, runner = self._plan, self._runner
        wanted = None if plan.wanted is None else frozenset(plan.wanted)
        samples = Samples(plan.folder, get_rank(), wanted)
        build_loop, build_loader = runner.build_train_loop, runner.build_dataloader

        def watched_loader(*args: Any, **kwargs: Any) -> Any:
            loader = build_loader(*args, **kwargs)
            samples.instrument(loader.dataset)
            return loader

        def watched_loop(loop: Any) -> Any:
            runner.build_dataloader = watched_loader
            try:
                return build_loop(loop)
            finally:
                del runner.build_dataloader

        runner.build_train_loop = watched_loop

    def take_over(self, loop: Any) -> None:
        run_iter = loop.run_iter

        def recorded_run_iter(*args: Any) -> None:
            iteration = loop.iter
            with self._window(iteration, args[-1]):
                run_iter(*args)
            if iteration >= self._plan.stop:
                raise StopTraining

        loop.run_iter = recorded_run_iter
        if self._plan.record == loop.iter:
            self._start()

    @contextmanager
    def _window(self, iteration: int, batch: Any) -> Iterator[None]:
        """Hooks from the iteration before on, operators of the iteration itself."""
        record = self._plan.record
        if record is None or iteration < record - 1 or iteration > record:
            yield
            return
        if iteration < record:
            self._start()
            yield
            return
        recorder = self._recorder
        self._write_batch()
        self._state('start', '', 'state before the iteration')
        recorder.attributes(run_state.attributes(self._runner))
        recorder.note('data', 'batch', 'batch', leaves(batch))
        with recorder:
            yield
        self._state('start', '', 'state after the iteration')
        self._finish()

    def _write_batch(self) -> None:
        """The places of the samples of this batch: workers have loaded others already."""
        placement = placement_of(self._runner.train_dataloader)
        drawn = placement.drawn[0] if placement is not None and placement.drawn else ()
        places = [[index.epoch, index.position] for index in drawn if hasattr(index, 'position')]
        with open(_batch(self._plan.folder, get_rank()), 'w', encoding='utf-8') as file:
            json.dump(places or None, file)

    def _start(self) -> None:
        if self._recorder is None:
            keep = (self._plan.keep or {}).get(get_rank())
            self._recorder = OperatorRecorder(unwrap(self._runner.model), keep)
            self._wrap_hooks()

    def _finish(self) -> None:
        for hook, name in self._wrapped:
            delattr(hook, name)
        write_records(_operators(self._plan.folder, get_rank()), self._recorder.records())
        if self._recorder.kept:
            torch.save(self._recorder.kept,
                       os.path.join(self._plan.folder, f'kept.rank{get_rank()}.pt'))

    def _state(self, phase: str, path: str, name: str) -> None:
        with _disable_current_modes():
            self._recorder.note(phase, path, name, run_state.tensors(self._runner),
                                run_state.scalars(self._runner))

    def _wrap_hooks(self) -> None:
        for hook in self._runner.hooks:
            for name in HOOK_METHODS:
                if not type(hook).__module__.startswith(OWN) and _overrides(hook, name):
                    setattr(hook, name, self._wrap(hook, name, getattr(hook, name)))
                    self._wrapped.append((hook, name))

    def _wrap(self, hook: Hook, name: str, method: Callable) -> Callable:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get('mode', 'train') != 'train':
                return method(*args, **kwargs)
            path = f'{type(hook).__name__}.{name}'
            if not self._recorder.at_note:
                self._state('hook', path, 'state before the hook')
            self._recorder.within_hook(path)
            result = method(*args, **kwargs)
            self._recorder.within_hook('')
            self._state('hook', path, 'state after the hook')
            return result

        return recorded


def _overrides(hook: Hook, name: str) -> bool:
    return getattr(type(hook), name, None) is not getattr(Hook, name, None)
