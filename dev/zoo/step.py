"""Run two training steps and an inference of one config of the zoo, twice."""
from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from typing import Any, Callable

from dev.gpu_check.detector_inputs import images
from dev.gpu_check.zoo_configs import load
from mmrepro.objects.walks import dicts as nodes
from mmrepro.runs.config_files import find_config

from . import batches
from .families import Member

__all__ = ['config_root', 'load', 'one_rank', 'run_once', 'take']

SEED = 20
STEPS = 2


def config_root() -> str:
    """Return the folder of MMDetection's configs."""
    return os.path.dirname(os.path.dirname(find_config('mmdet::_base_/default_runtime')))


def _classes(model: Any) -> int:
    """Return the number of labels that all heads have: the least ``num_classes``, at most two."""
    found = [node['num_classes'] for node in nodes(model)
             if isinstance(node.get('num_classes'), int)]
    return max(1, min([2, *found]))


def _parts(cfg: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return the parts of a config besides the model that may need another package."""
    from mmdet.registry import METRICS, TRANSFORMS
    for key in ('train_dataloader', 'test_dataloader'):
        for node in nodes(cfg.get(key) or {}):
            for step in node.get('pipeline') or ():
                yield f'transform {step["type"]}', lambda step=step: TRANSFORMS.build(step)
    for key in ('val_evaluator', 'test_evaluator'):
        for node in nodes(cfg.get(key) or {}):
            if isinstance(node.get('type'), str) and node['type'].endswith('Metric'):
                metric = {**node, 'ann_file': None} if 'ann_file' in node else node
                yield f'metric {node["type"]}', lambda metric=metric: METRICS.build(metric)


def _loaded(cfg: Any) -> set[str]:
    """Return the annotations that the training pipeline loads besides boxes: 'masks', 'stuff'."""
    loaded = set()
    for node in nodes(cfg.get('train_dataloader') or {}):
        name = getattr(node.get('type'), '__name__', node.get('type'))
        if name in ('LoadAnnotations', 'LoadPanopticAnnotations', 'LoadTrackAnnotations'):
            always = name == 'LoadPanopticAnnotations'
            loaded |= {'masks'} if node.get('with_mask', always) else set()
            loaded |= {'stuff'} if node.get('with_seg', always) else set()
    return loaded


def _batch(member: Member, cfg: Any, number: int = 2) -> dict:
    """Return a batch of the kind that the member trains on."""
    text = 'cat . dog .' if member.data == 'text' else None
    batch = images(member.size, _classes(cfg.model), number, text)
    loaded = _loaded(cfg)
    for sample in batch['data_samples']:
        if 'masks' not in loaded:
            del sample.gt_instances.masks, sample.ignored_instances.masks
        if 'stuff' not in loaded:
            del sample.gt_sem_seg
    if member.data == 'proposals':
        batch = batches.with_proposals(batch)
    if member.data == 'semi' and number > 1:
        batch = batches.unlabelled(batch)
    if member.data == 'video':
        batch = batches.tracks(batch)
    return batch


def _digest(*values: Any) -> str:
    """Return the SHA-256 of tensors in order, with their names, types and shapes."""
    import torch
    state = hashlib.sha256()

    def update(name: str, value: Any) -> None:
        if hasattr(value, 'tensor'):
            value = value.tensor
        if isinstance(value, torch.Tensor):
            value = value.detach()
            state.update(f'{name}{value.dtype}{tuple(value.shape)}'.encode())
            state.update(value.cpu().contiguous().numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                update(f'{name}.{key}', value[key])
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                update(f'{name}.{number}', item)
        elif hasattr(value, 'all_items'):
            update(name, dict(value.all_items()))
        elif value is not None and hasattr(value, 'tobytes'):
            state.update(f'{name}{value.dtype}{value.shape}'.encode() + value.tobytes())

    for number, value in enumerate(values):
        update(str(number), value)
    return state.hexdigest()


def run_once(member: Member, cfg: Any, kind: Any = None, device: str = 'cpu') -> dict:
    """Build, train and infer from the seed; return losses, digests and detections.

    ``kind`` is the class of the optimizer; None: SGD.
    """
    import copy

    import torch
    from mmdet.registry import MODELS
    from mmengine.logging import MessageHub
    from mmengine.optim import OptimWrapper

    from mmrepro import seeds
    seeds.seed_all(SEED, 'init')
    model = MODELS.build(copy.deepcopy(cfg.model))
    model.init_weights()
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = OptimWrapper((kind or torch.optim.SGD)(trained, lr=1e-4),
                             clip_grad=dict(max_norm=1.))
    losses = []
    for step in range(STEPS):
        for name, value in (('epoch', 0), ('iter', step)):  # as the runner's loop does
            MessageHub.get_current_instance().update_info(name, value)
        seeds.seed_all(SEED, 'step', step)
        logged = model.train_step(_batch(member, cfg), optimizer)
        losses.append({name: float(value) for name, value in logged.items()})
    seeds.seed_all(SEED, 'val', 0)
    model.eval()
    with torch.no_grad():
        results = model.test_step(_batch(member, cfg, number=1))
    return dict(losses=losses, weights=_digest(model.state_dict()), output=_digest(results),
                parameters=sum(p.numel() for p in model.parameters()))


def take(member: Member, once: bool = False, device: str = 'cpu') -> dict:
    """Run one member. Exceptions of its config, model or training propagate.

    Args:
        once: Do not run it a second time from the same seed; ``equal`` is then None.
        device: Where the model trains.

    Returns:
        dict(loss: of the second step, equal: whether both times gave the same bits or None,
        operators: mmcv's compiled ones that were called, parameters: number of them).

    Raises:
        ValueError: a loss is infinite or not a number.
    """
    import torch
    from mmdet.utils import register_all_modules

    from mmrepro import determinism, patches
    register_all_modules(init_default_scope=True)
    patches.apply()
    torch.set_num_threads(1)
    cfg = load(member.config, member.size)
    for _, build in _parts(cfg):
        build()
    with determinism.deterministic(), one_rank(cfg), _calls() as operators:
        first = run_once(member, cfg, device=device)
        second = first if once else run_once(member, cfg, device=device)
    loss = first['losses'][-1].get('loss')
    if loss is None or not abs(loss) < float('inf'):
        raise ValueError(f'the loss of step {STEPS} is {loss}: {first["losses"][-1]}')
    different = [key for key in first if first[key] != second[key]]
    return dict(loss=loss, equal=None if once else not different, different=different,
                operators=sorted(operators), parameters=first['parameters'])


@contextlib.contextmanager
def one_rank(cfg: Any) -> Iterator[None]:
    """Make a process group of this process alone if the model needs one (MMSyncBN)."""
    if not any(node.get('type') == 'MMSyncBN' for node in nodes(cfg.model)):
        yield
        return
    import torch.distributed as dist
    from torch.nn import SyncBatchNorm

    from mmrepro.ops.aten import sync_bn
    from mmrepro.util.scoped import replaced
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        with replaced(SyncBatchNorm, forward=sync_bn.forward):
            yield
    finally:
        dist.destroy_process_group()


class _calls:  # noqa: N801  a context manager that reads as a verb
    """Collect the names of mmcv's compiled operators that are called inside."""

    def __enter__(self) -> set:
        import mmcv.ops

        from mmrepro.ops import TABLE
        names: set = set()
        # each file of mmcv.ops holds the extension that it found when it was imported
        extensions = {id(module.ext_module): module.ext_module
                      for module in list(sys.modules.values())
                      if getattr(module, '__name__', '').startswith(mmcv.ops.__name__)
                      and hasattr(module, 'ext_module')}
        self._before = [(extension, name, getattr(extension, name))
                        for extension in extensions.values() for name in TABLE
                        if hasattr(extension, name)]
        for extension, name, function in self._before:
            setattr(extension, name, self._noting(name, function, names))
        return names

    @staticmethod
    def _noting(name: str, function: Callable, names: set) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            names.add(name)
            return function(*args, **kwargs)
        return noted

    def __exit__(self, *error: Any) -> None:
        for extension, name, function in self._before:
            setattr(extension, name, function)


