"""Run a program on virtual ranks, and the steps of a runner that differ there.

While they run, attributes of torch and MMEngine are replaced. A cached function that reads the rank
is refused: the ranks of a process would share one answer.
"""
from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any, Callable, TypeVar

import mmengine.logging.logger
import torch
import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import init_dist
from mmengine.model import MMDistributedDataParallel, convert_sync_batchnorm, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn
from torch.distributed import distributed_c10d as c10d

from .. import determinism
from ..config import RandomnessConfig
from ..determinism.compiled import compiles
from ..distributed.control import default_timeout
from ..distributed.lost_ranks import naming_lost_ranks
from ..distributed.process_group import LAUNCHERS, ensure_process_group
from ..distributed.scheduler import Baton, current
from ..errors import RandomnessError, VirtualRanksError
from ..ops.aten import sync_bn
from ..util.libraries import belongs_to_user
from ..util.scoped import replaced
from . import heap
from .exchange import Transport
from .gradients import VirtualDataParallel
from .world import ThreadLocalWorld, Worlds

_logger = logging.getLogger('mmrepro')

Result = TypeVar('Result')

SLURM_SPECIAL_STEPS = 0xfffffff0  # numbers of batch scripts, interactive shells and the like


def on_virtual_ranks(ranks: int | None, main: Callable[[], Result], launcher: str = 'none',
                     env_cfg: Mapping[str, Any] = {}) -> Result:
    """Call ``main()`` once per virtual rank, with the same bits for any number of processes.

    In ``main``, ``torch.distributed`` is initialized and has ``ranks`` ranks; build the runner and
    train there. Each process calls this function and runs its share of the ranks.

    Args:
        ranks: V, the number of ranks of the run; None calls ``main`` as it is.
        main: The program of one rank.
        launcher: How this process was started: ``'none'``, ``'pytorch'``, ``'slurm'``, ``'mpi'``.
        env_cfg: The config's; ``dist_cfg`` is read, if a process group has to be made.

    Returns:
        What ``main`` returned in the lowest rank of this process.

    Raises:
        RandomnessError: more processes than ranks, or a launcher that started several although
            ``launcher='none'``; names both numbers.
        BaseException: the first that a rank raised. All ranks of this process have ended then.
    """
    if ranks is None:
        return main()
    RandomnessConfig.parse(dict(virtual_ranks=ranks))  # refuses a value that is not allowed
    _check_launch(ranks, launcher)
    _ensure_group(launcher, env_cfg)
    scheduler = _worlds(ranks).scheduler
    determinism.import_flags()
    # a device that was chosen holds for the thread that chose it; asking would start CUDA, before
    # the runner has set the variables that it reads
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    heap.share(scheduler)

    def begin() -> Result:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        return main()

    def failed() -> str:
        number = scheduler.failed_rank
        return '' if number is None else f'virtual rank {number} of {ranks}'

    baton = Baton([scheduler])
    numbers = ', '.join(str(rank.number) for rank in scheduler.ranks)
    with naming_lost_ranks(f'the process of virtual ranks {numbers}', failed), \
            guarded(baton):
        baton.run(begin)
        error = scheduler.failed
        if error is not None:
            if failed() and isinstance(error, Exception):
                _logger.error('%s has ended with %s; the other ranks of this process were stopped',
                              failed(), type(error).__name__)
            raise error
    result: Result = scheduler.ranks[0].result
    return result


def _worlds(ranks: int) -> Worlds:
    """Make the ranks of this process, which belongs to the process group in force, if any."""
    if not dist.is_initialized():
        return Worlds(ranks, 0, 1, None, dist.HashStore())
    _check_ranks(ranks, dist.get_world_size())
    # gradients have a group of their own, with the same timeout
    aside = dist.new_group(timeout=default_timeout())
    transport = Transport(dist.group.WORLD, Transport(aside))
    return Worlds(ranks, dist.get_rank(), dist.get_world_size(), transport,
                  c10d._get_default_store() or dist.HashStore())


def _check_ranks(ranks: int, processes: int) -> None:
    """Raise RandomnessError for more processes than ranks."""
    if processes > ranks:
        raise RandomnessError(f'randomness.virtual_ranks={ranks}, and the launcher has started '
                              f'{processes} processes; allowed are 1 to {ranks} processes')


def _started_by(launcher: str) -> bool:
    """Whether a launcher has started this process as one of several.

    A batch script or shell of Slurm has the variables of its job, and is not a step of `srun`.
    """
    if launcher == 'slurm':
        step = os.environ.get('SLURM_STEP_ID', '')
        return step.isdecimal() and int(step) < SLURM_SPECIAL_STEPS
    return LAUNCHERS[launcher].rank in os.environ


def _check_launch(ranks: int, launcher: str) -> None:
    """Raise RandomnessError if the environment is not that of ``launcher``."""
    for name, row in LAUNCHERS.items() if not dist.is_initialized() else ():
        started, count = _started_by(name), os.environ.get(row.world_size, '1')
        processes = int(count) if count.isdecimal() else 1
        if launcher == 'none' and started and processes > 1:
            raise RandomnessError(
                f"{row.world_size}={count}: {count} processes were started, and with "
                f"launcher='none' each of them would run all of the {ranks} ranks of "
                f'randomness.virtual_ranks={ranks}. Give --launcher {name}, or start one process')
        if launcher == name:
            if not started:
                missing = 'SLURM_STEP_ID, which srun sets,' if row.rank in os.environ else row.rank
                raise RandomnessError(f'launcher={launcher!r}, and it has not started this '
                                      f'process: {missing} is not set. For one process, leave it '
                                      'out')
            _check_ranks(ranks, processes)


def _ensure_group(launcher: str, env_cfg: Mapping[str, Any]) -> None:
    """Make the process group of the real processes as a runner does, if there is none."""
    if launcher == 'none' or dist.is_initialized():
        return
    # making the group starts CUDA, and cuBLAS may read it from then on
    os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', determinism.tables.CUBLAS_WORKSPACE)
    if not ensure_process_group(launcher, env_cfg):
        init_dist(launcher, **dict(env_cfg.get('dist_cfg') or {}))


def settings_on_ranks(settings: dict[str, Any]) -> RandomnessConfig:
    """Take ``randomness`` out of the arguments of a runner that is being built, and parse it.

    On virtual ranks, other arguments change as well.

    Raises:
        RandomnessError: a runner with ``virtual_ranks`` outside of :func:`on_virtual_ranks`, or
            with another number, or with a setting that virtual ranks do not allow.
    """
    given = RandomnessConfig.parse(settings.pop('randomness', None))
    scheduler, ranks = current(), given.virtual_ranks.ranks
    if scheduler is None:
        if ranks is not None:
            raise RandomnessError(
                f'randomness.virtual_ranks={ranks} needs a thread for each rank. '
                'Start the training with `mmrepro train CONFIG`, or run your own script with '
                'mmrepro.on_virtual_ranks(V, main), where main() builds the runner and trains')
        return given
    if ranks not in (None, scheduler.world_size):
        raise RandomnessError(f'randomness.virtual_ranks={ranks}, and this is one of '
                              f'{scheduler.world_size} virtual ranks; allowed is '
                              f'{scheduler.world_size}')
    if given.uses_stock_streams:
        raise RandomnessError("randomness.worker_seed='mmengine' and randomness.virtual_ranks="
                              f'{scheduler.world_size} exclude each other; remove one of them')
    cfg = settings.get('cfg') or {}
    if compiles(cfg.get('compile')):
        raise RandomnessError(f'compile={cfg["compile"]!r} and randomness.virtual_ranks='
                              f'{scheduler.world_size} exclude each other; remove one of them')
    # to MMEngine, a distributed run whose process group exists
    settings['launcher'] = 'pytorch'
    return replace(given, virtual_ranks=replace(given.virtual_ranks, ranks=scheduler.world_size))


def share_workers(loader: Any) -> Any:
    """Divide the workers of a data loader's config among the ranks of the process.

    A rank keeps at least one worker. The number changes no bit.
    """
    scheduler = current()
    if scheduler is None or not loader.get('num_workers'):
        return loader
    count = -(-loader['num_workers'] // len(scheduler.ranks))
    return type(loader)({**loader, 'num_workers': count})


def wrap_model(runner: Any, wrapper: Mapping[str, Any] | None, model: nn.Module) -> nn.Module:
    """Wrap a model on virtual ranks.

    Raises:
        RandomnessError: a model wrapper other than MMDistributedDataParallel; names it.
    """
    options = dict(wrapper or dict(broadcast_buffers=False))
    kind = options.pop('type', 'MMDistributedDataParallel')
    cls = MODEL_WRAPPERS.get(kind) if isinstance(kind, str) else kind
    if is_model_wrapper(model):
        cls = type(model)
    if cls is not MMDistributedDataParallel:
        raise RandomnessError(f'the model wrapper {getattr(cls, "__name__", kind)} and randomness.'
                              f'virtual_ranks={runner.world_size} exclude each other; allowed is '
                              'MMDistributedDataParallel')
    model = model.to(get_device())
    if runner.cfg.get('sync_bn') is not None:
        model = convert_sync_batchnorm(model, runner.cfg.sync_bn)
    sync_bn.enable_for(model)
    return VirtualDataParallel(model, **options)


# module, attribute, why it is refused
REFUSED: tuple[tuple[str, str, str], ...] = (
    ('torch', 'compile', 'compiled code may be shared by ranks'),
    ('torch.cuda', 'graph', 'a captured graph cannot hand over to another rank'),
    ('torch.cuda', 'make_graphed_callables', 'a captured graph cannot hand over to another rank'),
)


def _refusal(name: str, why: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise VirtualRanksError(
            f'{name} cannot be used with randomness.virtual_ranks: {why}; leave it out, or start '
            'as many processes as there are ranks without virtual_ranks')
    return refuse


@contextmanager
def autocast_cache() -> Iterator[None]:
    """Keep autocast's cache of cast weights until no rank is inside of autocast.

    The cache belongs to the process, the nesting to a thread: a rank that leaves would drop the
    weights that another rank has cast. Their next use would cast again, and the gradients of the
    two casts would be added up in float32 instead of half precision. Entries are found by tensor,
    and each rank has its own tensors.
    """
    increase, decrease = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    clear = torch.clear_autocast_cache
    inside: set[int] = set()
    increase()
    if decrease():
        raise VirtualRanksError('virtual ranks were started inside of torch.autocast, which holds '
                                'for one of their threads only: use it in the program of a rank')

    def enter() -> int:
        inside.add(threading.get_ident())
        return increase()

    def leave() -> int:
        left = decrease()
        if left == 0:
            inside.discard(threading.get_ident())
        return left

    def clear_if_last() -> None:
        if not inside:
            clear()

    with replaced(torch, autocast_increment_nesting=enter, autocast_decrement_nesting=leave,
                  clear_autocast_cache=clear_if_last):
        yield
    clear()


@contextmanager
def guarded(baton: Baton) -> Iterator[None]:
    """Put everything of this module, and the worlds of the ranks, into force for a block.

    Raises:
        RuntimeError: virtual ranks run in this process already.
    """
    if isinstance(c10d._world, ThreadLocalWorld):
        raise VirtualRanksError('virtual ranks run in this process already')
    make, barrier = c10d._new_process_group_helper, c10d._store_based_barrier
    world = ThreadLocalWorld(c10d._world, baton)

    def new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any,
                  **kwargs: Any) -> Any:
        worlds = getattr(world, 'virtual', None)
        if worlds is None:  # a group of the real processes
            return make(size, rank, ranks, backend, *args, **kwargs)
        with worlds.new_group(ranks) as virtual_backend:
            return make(size, rank, ranks, virtual_backend, *args, **kwargs)

    def wait(*args: Any, **kwargs: Any) -> None:
        if not hasattr(world, 'virtual'):  # virtual ranks have met when the group was made
            barrier(*args, **kwargs)

    with ExitStack() as stack:
        # newer torch: gives each thread its own registry of process groups by name
        isolate = getattr(torch._C._distributed_c10d, '_set_thread_isolation_mode', bool)
        isolate(True)
        stack.callback(isolate, False)
        stack.enter_context(autocast_cache())
        # in the names of log files; MMEngine takes LOCAL_RANK for the number of a device
        stack.enter_context(replaced(
            mmengine.logging.logger, _get_device_id=lambda:
            torch.cuda.current_device() if torch.cuda.is_initialized() else 0))
        stack.enter_context(replaced(c10d, _world=world, _new_process_group_helper=new_group,
                                     _store_based_barrier=wait))
        for module, name, why in REFUSED:
            stack.enter_context(replaced(
                sys.modules[module], **{name: _refusal(f'{module}.{name}', why)}))
        yield


READERS = {'get_rank', 'get_dist_info', 'get_local_rank', 'get_node_local_rank', 'is_main_process',
           'is_master'}


def _reads(code: CodeType) -> set[str]:
    """Return names and variables that tell the rank, in a function and in functions inside."""
    names = READERS.intersection(code.co_names)
    if {'environ', 'getenv'}.intersection(code.co_names):
        names |= {'RANK', 'LOCAL_RANK'}.intersection(map(str, code.co_consts))
    return names.union(*(_reads(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def refuse_cached_ranks() -> None:
    """Raise RandomnessError on virtual ranks for a cached function that reads the rank."""
    scheduler = current()
    # the first rank looks for all ranks of its process
    if scheduler is None or scheduler.me is not scheduler.ranks[0]:
        return
    for cache in gc.get_objects():
        if type(cache) is functools._lru_cache_wrapper:
            function = inspect.unwrap(cache)
            names = READERS & {getattr(function, '__name__', '')}
            if belongs_to_user(str(cache.__module__)) and hasattr(function, '__code__'):
                names |= _reads(function.__code__)
            if names:
                raise RandomnessError(
                    f'{cache.__module__}.{function.__qualname__} reads {min(names)} and caches the '
                    'answer (functools.lru_cache or cache), and virtual ranks of a process share '
                    'it: remove the cache, or give the rank as an argument')
