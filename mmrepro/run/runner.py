"""``ReproRunner``: MMEngine's Runner whose randomness depends on the seed and the position only."""
from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Callable

import mmengine.config.config as mmengine_config
from mmengine.dist import get_rank
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, Runner
from torch.utils.data import DataLoader

from .. import patches, virtual
from ..checkpoint.choosing import is_written
from ..checkpoint.files import without_code
from ..checkpoint.resuming import check_ranks
from ..config import RandomnessConfig, for_process, prepare_cfg
from ..data.data_errors import naming_dataset
from ..data.loader import (
    StaticOnClass,
    adopt_loader,
    build_loader,
    check_loader_object,
    one_by_one,
    shuffled_subset,
)
from ..distributed import process_group
from ..distributed.agreement import broadcast_seed
from ..distributed.lost_ranks import naming_lost_ranks
from ..distributed.scheduler import current
from ..selfcheck.sample_replay import explain
from ..util.scoped import replaced
from ..util.text import numbered
from .lifecycle import RunLifecycle

if TYPE_CHECKING:
    from mmengine.runner import Runner as _Base
else:
    _Base = object

# stream -> argument that is its loader
ARGUMENTS = dict(sample='train_dataloader', val='val_dataloader', test='test_dataloader')
_ARGUMENTS = tuple(inspect.signature(Runner.__init__).parameters)[1:]


class ReproRunnerMixin(_Base):
    """Put this before a ``Runner`` subclass to make it reproducible.

    The ``randomness`` dict takes the keys of :class:`mmrepro.RandomnessConfig`.

    Attributes:
        lifecycle: what mmrepro does at each moment of the run.
    """
    _stream = 'sample'  # of the loop that is being built
    _timestamp: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings, seeded = _named_arguments(super().__init__, _ARGUMENTS, args, kwargs)
        if seeded:
            settings['randomness'] = for_process(settings.get('randomness'))
        self.lifecycle = RunLifecycle(settings, vars(type(self)).get('_mmrepro_of', type(self)))
        cache_formatted_texts()
        if seeded:
            settings.update(randomness=self.repro.as_dict())
        super().__init__(**settings)
        if hasattr(self, 'logger'):  # a subclass may leave Runner.__init__ out
            self.lifecycle.built(self.logger, self.hooks)

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        return super().from_cfg(prepare_cfg(cfg))

    @property
    def repro(self) -> RandomnessConfig:
        """The randomness in effect, the seed included."""
        return self.lifecycle.config

    def setup_env(self, env_cfg: dict[str, Any]) -> None:
        env_cfg = dict(env_cfg)
        # before the first collective operation starts CUDA, which reads its variables once; and
        # MMEngine would set the flag
        self.lifecycle.process.set_flags(env_cfg.pop('cudnn_benchmark', None))
        process_group.ensure_process_group(self._launcher, env_cfg)
        super().setup_env(env_cfg)
        # MMEngine names loggers and message hubs by it: a run of the same second would share them
        self._timestamp = numbered(self._timestamp, get_rank())

    def set_randomness(self, **randomness: Any) -> None:
        """Seed everything and set the flags, from the keys of :class:`RandomnessConfig`.

        Raises:
            RandomnessError: for a value that is not allowed, or one that a setting contradicts.
        """
        config = RandomnessConfig.parse(randomness)
        check_ranks(self.lifecycle.resume)  # before the seed, which a checkpoint has as well
        config = config.with_seed(broadcast_seed(config.seed))
        self._seed, self._deterministic = config.seed, bool(config.deterministic)
        # BaseLoop and resume() read this dict; the effective values belong into config and dumps
        self._randomness_cfg = config.as_dict()
        self.cfg['randomness'] = config.as_dict()
        self.lifecycle.set_seed(config, self.cfg)
        if config.uses_stock_streams:
            from mmengine.runner.utils import set_random_seed
            self._seed = set_random_seed(config.seed, diff_rank_seed=config.diff_rank_seed)
        self.lifecycle.seed('init', 'model')

    def register_hooks(self, *args: Any, **kwargs: Any) -> None:
        super().register_hooks(*args, **kwargs)
        for hook in self.lifecycle.hooks(self.hooks):
            self.register_hook(hook, priority=hook.priority)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        with self.lifecycle.event(fn_name, self, kwargs):
            super().call_hook(fn_name, **kwargs)

    def train(self) -> Any:
        with self._waiting_for_ranks(), self.lifecycle.training(self):
            return super().train()

    def val(self) -> Any:
        with self._waiting_for_ranks():
            return super().val()

    def test(self) -> Any:
        with self._waiting_for_ranks():
            return super().test()

    def _waiting_for_ranks(self) -> AbstractContextManager[None]:
        # all of what virtual ranks do is in one such block
        return nullcontext() if current() is not None else naming_lost_ranks(f'rank {get_rank()}')

    def load_or_resume(self) -> None:
        self.lifecycle.start.load(self, super().load_or_resume)

    def build_model(self, model: Any) -> Any:
        self.lifecycle.seed('init', 'model')  # again: loggers and visualizers may have drawn
        return self.lifecycle.start.build_model(super().build_model, model, self.logger)

    def _init_model_weights(self) -> None:
        self.lifecycle.start.initialize(self, super()._init_model_weights)

    def wrap_model(self, model_wrapper_cfg: dict[str, Any] | None, model: Any) -> Any:
        if current() is not None:
            return virtual.wrap_model(self, model_wrapper_cfg, model)
        return process_group.wrap_model(super().wrap_model, model_wrapper_cfg, model,
                                        ordered=self.repro.deterministic is True)

    @property
    def iter(self) -> int:
        # MMEngine builds the training loop and loads its dataset, for a validation alone too
        return self._train_loop.iter if isinstance(self._train_loop, BaseLoop) else 0

    @property
    def epoch(self) -> int:  # likewise
        return self._train_loop.epoch if isinstance(self._train_loop, BaseLoop) else 0

    def build_train_loop(self, loop: Any) -> Any:
        if isinstance(loop, BaseLoop) and loop is self.lifecycle.train_loop:
            return loop
        loop = self._build_loop(super().build_train_loop, loop, 'sample', self._train_dataloader)
        self.lifecycle.train_loop_built(self, loop)
        return loop

    def build_val_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_val_loop, loop, 'val', self._val_dataloader)

    def build_test_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_test_loop, loop, 'test', self._test_dataloader)

    def _build_loop(self, build: Any, loop: Any, stream: str, loader: Any) -> Any:
        self.lifecycle.process.hold()
        # loops of the user's own may validate or test with several
        several = isinstance(loader, (list, tuple)) and stream != 'sample'
        for each in loader if several else [loader]:
            if not isinstance(each, (dict, type(None))) and not self.repro.uses_stock_streams:
                self.key_loader(each, stream)
        with replaced(self, _stream=stream):
            return build(loop)

    def key_loader(self, loader: Any, stream: str) -> None:
        """Key a loader object, which a loop takes as it is."""
        check_loader_object(loader, stream, self._train_dataloader)
        one_by_one(loader, stream, self.repro)
        self._adopt(loader, stream, loader.worker_init_fn)

    @StaticOnClass
    def build_dataloader(self, dataloader: DataLoader[Any] | dict[str, Any],
                         seed: int | None = None, diff_rank_seed: bool = False
                         ) -> DataLoader[Any]:
        """Build a loader as MMEngine does; the root seed keys samplers, samples and workers."""
        if isinstance(dataloader, DataLoader):
            return dataloader
        with naming_dataset(ARGUMENTS[self._stream], dataloader, self.logger.warning,
                            current() is None) as built:
            loader = self._keyed_loader(dataloader, seed, diff_rank_seed)
            built.append(loader.dataset)
        return loader

    def _keyed_loader(self, dataloader: dict[str, Any], seed: int | None, diff_rank_seed: bool
                      ) -> DataLoader[Any]:
        if self.repro.uses_stock_streams:
            stock: DataLoader[Any] = super().build_dataloader(dataloader, seed, diff_rank_seed)
            return stock
        dataloader = one_by_one(dataloader, self._stream, self.repro)
        loader: DataLoader[Any] = build_loader(
            super().build_dataloader, virtual.share_workers(dataloader), self.repro.root,
            self._stream)
        user_init = loader.worker_init_fn if 'worker_init_fn' in dataloader else None
        self._adopt(loader, self._stream, user_init)
        return loader

    def _adopt(self, loader: DataLoader[Any], stream: str, user_init: Any) -> None:
        adopt_loader(loader, self.repro, stream, get_rank(), user_init,
                     patches.apply, explain)
        if stream == 'sample':
            self.lifecycle.checkpoints.loaders.add(loader)
        warning = shuffled_subset(loader.dataset)
        if warning:
            self.logger.warning(warning)

    def resume(self, *args: Any, **kwargs: Any) -> None:
        with replaced(self.lifecycle, resuming=True):
            super().resume(*args, **kwargs)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with without_code(self.lifecycle.restoration.read):
            checkpoint: dict[str, Any] = super().load_checkpoint(filename, *args, **kwargs)
        return checkpoint

    def dump_config(self) -> None:
        if not is_written(self.work_dir):  # the dump would replace the config of that run
            super().dump_config()

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """Save as MMEngine does; all ranks call this, and the file is whole or absent."""
        with self.lifecycle.evaluated.suspended():
            resumable = self.lifecycle.checkpoints.write(
                self, super().save_checkpoint, out_dir, filename, *args, **kwargs)
        self.lifecycle.saved(self, out_dir, filename, resumable, kwargs)


@RUNNERS.register_module()
class ReproRunner(ReproRunnerMixin, Runner):
    """MMEngine's Runner, reproducible."""


MAX_TEXTS = 4  # a run has one or two


def _named_arguments(function: Callable[..., Any], names: Sequence[str], args: Sequence[Any],
                     kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a call by name, and whether ``function`` takes ``randomness``.

    Arguments that it takes as ``*args`` get the ``names`` that it does not have.

    >>> _named_arguments(lambda model, **rest: None, [], [1], dict(randomness={}))
    ({'model': 1, 'randomness': {}}, True)
    >>> _named_arguments(lambda own, *rest: None, ['model', 'work_dir'], [1, 2, 3], {})
    ({'own': 1, 'model': 2, 'work_dir': 3}, False)
    """
    signature = inspect.signature(function)
    named: dict[str, Any] = {}
    for name, value in signature.bind_partial(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            named.update(zip([name for name in names if name not in named], value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named, 'randomness' in signature.parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD
        for parameter in signature.parameters.values())


def cache_formatted_texts() -> None:
    """Make MMEngine's formatter cache its results. May be called again.

    MMEngine formats a config twice at the start of a run, and again for every checkpoint. YAPF
    takes seconds for the config of a detector: too long when a scheduler has announced the end of a
    run and a checkpoint has to be written in time.
    """
    format_code = getattr(mmengine_config, 'FormatCode', None)
    if format_code is None or hasattr(format_code, '_mmrepro_texts'):
        return
    texts: dict[tuple[str, str], Any] = {}

    @functools.wraps(format_code)
    def cached(text: str, **style: Any) -> Any:
        key = text, repr(sorted(style.items()))
        if key not in texts:
            while len(texts) >= MAX_TEXTS:
                del texts[next(iter(texts))]
            texts[key] = format_code(text, **style)
        return texts[key]

    setattr(cached, '_mmrepro_texts', texts)  # noqa: B010
    mmengine_config.FormatCode = cached
