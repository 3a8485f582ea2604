"""``ReproRunner``: MMEngine's Runner whose randomness depends on the seed and the position only."""
from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mmengine.dist import get_rank, get_world_size, is_distributed
from mmengine.registry import RUNNERS
from mmengine.runner import BaseLoop, Runner
from torch.utils.data import DataLoader

from . import determinism, ops, patches, seeds
from .checkpoint.evaluated import EvaluatedModel
from .checkpoint.files import local_loading
from .checkpoint.format_cache import cache_formatted_texts
from .checkpoint.resuming import Resume
from .checkpoint.saving import Save
from .checkpoint.starts import Starts
from .config import RandomnessConfig, named_arguments, prepare_cfg
from .data import training_thread
from .data.loader import (
    StaticOnClass,
    adopt_loader,
    build_loader,
    check_loader_object,
    one_by_one,
    shuffled_subset,
)
from .distributed import agreement, process_group
from .distributed.lost_ranks import naming_lost_ranks
from .distributed.root_seed import broadcast_seed
from .distributed.virtual.runner_parts import settings_on_ranks, share_workers
from .distributed.virtual.scheduler import current
from .facts.collect import collect_facts
from .facts.training_data import training_facts
from .fingerprint.sample_replay import explain
from .hooks import SeedHook
from .hooks.flag_watch import FlagWatch
from .hooks.preempt import handling
from .hooks.standard import hooks_of
from .text import numbered
from .version import __version__

__all__ = ['ReproRunner', 'ReproRunnerMixin']

_ARGUMENTS = tuple(inspect.signature(Runner.__init__).parameters)[1:]


class ReproRunnerMixin:
    """Put this before a ``Runner`` subclass to make it reproducible.

    The ``randomness`` dict takes the keys of :class:`mmrepro.RandomnessConfig`.
    """
    _repro: RandomnessConfig | None = None
    _stream = 'sample'

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        settings, seeded = named_arguments(super().__init__, _ARGUMENTS, args, kwargs)
        given = settings_on_ranks(settings)
        self.resuming = Resume(settings, given.resume_strict)
        settings.update(self.resuming.settings)
        # before the model, the loaders and their workers are built from another seed
        self._repro = self.resuming.seeded(given)
        self.saving, self.starts = Save(self._repro.legacy), Starts(self._repro)
        self.evaluated = EvaluatedModel(self._repro.legacy)
        self._flag_watch = FlagWatch()
        cache_formatted_texts()
        if seeded:
            settings.update(randomness=self._repro.as_dict())
        super().__init__(**settings)
        if hasattr(self, 'logger'):  # a subclass may leave Runner.__init__ out
            self.resuming.log(self.logger)
            self.logger.info(f'mmrepro {__version__}\n{self._repro.table()}\n\n{self._policy}')

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        return super().from_cfg(prepare_cfg(cfg))

    @property
    def repro(self) -> RandomnessConfig:
        """The randomness in effect, the seed included."""
        return self._repro

    def setup_env(self, env_cfg: dict) -> None:
        env_cfg = dict(env_cfg)
        asked = env_cfg.pop('cudnn_benchmark', None)  # MMEngine would set the flag
        self._cudnn_benchmark = asked if self._repro.cudnn_benchmark is None else \
            self._repro.cudnn_benchmark
        # before the first collective operation starts CUDA, which reads its variables once
        self._enable_policy(self._repro)
        process_group.ensure_process_group(self._launcher, **process_group.group_options(env_cfg))
        super().setup_env(env_cfg)
        # MMEngine names loggers and message hubs by it: a run of the same second would share them
        self._timestamp = numbered(self._timestamp, get_rank())

    def _enable_policy(self, config: RandomnessConfig) -> None:
        training_thread.claim(turns=config.virtual_ranks is not None, builds=True)
        self._policy = determinism.enable(cudnn_benchmark=self._cudnn_benchmark, **config.flags)

    def set_randomness(self, **randomness: Any) -> None:
        """Seed everything and set the flags, from the keys of :class:`RandomnessConfig`.

        Raises:
            RandomnessError: for a value that is not allowed, or one that a setting contradicts.
        """
        config = RandomnessConfig.parse(randomness)
        config = config.with_seed(broadcast_seed(config.seed))
        self._repro = config
        self._seed, self._deterministic = config.seed, bool(config.deterministic)
        # BaseLoop and resume() read this dict; the effective values belong into config and dumps
        self._randomness_cfg = config.as_dict()
        self.cfg['randomness'] = config.as_dict()
        self._enable_policy(config)
        seeds.set_root(config.root)
        self._prepare_packages()
        self.facts = collect_facts(self.cfg, config.as_dict(), get_world_size())
        self.resuming.differences = self.resuming.compare(self.facts, config.resume_strict)
        if is_distributed():
            agreement.check_agreement(agreement.start_fields(
                self.cfg.pretty_text, config.as_dict()))
        if config.legacy:
            from mmengine.runner.utils import set_random_seed
            self._seed = set_random_seed(config.seed, diff_rank_seed=config.diff_rank_seed)
        self._seed_init()

    def _seed_init(self) -> None:
        if not self._repro.legacy:
            seeds.seed_all(self._repro.root, 'init', 'model',
                           *((get_rank(),) if self._repro.diff_rank_seed else ()))

    def _prepare_packages(self) -> None:
        """Make MMDetection, mmcv and others keep the contract, from their import on."""
        patches.apply(legacy=self._repro.legacy)
        provider = 'auto' if self._repro.deterministic else None
        ops.use_from_import(self._repro.operators or provider)

    def register_hooks(self, *args: Any, **kwargs: Any) -> None:
        super().register_hooks(*args, **kwargs)
        for hook in hooks_of(self._repro, get_rank(), self.hooks):
            self.register_hook(hook, priority=hook.priority)
        self._seeds = next(hook for hook in self.hooks if isinstance(hook, SeedHook))

    def _hold(self) -> None:
        """Put the settings of this runner in force: another one may have been built since.

        Flags and the root seed belong to the process, and the last runner that was built set them.
        """
        training_thread.claim(turns=self._repro.virtual_ranks is not None)
        if determinism.in_force() is not self._policy:
            self._enable_policy(self._repro)
            seeds.set_root(self._repro.root)
            self._prepare_packages()

    def train(self) -> Any:
        self._hold()
        if self._repro.deterministic is True:
            determinism.check_compiled(self.model, self.cfg.get('compile'))
        with self._waiting_for_ranks(), handling(self), self.starts.training(self):
            return super().train()

    def val(self) -> Any:
        with self._waiting_for_ranks():
            return super().val()

    def test(self) -> Any:
        with self._waiting_for_ranks():
            return super().test()

    def _waiting_for_ranks(self) -> AbstractContextManager[None]:
        # virtual ranks: all that they do is in one such block
        return nullcontext() if current() is not None else naming_lost_ranks(f'rank {get_rank()}')

    def load_or_resume(self) -> None:
        self.starts.load(self, super().load_or_resume)

    def build_model(self, model: Any) -> Any:
        # what the logger and the visualisers draw before must not show in the initial weights
        self._seed_init()
        return self.starts.build_model(self, super().build_model, model)

    def _init_model_weights(self) -> None:
        self.starts.initialise(self, super()._init_model_weights)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        self._hold()  # a hook may have built a runner of its own
        if fn_name == 'before_train_iter':
            self._flag_watch.step(self._repro.deterministic is True, self.logger)
        with self.saving.event(fn_name, self.iter, kwargs.get('metrics')), \
                self.evaluated.event(fn_name, self):
            super().call_hook(fn_name, **kwargs)
        self._seeds.follow(fn_name, self, kwargs.get('batch_idx'))

    def wrap_model(self, model_wrapper_cfg: dict | None, model: Any) -> Any:
        return process_group.wrap_model(self, super().wrap_model, model_wrapper_cfg, model,
                                        ordered=self._repro.deterministic is True)

    @property
    def iter(self) -> int:
        # MMEngine's builds the training loop, and loads its dataset, for a validation alone
        return self._train_loop.iter if isinstance(self._train_loop, BaseLoop) else 0

    @property
    def epoch(self) -> int:  # likewise
        return self._train_loop.epoch if isinstance(self._train_loop, BaseLoop) else 0

    def build_train_loop(self, loop: Any) -> Any:
        if isinstance(loop, BaseLoop) and loop is self.resuming.loop:
            return loop
        loop = self._build_loop(super().build_train_loop, loop, 'sample', self._train_dataloader)
        found = {**training_facts(loop.dataloader.dataset), **agreement.late_fields()}
        self.facts.update(found)
        for line in self.resuming.compare_data(found, self._repro.resume_strict):
            self.logger.warning(line)
        self.resuming.continue_loop(loop)
        return loop

    def build_val_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_val_loop, loop, 'val', self._val_dataloader)

    def build_test_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_test_loop, loop, 'test', self._test_dataloader)

    def _build_loop(self, build: Any, loop: Any, stream: str, loader: Any) -> Any:
        self._hold()
        if not isinstance(loader, (dict, type(None))) and not self._repro.legacy:
            # the loop takes a loader object as it is
            check_loader_object(loader, stream, self._train_dataloader)
            one_by_one(loader, stream, self._repro)
            self._adopt(loader, stream, loader.worker_init_fn)
        self._stream = stream
        try:
            return build(loop)
        finally:
            self._stream = type(self)._stream

    @StaticOnClass
    def build_dataloader(self, dataloader: DataLoader | dict, seed: int | None = None,
                         diff_rank_seed: bool = False) -> DataLoader:
        """As MMEngine's, with samplers, samples and workers keyed by the root seed."""
        if self._repro.legacy:
            return super().build_dataloader(dataloader, seed, diff_rank_seed)
        if isinstance(dataloader, DataLoader):
            return dataloader
        dataloader = one_by_one(dataloader, self._stream, self._repro)
        loader = build_loader(super().build_dataloader, share_workers(dataloader),
                                       self._repro.root, self._stream)
        user_init = loader.worker_init_fn if 'worker_init_fn' in dataloader else None
        self._adopt(loader, self._stream, user_init)
        return loader

    def _adopt(self, loader: DataLoader, stream: str, user_init: Any) -> None:
        adopt_loader(loader, self._repro, stream, get_rank(), user_init,
                     patches.apply, explain)
        if stream == 'sample':
            self.saving.loaders.add(loader)
        warning = shuffled_subset(loader.dataset)
        if warning:
            self.logger.warning(warning)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> dict:
        with local_loading(self.resuming.read):
            return super().load_checkpoint(filename, *args, **kwargs)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """As MMEngine's, but all ranks call it, and the file appears whole or not at all."""
        with self.evaluated.suspended():
            self.saving.write(self, super().save_checkpoint, out_dir, filename, *args, **kwargs)


@RUNNERS.register_module()
class ReproRunner(ReproRunnerMixin, Runner):
    """MMEngine's Runner, reproducible."""
