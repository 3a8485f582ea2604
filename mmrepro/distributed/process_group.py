"""Distributed runs on a torch without an accelerator, started as MMEngine's runs are.

Stock MMEngine asks for CUDA twice: ``init_dist`` selects a device before it makes the process
group, and ``wrap_model`` gives DistributedDataParallel a device. Both can be avoided from outside:
``Runner.setup_env`` leaves a process group alone that exists already, and DistributedDataParallel
can be given ``device_ids=None``. With an accelerator, everything here leaves the work to MMEngine.
"""
from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Callable, NamedTuple

import torch.distributed as dist
from mmengine.device import get_device
from mmengine.dist import get_world_size
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import ConfigError
from ..ops.aten import sync_bn
from ..util.scoped import replaced
from .control import naming_gloo_network
from .lost_ranks import leave_at_exit, let_go_at_exit
from .ordered_sums import fix_gradient_order
from .scheduler import current

_logger = logging.getLogger('mmrepro')

Config = dict[str, Any]  # of a model wrapper
DEFAULT_PORT = 29500  # MMEngine's and torch's
_NOT_FOR_CPU = {None, 'nccl'}  # backends of configs that were not written for the CPU


class Launcher(NamedTuple):
    """Variables that a launcher sets; whether one machine has all ranks; the host of rank 0."""
    rank: str
    world_size: str
    local_rank: str
    one_node: Callable[[Mapping[str, str]], bool]
    first_host: Callable[[Mapping[str, str]], str]


def _unknown_host(env: Mapping[str, str]) -> str:
    raise ConfigError('MASTER_ADDR is not set, and the ranks are on several machines. Set it to '
                      'the host name of the machine of rank 0.')


def _slurm_host(env: Mapping[str, str]) -> str:
    nodes = env.get('SLURM_JOB_NODELIST') or env.get('SLURM_NODELIST', '')
    command = ['scontrol', 'show', 'hostnames', nodes]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as error:
        raise ConfigError(f'MASTER_ADDR is not set, and {" ".join(command)!r} does not tell the '
                          f'first host ({error}). Set MASTER_ADDR.') from error


LAUNCHERS = {
    # torchrun; it sets the address itself
    'pytorch': Launcher('RANK', 'WORLD_SIZE', 'LOCAL_RANK', lambda env: False, _unknown_host),
    # srun
    'slurm': Launcher('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID',
                      lambda env: env.get('SLURM_NNODES') == '1', _slurm_host),
    # Open MPI's mpirun
    'mpi': Launcher(
        'OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE', 'OMPI_COMM_WORLD_LOCAL_RANK',
        lambda env: env.get('OMPI_COMM_WORLD_LOCAL_SIZE') == env['OMPI_COMM_WORLD_SIZE'],
        _unknown_host),
}


def has_accelerator() -> bool:
    """Whether MMEngine would put a model on something that torch.distributed can drive."""
    return get_device() not in ('cpu', 'mps')


def process_count() -> int:
    """Return how many processes train: one for each rank, unless ranks are virtual."""
    scheduler = current()
    return get_world_size() if scheduler is None else scheduler.processes


def node_count(processes: int, env: Mapping[str, str]) -> int:
    """Return on how many nodes the processes of a run are, as its launcher says.

    1 where no launcher says so, or where nodes have different numbers of processes.
    """
    local = env.get('OMPI_COMM_WORLD_LOCAL_SIZE', '')
    if 'GROUP_WORLD_SIZE' in env:  # torchrun; it has LOCAL_WORLD_SIZE, which virtual ranks change
        nodes = env['GROUP_WORLD_SIZE']
    elif LAUNCHERS['slurm'].rank in env:
        nodes = env.get('SLURM_NNODES', '')
    else:
        nodes = str(processes // int(local)) if local.isdecimal() and int(local) else ''
    return int(nodes) if nodes.isdecimal() and int(nodes) and processes % int(nodes) == 0 else 1


def launch_variables(launcher: str, env: Mapping[str, str],
                     port: int | None = None) -> dict[str, str]:
    """Return torch's five variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT).

    Args:
        launcher: ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        env: What the launcher set.
        port: ``dist_cfg.port`` of the config, which overrides MASTER_PORT with ``'slurm'``, as in
            MMEngine.

    Raises:
        ConfigError: an unknown launcher; a variable of the launcher, or the address of rank 0, is
            missing; MASTER_PORT is no port.
    """
    if launcher not in LAUNCHERS:
        raise ConfigError(f'launcher={launcher!r}: expected one of {", ".join(LAUNCHERS)}')
    row = LAUNCHERS[launcher]
    for name in (row.rank, row.world_size):
        if name not in env:
            raise ConfigError(f'{name} is not set: this process was not started by the launcher '
                              f'{launcher!r}')
    address = env.get('MASTER_ADDR')
    if address is None:
        address = '127.0.0.1' if row.one_node(env) else row.first_host(env)
    if launcher != 'slurm' or port is None:
        given = env.get('MASTER_PORT', str(DEFAULT_PORT))
        if not given.isdecimal() or not 0 <= int(given) < 1 << 16:
            raise ConfigError(f'MASTER_PORT={given}: allowed are 0 to 65535')
        port = int(given)
    return {
        'RANK': env[row.rank],
        'WORLD_SIZE': env[row.world_size],
        'LOCAL_RANK': env.get(row.local_rank, env[row.rank]),
        'MASTER_ADDR': address,
        'MASTER_PORT': str(port),
    }


def restart_problem(env: Mapping[str, str]) -> str | None:
    """Return why processes that torchrun has restarted may not find each other; None: they will."""
    count, size = env.get('TORCHELASTIC_RESTART_COUNT', '0'), env.get('WORLD_SIZE', '1')
    if env.get('TORCHELASTIC_USE_AGENT_STORE') != 'True' or '0' == count or size == '1':
        return None
    return (f'torchrun has started these {size} processes again (restart {count}) with the store '
            'of those before them; if they now wait for addresses where nobody listens, start '
            'torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (PyTorch #135712, #167288)')


def ensure_process_group(launcher: str, env_cfg: Mapping[str, Any] = {}) -> bool:
    """Make the process group where MMEngine cannot; to be called before ``Runner.setup_env``.

    Without an accelerator it sets torch's variables in ``os.environ`` and makes the group over
    gloo; with one, or with a group that exists, or with launcher ``'none'``, it does nothing.

    Args:
        launcher: ``'none'``, ``'pytorch'``, ``'slurm'`` or ``'mpi'``.
        env_cfg: The config's; of its ``dist_cfg``, ``backend`` (None and ``'nccl'``, of
            MMDetection's configs, mean gloo), ``timeout`` (seconds, for ranks that come late and
            for collective operations) and ``port`` count.

    Returns:
        bool: whether it made the group.
    """
    if launcher == 'none' or dist.is_initialized():
        return False
    problem = restart_problem(os.environ)
    if problem:
        _logger.warning(problem)
    if has_accelerator():
        if launcher == 'mpi':  # MMEngine's wrap_model needs LOCAL_RANK, init_dist does not set it
            name = LAUNCHERS['mpi'].local_rank
            os.environ.setdefault('LOCAL_RANK', os.environ.get(name, '0'))
        return False
    dist_cfg = env_cfg.get('dist_cfg') or {}
    os.environ.update(launch_variables(launcher, os.environ, dist_cfg.get('port')))
    options: dict[str, Any] = {}
    timeout, backend = dist_cfg.get('timeout'), dist_cfg.get('backend')
    if timeout is not None:
        options['timeout'] = timeout if isinstance(timeout, timedelta) else timedelta(
            seconds=timeout)
    if backend in _NOT_FOR_CPU:
        backend = 'gloo'
    with naming_gloo_network():
        dist.init_process_group(backend, **options)
    leave_at_exit(lambda: [None])
    _logger.info('no accelerator: %s ranks over %s', dist.get_world_size(), backend)
    return True


def wrap_model(build: Callable[[Config | None, nn.Module], nn.Module],
               model_wrapper_cfg: Config | None, model: nn.Module,
               ordered: bool = False) -> nn.Module:
    """Wrap a model as ``Runner.wrap_model`` (``build``, bound) does, on the CPU too.

    If ``ordered``, sums of gradients get a fixed order, see :mod:`.ordered_sums`.
    """
    if dist.is_initialized() and not has_accelerator():
        init = DistributedDataParallel.__init__

        def without_devices(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **{**options, 'device_ids': None})

        # DDP refuses torch's synchronized layers on the CPU, where mmrepro lets them train
        with replaced(DistributedDataParallel, __init__=without_devices,
                      _passing_sync_batchnorm_handle=lambda self, module: None):
            # a copy: MMEngine adds the type
            wrapped = build(model_wrapper_cfg and dict(model_wrapper_cfg), model)
        sync_bn.enable_for(wrapped)  # `sync_bn` of a config has converted layers by now
    else:
        wrapped = build(model_wrapper_cfg, model)
    if ordered:
        fix_gradient_order(wrapped)
    for module in wrapped.modules():
        if isinstance(module, DistributedDataParallel):
            let_go_at_exit(module, 'reducer', 'logger', 'process_group', '_comm_hooks')
    return wrapped
