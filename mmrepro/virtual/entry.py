"""Run a program on virtual ranks, and the steps of a runner that differ there."""
from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable, TypeVar

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
from ..errors import RandomnessError
from ..ops.aten import sync_bn
from . import heap
from .exchange import Transport
from .gradients import VirtualDataParallel
from .guards import guarded
from .world import Worlds

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
    return scheduler.ranks[0].result


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
        processes = int(count) if count.isdigit() else 1
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
