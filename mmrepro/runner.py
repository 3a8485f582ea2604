"""``ReproRunner``: MMEngine's Runner whose randomness is a function of the seed and the place."""
from __future__ import annotations

import copy
import inspect
import os
import sys
from collections import Counter
from functools import cache
from typing import Any, Dict, List, Optional, Sequence, Set, Union

from mmengine.dist import get_rank, get_world_size, is_distributed, master_only
from mmengine.registry import RUNNERS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch.utils.data import DataLoader

from . import determinism, ops, patches, seeds
from .checkpoint import files, rank_state
from .checkpoint.format_cache import remember_layouts
from .checkpoint.resume_point import ResumePoint, find_point
from .config import RandomnessConfig, RandomnessError, refuse_misspelt, upgrade_legacy_keys
from .data import adopt_loader, placement_of
from .data.cursor import continue_epochs, continue_iterations, seek, where
from .distributed import agreement, process_group
from .distributed.root_seed import broadcast_seed
from .facts import compatibility
from .facts.collect import collect_facts
from .hooks import OperatorGuardHook, PreemptHook, ResumeHook, SeedHook, TurnSeedHook
from .hooks.preempt import handling
from .version import __version__

__all__ = ['ReproRunner', 'ReproRunnerMixin', 'prepare_cfg', 'reproducible_class']

_STARTED: Counter = Counter()  # runners of this process by the second in which they started

# methods that the mixin replaces: a Runner subclass with its own has to say how they combine
_OWN = ('set_randomness', 'build_dataloader')


class ReproRunnerMixin:
    """Put this before a ``Runner`` subclass to make it reproducible.

    The ``randomness`` dict takes the keys of :class:`mmrepro.RandomnessConfig`.
    """
    _repro: Optional[RandomnessConfig] = None
    _point: Optional[ResumePoint] = None
    _stream = 'sample'
    _differences: Sequence[str] = ()
    _passed: Sequence[str] = ()  # checkpoints that were not good enough to resume from
    _complete = True  # a run can go on from the checkpoint that is being written
    _validated: Optional[int] = None  # iterations before the last validation that was completed
    _steps = 0  # of training, in this process
    _metrics: Optional[Dict[str, Any]] = None  # of a validation that not all hooks have seen yet

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind_partial(*args, **kwargs)
        # MMEngine's default is one mutable dict for all runners of a process: never use it
        kwargs_of = dict(bound.arguments)
        extra = kwargs_of.pop('kwargs', {})
        given = RandomnessConfig.parse(kwargs_of.pop('randomness', None))
        if kwargs_of.get('resume'):
            self._point, self._passed = find_point(
                kwargs_of.get('load_from'), kwargs_of['work_dir'], given.resume_strict)
            if self._point is None and not files.is_remote(kwargs_of):
                kwargs_of['resume'] = False  # MMEngine would take what was passed over
        if self._point is not None:
            # before the model, the loaders and their workers are built from another seed
            given = self._point.seeded(given)
            kwargs_of['load_from'] = self._point.path
        self._repro = given
        self._said: Set[str] = set()
        remember_layouts()
        super().__init__(**kwargs_of, **extra, randomness=given.as_dict())
        for line in self._passed:
            self.logger.warning(line)
        if self._point is not None:
            self.logger.info('\n'.join([self._point.report, *self._differences]))
        self.logger.info(f'mmrepro {__version__}\n{self._repro.table()}\n\n{self._policy}')

    @classmethod
    def from_cfg(cls, cfg: Any) -> Any:
        return super().from_cfg(prepare_cfg(cfg))

    @property
    def repro(self) -> RandomnessConfig:
        """The randomness in effect, the seed included."""
        return self._repro

    def setup_env(self, env_cfg: Dict) -> None:
        if self._repro.cudnn_benchmark is not None:
            env_cfg = {**env_cfg, 'cudnn_benchmark': self._repro.cudnn_benchmark}
        self._cudnn_benchmark = env_cfg.get('cudnn_benchmark')
        # before the first collective operation starts CUDA, which reads its variables once
        self._enable_policy(self._repro)
        process_group.ensure_process_group(self._launcher, **process_group.group_options(env_cfg))
        super().setup_env(env_cfg)
        self._timestamp = _unused(self._timestamp)

    def _enable_policy(self, config: RandomnessConfig) -> None:
        self._policy = determinism.enable(
            config.deterministic, float32_precision=config.float32_precision,
            fill_uninitialized_memory=config.fill_uninitialized_memory,
            num_threads=config.num_threads, cudnn_enabled=config.cudnn_enabled,
            cudnn_benchmark=self._cudnn_benchmark)

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
        seeds.set_root(config.seed)
        self._prepare_packages()
        self._facts = collect_facts(self.cfg, config.as_dict(), get_world_size())
        self._differences = self._compare_with_point(self._facts)
        if is_distributed():
            agreement.check_agreement(agreement.start_fields(
                self.cfg.pretty_text, config.as_dict()))
        if config.legacy:
            from mmengine.runner.utils import set_random_seed
            self._seed = set_random_seed(config.seed, diff_rank_seed=config.diff_rank_seed)
        self._seed_init()

    def _seed_init(self) -> None:
        if not self._repro.legacy:
            seeds.seed_all(self._repro.seed, 'init', 'model',
                           *((get_rank(),) if self._repro.diff_rank_seed else ()))

    def _compare_with_point(self, facts: Dict[str, Any]) -> List[str]:
        """Lines for the log on what is other than in the run that is resumed.

        Raises:
            ResumeError: what changes bits differs, unless ``resume_strict=False``.
        """
        if self._point is None or not self._point.facts:
            return []
        then = self._point.facts
        if not self._point.written_by:  # stock MMEngine: settings are all that is known
            facts = {name: value for name, value in facts.items() if name.startswith('config.')}
        exact = self._repro.resume_strict and bool(self._point.written_by)
        return compatibility.check(self._point.path, then, facts, exact)

    def _prepare_packages(self) -> None:
        """Make MMDetection and mmcv keep the contract, when the run uses them."""
        if 'mmdet' in sys.modules or self.cfg.get('default_scope') == 'mmdet':
            patches.apply(legacy=self._repro.legacy)
            if self._repro.operators or self._repro.deterministic:
                ops.use(self._repro.operators or 'torch')

    def register_hooks(self, *args: Any, **kwargs: Any) -> None:
        super().register_hooks(*args, **kwargs)
        turn = TurnSeedHook(self._repro, get_rank())
        self.register_hook(turn, priority=turn.priority)
        last = SeedHook(self._repro, get_rank(), turn)
        self.register_hook(last, priority=last.priority)
        if not self._repro.legacy:
            self.register_hook(ResumeHook(), priority=ResumeHook.priority)
        if self._repro.deterministic and not any(
                isinstance(hook, OperatorGuardHook) for hook in self.hooks):
            self.register_hook(OperatorGuardHook(), priority=OperatorGuardHook.priority)
        if not any(isinstance(hook, PreemptHook) for hook in self.hooks):
            self.register_hook(PreemptHook(), priority=PreemptHook.priority)

    def _hold(self) -> None:
        """Put the settings of this runner in force: another one may have been built since.

        Flags and the root seed belong to the process, and the last runner that was built set them.
        """
        if determinism.in_force() is not self._policy:
            self._enable_policy(self._repro)
            seeds.set_root(self._repro.seed)
            self._prepare_packages()

    def _check_flags(self) -> None:
        """Refuse a step under flags that somebody else has changed.

        Raises:
            DeterminismError: under ``deterministic=True``; otherwise it is a warning, once.
        """
        found = determinism.drifted()
        if not found:
            return
        text = '\n'.join(
            f'{flag.name} is {flag.after!r}; this run has set {flag.before!r} and needs it '
            f'({flag.why}). A hook, a module or a data set has changed it; it must put it back'
            for flag in found)
        if self._repro.deterministic is True:
            raise determinism.DeterminismError(text)
        if text not in self._said:
            self._said.add(text)
            self.logger.warning(text)

    def train(self) -> Any:
        self._hold()
        with handling(self):
            return super().train()

    def val(self) -> Any:
        self._hold()
        return super().val()

    def test(self) -> Any:
        self._hold()
        return super().test()

    def build_model(self, model: Any) -> Any:
        # what the logger and the visualisers draw before must not show in the initial weights
        self._seed_init()
        return super().build_model(model)

    def call_hook(self, fn_name: str, **kwargs: Any) -> None:
        self._hold()  # a hook may have built a runner of its own
        if fn_name == 'before_train_iter':
            self._steps += 1
            if not self._steps & (self._steps - 1):  # 1, 2, 4, ...: what hooks do late is seen too
                self._check_flags()
        if fn_name != 'after_val_epoch':
            super().call_hook(fn_name, **kwargs)
            return
        # every checkpoint that a hook saves in there knows the metrics
        self._validated, self._metrics = self.iter, kwargs.get('metrics')
        try:
            super().call_hook(fn_name, **kwargs)
        finally:
            self._metrics = None

    def wrap_model(self, model_wrapper_cfg: Optional[Dict], model: Any) -> Any:
        # a sum of two is the same in any order; of three it depends on DDP's buckets
        ordered = self._repro.deterministic is True and get_world_size() > 2
        return process_group.wrap_model(self, super().wrap_model, model_wrapper_cfg, model, ordered)

    def build_train_loop(self, loop: Any) -> Any:
        loop = self._build_loop(super().build_train_loop, loop, 'sample', self._train_dataloader)
        self._facts['train_samples'] = len(loop.dataloader.dataset)
        if self._point is not None and 'train_samples' in self._point.facts:
            for line in self._compare_with_point({**self._point.facts, 'train_samples':
                                                  self._facts['train_samples']}):
                self.logger.warning(line)
        if placement_of(loop.dataloader) is not None:
            if isinstance(loop, IterBasedTrainLoop):
                continue_iterations(loop, *((self._point.iteration, self._point.place)
                                            if self._point is not None else (0, None)))
            elif self._point is not None and isinstance(loop, EpochBasedTrainLoop):
                continue_epochs(loop)
        return loop

    def build_val_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_val_loop, loop, 'val', self._val_dataloader)

    def build_test_loop(self, loop: Any) -> Any:
        return self._build_loop(super().build_test_loop, loop, 'test', self._test_dataloader)

    def _build_loop(self, build: Any, loop: Any, stream: str, loader: Any) -> Any:
        if isinstance(loader, DataLoader) and not self._repro.legacy:
            # the loop takes a loader object as it is, and may fork its workers at once
            adopt_loader(loader, self._repro, stream, get_rank(), loader.worker_init_fn,
                         patches.apply_in_worker)
            self._seek(loader, stream)
        self._stream = stream
        try:
            return build(loop)
        finally:
            self._stream = type(self)._stream

    def build_dataloader(self, dataloader: Union[DataLoader, Dict], seed: Optional[int] = None,
                         diff_rank_seed: bool = False) -> DataLoader:
        """As MMEngine's, with samplers, samples and workers keyed by the root seed."""
        config = self._repro
        if config.legacy:
            return super().build_dataloader(dataloader, seed, diff_rank_seed)
        if isinstance(dataloader, DataLoader):
            return dataloader
        # For samplers that mmrepro does not know. The same on all ranks, also with
        # diff_rank_seed: ranks that shuffle differently would share samples.
        sampler_seed = seeds.derive(config.seed, 'sampler', 'build').torch >> 33
        with seeds.isolate_rng():
            # data sets may draw while they are built, whatever was drawn until now
            seeds.seed_all(config.seed, 'dataset', 'build', self._stream)
            loader = super().build_dataloader(dataloader, sampler_seed, False)
        user_init = loader.worker_init_fn if 'worker_init_fn' in dataloader else None
        adopt_loader(loader, config, self._stream, get_rank(), user_init, patches.apply_in_worker)
        self._seek(loader, self._stream)
        return loader

    def _seek(self, loader: DataLoader, stream: str) -> None:
        if self._point is not None and stream == 'sample':
            # an iteration-based loop forks its workers, which begin at once, in its __init__
            seek(loader, *where(loader, self._point.iteration, self._point.place))

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> Dict:
        with files.local_loading():
            return super().load_checkpoint(filename, *args, **kwargs)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """As MMEngine's, but all ranks have to call it: those that differ hand their state over.

        On a local disk the file appears whole, with a digest, or not at all.
        """
        if not self._repro.legacy:
            self._other_ranks = rank_state.gather(rank_state.own_state(self))
        self._write_checkpoint(out_dir, filename, *args, **kwargs)

    @master_only
    def _write_checkpoint(self, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        if not files.is_local(out_dir, kwargs):
            super().save_checkpoint(out_dir, filename, *args, **kwargs)
            return
        partial = os.path.join(out_dir, f'.{filename}.partial')
        try:
            super().save_checkpoint(out_dir, os.path.basename(partial), *args, **kwargs)
            files.replace_with(partial, os.path.join(out_dir, filename), self._complete)
        finally:
            if os.path.exists(partial):
                os.remove(partial)

    def repro_meta(self) -> Dict[str, Any]:
        """What a checkpoint says of the randomness that made it."""
        return {
            'version': __version__,
            'scheme': seeds.SCHEME,
            'randomness': self._repro.as_dict(),
            'world_size': get_world_size(),
            'facts': self._facts,
            'schedules': bool(self.param_schedulers),
        }


@RUNNERS.register_module()
class ReproRunner(ReproRunnerMixin, Runner):
    """MMEngine's Runner, reproducible."""


@cache
def reproducible_class(cls: type) -> type:
    """The class to build when ``cls.from_cfg`` is called.

    Raises:
        RandomnessError: for a Runner subclass that replaces what the mixin replaces.
    """
    if issubclass(cls, ReproRunnerMixin):
        return cls
    if cls is Runner:
        return ReproRunner
    for base in cls.__mro__[:cls.__mro__.index(Runner)]:
        own = [name for name in _OWN if name in vars(base)]
        if own:
            raise RandomnessError(
                f'{base.__module__}.{base.__qualname__} has its own {" and ".join(own)}, which '
                'mmrepro replaces. Derive it from mmrepro.ReproRunnerMixin first and Runner '
                'second, and call super() in these methods')
    return type(f'Repro{cls.__name__}', (ReproRunnerMixin, cls), {'__module__': cls.__module__})


def _unused(timestamp: str) -> str:
    """``timestamp`` for the first runner of a second, ``timestamp_1`` for the next of the process.

    MMEngine keeps loggers, visualisers and message hubs by a name that ends in the timestamp. A
    run that starts in the same second as another would go on with the other's best score and
    write its log into the other's folder.
    """
    earlier = _STARTED[timestamp]
    _STARTED[timestamp] += 1
    return f'{timestamp}_{earlier}' if earlier else timestamp


def prepare_cfg(cfg: Any) -> Any:
    """A copy of the config with MMDetection 2.x's keys moved to where they belong."""
    cfg = copy.deepcopy(cfg)
    refuse_misspelt(cfg)
    upgrade_legacy_keys(cfg)
    return cfg


