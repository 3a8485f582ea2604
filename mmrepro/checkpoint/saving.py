"""A save: gather the state of all ranks, add what a resume needs, write the file whole."""
from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable

from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import CheckpointHook, EMAHook

from .. import seeds
from ..data import unfinished
from ..data.cursor import CountedIterator
from ..errors import RandomnessError
from ..version import __version__
from . import evaluated, rank_state
from .completeness import check_readable, lacks
from .files import is_local, local_loading, replace_with

# settings of CheckpointHook that take from its files what a resumed run needs
LEFT_OUT = ('save_optimizer', 'save_param_scheduler')


class Save:
    """Writes the checkpoints of one runner.

    Args:
        legacy: the run keeps MMEngine's own streams: a checkpoint holds no more than MMEngine's.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._began: tuple[int, int] | None = None  # an epoch, the iteration at which it began
        self._validated: int | None = None  # iterations before the last completed validation
        self._metrics: Mapping[str, Any] | None = None
        self._own: dict[str, dict[str, Any]] | None = None
        self._ranks: dict[int, dict[str, dict[str, Any]]] = {}
        self._complete = True  # a run can continue from the checkpoint that is being written
        self.loaders: weakref.WeakSet = weakref.WeakSet()  # all training loaders of the runner
        self._named: set[str] = set()

    def check_hooks(self, runner: Any) -> None:
        """Say at the start what no checkpoint will hold.

        Raises:
            RandomnessError: for more than one EMAHook.
        """
        averages = [f'{type(hook).__name__}({hook.ema_cfg})' for hook in runner.hooks
                    if isinstance(hook, EMAHook)]
        if len(averages) > 1:
            raise RandomnessError(
                f'{" and ".join(averages)}: checkpoints hold one average of weights '
                '(ema_state_dict), and a validation leaves one in the model, which all of them '
                'swap with theirs. One EMAHook is allowed')
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook):
                left_out = [f'{name}=False' for name in LEFT_OUT if not getattr(hook, name)]
                if left_out:
                    runner.logger.warning(
                        f'{" and ".join(left_out)} of CheckpointHook: a run cannot be resumed '
                        'from such checkpoints, and automatic resume passes over them')

    def _name_unfinished(self, runner: Any) -> None:
        """Warn of loaders of hooks whose position no checkpoint holds."""
        others = [one for one in self.loaders if one is not runner.train_dataloader]
        for name in set(unfinished(others)) - self._named:
            self._named.add(name)
            runner.logger.warning(
                f'a loader of {name}, which is not that of the training loop, is in the middle '
                'of a pass: checkpoints do not hold its position, and a resumed run begins that '
                'pass again')

    def begin_iteration(self, epoch: int, iteration: int, batch: int) -> None:
        """Note where the epoch began: ``batch`` of it comes next."""
        self._began = epoch, iteration - batch

    @contextmanager
    def event(self, name: str, iteration: int, metrics: Any = None) -> Iterator[None]:
        """Call the hooks of an event in this block."""
        if name == 'after_train':  # CheckpointHook publishes: it loads what it has written
            with local_loading():
                yield
        elif name == 'after_val_epoch':
            # checkpoints that are written now hold the metrics: some hooks have not seen them yet
            self._validated, self._metrics = iteration, metrics
            try:
                yield
            finally:
                self._metrics = None
        else:
            yield

    def write(self, runner: Any, stock: Callable[..., None], out_dir: str, filename: str,
              *args: Any, **kwargs: Any) -> None:
        """Let ``stock`` write a checkpoint; all ranks call this, rank 0 writes.

        On a local disk the file appears whole, with a digest, or not at all.
        """
        if not self._legacy and get_world_size() > 1:
            self._own = rank_state.own_state(runner)
            self._ranks = rank_state.gather(self._own)
        try:
            if not is_main_process():
                return
            if not is_local(out_dir, kwargs):
                stock(out_dir, filename, *args, **kwargs)
                return
            partial = os.path.join(out_dir, f'.{filename}.partial')
            try:
                stock(out_dir, os.path.basename(partial), *args, **kwargs)
                replace_with(partial, os.path.join(out_dir, filename), self._complete)
            finally:
                if os.path.exists(partial):
                    os.remove(partial)
        finally:
            self._own, self._ranks = None, {}  # it refers to gradients, and may be large

    def complete(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Add to MMEngine's ``checkpoint`` what a resume needs; on rank 0, just before writing.

        Raises:
            CheckpointError: no run could read it again; names the value.
        """
        checkpoint['meta']['mmrepro'] = {
            'version': __version__,
            'scheme': seeds.SCHEME,
            'randomness': runner.repro.as_dict(),
            'world_size': get_world_size(),
            'facts': runner.facts,
            'schedules': bool(runner.param_schedulers),
        }
        self._complete = lacks(checkpoint) is None
        if self._legacy:
            return
        self._name_unfinished(runner)
        own = self._own or rank_state.own_state(runner)
        evaluated.publish(runner, self._ranks, checkpoint['state_dict'])
        checkpoint['mmrepro'] = dict(
            attributes=own['attributes'],
            gradients=rank_state.portable(own['gradients']),
            buffers=rank_state.portable(rank_state.unsaved_buffers(runner)),
            ranks=self._parts_of_ranks(),
            counts=rank_state.counts(runner),
            metrics=self._metrics,
            validated=self._validated)
        checkpoint['meta']['place'] = list(self._cursor(runner, checkpoint['meta']))
        schedulers = checkpoint.get('param_schedulers', [])
        for group in schedulers.values() if isinstance(schedulers, dict) else [schedulers]:
            for state in group:
                # OneCycle's has a function in it, which its class has anyway
                for name in [name for name, value in state.items() if callable(value)]:
                    del state[name]
        check_readable(checkpoint)

    def _parts_of_ranks(self) -> dict[int, dict[str, dict[str, Any]]]:
        # the file has everything else of rank 0 anyway
        return {rank: state if rank else dict(buffers=state['buffers'])
                for rank, state in self._ranks.items()}

    def _cursor(self, runner: Any, meta: Mapping[str, Any]) -> tuple[int, int]:
        iterator = getattr(runner.train_loop, 'dataloader_iterator', None)
        if isinstance(iterator, CountedIterator):
            return iterator.cursor
        epoch, began = self._began or (None, 0)
        return meta['epoch'], meta['iter'] - began if meta['epoch'] == epoch else 0
