"""Write checkpoints: gather state of all ranks, add what a resume needs, write the file whole."""
from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial as partial_call
from typing import Any, Callable

from mmengine.dist import get_world_size, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.runner import runner as mmengine_runner

from .. import seeds
from ..config import RandomnessConfig
from ..data import unfinished
from ..data.passes import CountedIterator
from ..distributed.unwrap import ema_hooks, unwrap
from ..errors import RandomnessError, TrainingError
from ..objects.digests import exact_digest
from ..util.files import partial_of
from ..util.scoped import replaced
from ..util.text import listed
from ..version import __version__
from ..virtual import gathered_weights
from . import fit, rank_state
from .files import replace_with, write_content
from .fit import MovingParts, lacks, left_out
from .safe_loading import check_readable

# settings of CheckpointHook that take from its files what a resumed run needs
LEFT_OUT = ('save_optimizer', 'save_param_scheduler')


def _write_remote(write: Callable[..., None], checkpoint: Any, filename: str,
                  *args: Any, **options: Any) -> None:
    """Write as MMEngine does; the error of a file backend names the file."""
    try:
        write(checkpoint, filename, *args, **options)
    except Exception as error:  # clients of object stores have classes of their own
        raise TrainingError(f'checkpoint {filename} cannot be written '
                            f'({type(error).__name__}: {error})') from error


@dataclass
class _Save:
    """State of a checkpoint between :meth:`CheckpointWriter.write` and its `complete`."""
    local: dict[str, dict[str, Any]] = field(default_factory=dict)  # state of this rank
    ranks: dict[int, dict[str, dict[str, Any]]] = field(default_factory=dict)  # where ranks differ
    missing: list[str] = field(default_factory=list)  # attributes to keep that objects do not have
    resumable: bool = True  # a run can continue from it
    given: frozenset[str] = frozenset()  # names in the `meta` of who saves it


class CheckpointWriter:
    """Writes the checkpoints of one runner.

    Args:
        stock_streams: the run has MMEngine's own streams: its checkpoints hold what MMEngine's do.
    """

    def __init__(self, stock_streams: bool) -> None:
        self._stock_streams = stock_streams
        self.loaders: weakref.WeakSet[Any] = weakref.WeakSet()  # all training loaders of the runner
        self._began: tuple[int, int] | None = None  # an epoch, the iteration at which it began
        self._passes = 0  # over the data that have ended in this epoch
        self._validated: int | None = None  # iterations before the last completed validation
        self._metrics: Mapping[str, Any] | None = None
        self._named: set[str] = set()  # loaders and attributes that a warning has named
        self._save: _Save | None = None
        self._moving = MovingParts()

    def check_hooks(self, runner: Any) -> None:
        """Warn at the start of a training about state that no checkpoint will hold.

        Raises:
            RandomnessError: for more than one EMAHook.
        """
        averages = [f'{type(hook).__name__}({hook.ema_cfg})' for hook in ema_hooks(runner.hooks)]
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
        loaders = [loader for loader in self.loaders if loader is not runner.train_dataloader]
        for name in unfinished(loaders):
            if name in self._named:
                continue
            self._named.add(name)
            runner.logger.warning(
                f'a loader of {name}, which is not that of the training loop, is in the middle '
                'of a pass: checkpoints do not hold its position, and a resumed run begins that '
                'pass again')

    def _left_out(self, runner: Any, state_dict: Mapping[str, Any]) -> dict[str, str]:
        """Return digests of the weights that the file will not have; warn of them once."""
        weights = left_out(unwrap(runner.model), state_dict)
        if weights and 'state_dict' not in self._named:
            self._named.add('state_dict')
            runner.logger.warning(
                f'{len(weights)} weights of the model are not in the checkpoint '
                f'({listed([*weights])}): a run resumes from it only if its model has them when it '
                'is built. load_from is not loaded then')
        return {name: exact_digest(value) for name, value in weights.items()}

    def _name_missing(self, runner: Any, missing: Sequence[str]) -> None:
        """Warn of attributes to keep that do not exist: a typing error, or they come later."""
        for name in dict.fromkeys(missing):
            if name not in self._named:
                self._named.add(name)
                runner.logger.warning(
                    f'{name}: checkpoints shall keep this attribute (mmrepro.keep_attributes), and '
                    'it does not exist. If it gets another value before the next checkpoint, '
                    'create it in __init__')

    def begin_iteration(self, runner: Any, batch: int) -> None:
        """Note the iteration at which the epoch began; its batch number ``batch`` comes next."""
        epoch, iteration = runner.epoch, runner.iter
        if is_main_process() and not self._stock_streams:
            self._moving.begin_iteration(runner)
        if self._began is None or self._began[0] != epoch:
            self._passes = 0
        elif batch == 0 and iteration > self._began[1] + 1:
            self._passes += 1  # a loop of the user's
        self._began = epoch, iteration - batch

    @contextmanager
    def validated(self, iteration: int, metrics: Any) -> Iterator[None]:
        """Call the hooks at the end of a validation in this block.

        Checkpoints that are written in it hold the metrics: some hooks have not seen them yet.
        """
        self._validated = iteration
        with replaced(self, _metrics=metrics):
            yield

    def write(self, runner: Any, stock: Callable[..., None], out_dir: str, filename: str,
              *args: Any, **kwargs: Any) -> bool:
        """Let ``stock`` write a checkpoint; all ranks call this, rank 0 writes.

        On a local disk the file appears whole, with a digest, or not at all.

        Returns:
            Whether a run can continue from it, as far as this rank knows.
        """
        save = _Save(given=frozenset(kwargs.get('meta') or {}))
        if not self._stock_streams and get_world_size() > 1:
            save.local = rank_state.local_state(runner, save.missing)
            save.ranks = rank_state.gather(save.local)
        # not kept: it refers to gradients, and may be large
        is_local = not ('://' in out_dir or kwargs.get('backend_args')
                        or kwargs.get('file_client_args'))
        with replaced(self, _save=save), \
                gathered_weights(runner, out_dir if is_local else None) as let_go:
            if is_main_process() and is_local:
                self._write(save, stock, let_go, out_dir, filename, *args, **kwargs)
            elif is_main_process():
                with replaced(mmengine_runner, save_checkpoint=partial_call(
                        _write_remote, mmengine_runner.save_checkpoint)):
                    stock(out_dir, filename, *args, **kwargs)
        return save.resumable

    def _write(self, save: _Save, stock: Callable[..., None], let_go: Callable[[], None],
               out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        unfinished = partial_of(filename)
        partial = os.path.join(out_dir, unfinished)
        try:
            with replaced(mmengine_runner, save_checkpoint=partial_call(
                    write_content, let_go=let_go)):
                stock(out_dir, unfinished, *args, **kwargs)
            replace_with(partial, os.path.join(out_dir, filename), save.resumable)
        finally:
            if os.path.exists(partial):
                os.remove(partial)

    def set_position(self, meta: dict[str, Any], epoch: int, iteration: int) -> None:
        """Say in a file's ``meta`` where the run is, unless who saves it has said so.

        MMEngine takes it for the end of an epoch, or of an iteration (``by_epoch=False``), wherever
        ``Runner.save_checkpoint`` is called: a run that resumed would leave out what is between.
        """
        if self._stock_streams or self._save is None:
            return
        for name, value in dict(epoch=epoch, iter=iteration).items():
            if name not in self._save.given:
                meta[name] = value

    def complete(self, runner: Any, checkpoint: dict[str, Any], config: RandomnessConfig,
                 facts: Mapping[str, Any]) -> None:
        """Add the state that a resume needs to MMEngine's ``checkpoint``; on rank 0, before
        writing.

        Raises:
            CheckpointError: no run could read it again; names the value.
        """
        checkpoint['meta']['mmrepro'] = {
            'version': __version__,
            'scheme': seeds.SCHEME,
            'randomness': config.as_dict(),
            'world_size': get_world_size(),
            'facts': facts,
            'schedules': bool(runner.param_schedulers),
        }
        save = self._save or _Save()
        save.resumable = lacks(checkpoint) is None
        if self._stock_streams:
            return
        self._name_unfinished(runner)
        self._moving.look_again()
        local = save.local or rank_state.local_state(runner, save.missing)
        self._name_missing(runner, save.missing)
        rank_state.publish(runner, save.ranks, checkpoint['state_dict'])
        checkpoint['mmrepro'] = dict(
            attributes=local['attributes'],
            gradients=rank_state.on_cpu(local['gradients']),
            buffers=rank_state.on_cpu(rank_state.unsaved_buffers(runner)),
            order=local['order'],
            # the file has everything else of rank 0 anyway
            ranks={rank: state if rank else dict(buffers=state['buffers'])
                   for rank, state in save.ranks.items()},
            counts=rank_state.counts(runner),
            takes_buffers=rank_state.takes_buffers(runner),
            parts=fit.parts_of(runner),
            moving=sorted(self._moving.names),
            left_out=self._left_out(runner, checkpoint['state_dict']),
            passes=self._passes if self._began and self._began[0] == runner.epoch else 0,
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

    def _cursor(self, runner: Any, meta: Mapping[str, Any]) -> tuple[int, int]:
        iterator = getattr(runner.train_loop, 'dataloader_iterator', None)
        if isinstance(iterator, CountedIterator):
            return iterator.cursor
        epoch, began = self._began or (None, 0)
        return meta['epoch'], meta['iter'] - began if meta['epoch'] == epoch else 0
