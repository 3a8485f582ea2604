"""Steps of a runner that differ on virtual ranks."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmengine.device import get_device
from mmengine.model import MMDistributedDataParallel, convert_sync_batchnorm, is_model_wrapper
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

from ..config import RandomnessConfig
from ..determinism.compiled import compiles
from ..distributed.scheduler import current
from ..errors import RandomnessError
from ..ops.aten import sync_bn
from .gradients import VirtualDataParallel


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
    if given.legacy:
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
