"""State that differs between ranks: all of it goes into the checkpoint, which rank 0 writes.

Each rank of a training has buffers of its own where no collective operation keeps them equal
(BatchNorm without synchronization, SeesawLoss, GHM); attributes; and gradients in the middle of an
accumulation cycle.

The model that is evaluated and published has the same buffers on all ranks: validation and the
checkpoint's ``state_dict`` take the mean of BatchNorm's running statistics over the ranks, and the
other buffers of rank 0. Training goes on with the buffers of each rank.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.dist import get_world_size
from mmengine.runner import BaseLoop
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..data import position_of_loader
from ..distributed.agreement import agree, gather_objects
from ..distributed.unwrap import buffer_wrappers, ema_hooks, optim_wrappers, unwrap
from ..objects.digests import exact_digest, local_part
from . import kept_attributes


def local_state(runner: Any, missing: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Return the state that no ``state_dict`` of rank 0 holds, ``{part: {name: value}}``.

    ``missing`` gets the attributes to keep that objects do not have.
    """
    return dict(attributes=kept_attributes.collect(kept_attributes.owners_of(runner), missing),
                gradients=_gradients(runner), buffers=dict(_buffers(runner)),
                order=_order(runner))


def gather(state: dict[str, dict[str, Any]],
           to_all: bool = False) -> dict[int, dict[str, dict[str, Any]]]:
    """Gather the state in which ranks differ, on rank 0 or all ranks. A collective operation.

    The result is ``{rank: {part: {name: value}}}``, empty where all ranks are equal.

    Raises:
        AgreementError: a rank has come to another point of its program.
    """
    if get_world_size() == 1:
        return {}
    # gradients are too large to be digested at every checkpoint
    digests = {f'{part}/{name}': 'gradient' if part == 'gradients' else exact_digest(value)
               for part, values in state.items() for name, value in values.items()}
    different = agree('checkpoint', digests, _different)
    if not different:
        return {}
    # on the host: in the middle of an accumulation cycle these are all gradients of all ranks
    mine = {part: on_cpu({name: value for name, value in values.items()
                          if f'{part}/{name}' in different}) for part, values in state.items()}
    ranks = gather_objects(mine, to_all)
    return {} if ranks is None else dict(enumerate(ranks))


def _different(ranks: list[dict[str, str]]) -> list[str]:
    """Return the names whose digests differ between ranks, and all gradients, undigested."""
    names = sorted({name for digests in ranks for name in digests})
    return [name for name in names if name.startswith('gradients/')
            or len({digests.get(name) for digests in ranks}) > 1]


def of_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the state in a checkpoint, which is that of rank 0, with what ``rank`` has instead.

    >>> state = dict(buffers=dict(a=0, b=0), gradients=dict(a=0, b=0),
    ...              ranks={1: dict(buffers=dict(b=1), gradients=dict(b=1))})
    >>> of_rank(state, 1)['buffers'], of_rank(state, 1)['gradients']
    ({'a': 0, 'b': 1}, {'b': 1})
    """
    own = state.get('ranks', {}).get(rank, {})
    merged = {**state, **{part: {**state.get(part, {}), **values} for part, values in own.items()}}
    if 'gradients' in own:  # all of them: what another rank has besides is None on this one
        merged['gradients'] = own['gradients']
    return merged


def restore(runner: Any, state: dict[str, dict[str, Any]]) -> list[str]:
    """Put a rank's state back; returns names of state that has no owner in this run."""
    model = unwrap(runner.model)
    lost = kept_attributes.restore(kept_attributes.owners_of(runner), state.get('attributes', {}))
    parameters, buffers = dict(model.named_parameters()), dict(_buffers(runner))
    for name, value in state.get('gradients', {}).items():
        if name in parameters and parameters[name].shape == value.shape:
            parameters[name].grad = value.to(parameters[name].device, parameters[name].dtype)
        else:
            lost.append(f'gradient of {name}, {tuple(value.shape)}')
    for name, value in state.get('buffers', {}).items():
        if name in buffers and buffers[name].shape == value.shape:
            buffers[name].copy_(value)
        else:
            lost.append(f'buffer {name}, {tuple(value.shape)}')
    optimizers = optim_wrappers(runner.optim_wrapper)
    for name, count in state.get('counts', {}).items():
        if name in optimizers:
            optimizers[name]._inner_count = count
        else:
            lost.append(f'optimizer {name}')
    wrappers = buffer_wrappers(runner.model)
    for name, takes in state.get('takes_buffers', {}).items():
        if name in wrappers:  # a run of one process has none
            wrappers[name].require_forward_param_sync = takes
    return lost


def _modules(runner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield the model, and its averages in hooks."""
    yield 'model', unwrap(runner.model)
    for hook in runner.hooks:
        average = getattr(hook, 'ema_model', None)
        if isinstance(average, nn.Module):
            yield 'ema', average


def _buffers(runner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all buffers, including those that no state dict has."""
    for prefix, module in _modules(runner):
        yield from module.named_buffers(prefix)


def unsaved_buffers(runner: Any) -> dict[str, torch.Tensor]:
    """Return buffers with ``persistent=False``: in no state dict, but some layers count in them."""
    saved = {f'{prefix}.{name}' for prefix, module in _modules(runner)
             for name in module.state_dict()}
    return {name: value for name, value in _buffers(runner) if name not in saved}


def counts(runner: Any) -> dict[str, int]:
    """Return how many losses each optimizer has seen: its position in an accumulation cycle.

    MMEngine derives it from the iteration for a single optimizer only.
    """
    return {name: wrapper._inner_count
            for name, wrapper in optim_wrappers(runner.optim_wrapper).items()}


def takes_buffers(runner: Any) -> dict[str, bool]:
    """Return which wrappers take the buffers of rank 0 before the next forward pass."""
    return {name: wrapper.require_forward_param_sync
            for name, wrapper in buffer_wrappers(runner.model).items()}


def _order(runner: Any) -> dict[str, Any]:
    """Return the attributes from which the order of the running pass was drawn."""
    loader_position = position_of_loader(runner.train_dataloader) if isinstance(
        runner._train_loop, BaseLoop) else None
    if loader_position is None or loader_position.begun is None:
        return {}
    return loader_position.begun.as_dict()


def _gradients(runner: Any) -> dict[str, torch.Tensor]:
    """Return gradients for the next step: of unfinished cycles, of losses of other optimizers.

    A step of MMEngine leaves none. That of a user may, in a cycle that only its model counts.
    """
    return {name: local_part(parameter.grad.detach())
            for name, parameter in unwrap(runner.model).named_parameters()
            if parameter.grad is not None}


def on_cpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with tensors on the CPU."""
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()}


STATISTICS = ('running_mean', 'running_var')


class EvaluatedModel:
    """Puts the common buffers into the model of one runner while it is evaluated.

    EMAHook puts averages of weights into the model before the first batch and takes them out after
    the last: :meth:`enter` comes after the former, :meth:`leave` before the latter.

    Args:
        stock_streams: the run has MMEngine's own streams: as in MMEngine, every rank evaluates with
            its own buffers.
    """

    def __init__(self, stock_streams: bool) -> None:
        self._stock_streams = stock_streams
        # buffers of the model, and what they had before
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, wrapped: nn.Module) -> None:
        """Put the common buffers into the model. A collective operation."""
        if self._stock_streams or get_world_size() == 1:
            return
        model = unwrap(wrapped)
        buffers = dict(model.named_buffers())
        ranks = gather(dict(buffers=buffers), to_all=True)
        common = _common(model, [state['buffers'] for state in ranks.values()])
        # buffers whose shape differs between ranks (queues) stay
        self._replaced = [(buffers[name], value.to(buffers[name]))
                          for name, value in common.items() if buffers[name].shape == value.shape]
        self._swap()

    def leave(self) -> None:
        """Restore this rank's own buffers. May be called at any time; called before every step."""
        self._swap()
        self._replaced = []

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Restore this rank's own buffers inside the block, while a checkpoint is written."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for buffer, kept in self._replaced:
            value = buffer.clone()
            buffer.copy_(kept)
            kept.copy_(value)


def publish(runner: Any, ranks: Mapping[int, Mapping[str, Mapping[str, Any]]],
            state_dict: dict[str, Any]) -> None:
    """Put the buffers that ``ranks`` of :func:`gather` share into a ``state_dict``."""
    # EMAHook has put its averages there, buffers included
    prefix = 'ema.module.' if ema_hooks(runner.hooks) else 'model.'
    buffers = [{name[len(prefix):]: value for name, value in state['buffers'].items()
                if name.startswith(prefix)} for state in ranks.values()]
    for name, value in _common(unwrap(runner.model), buffers).items():
        if name in state_dict:
            state_dict[name] = value


def _common(model: nn.Module, ranks: Sequence[Mapping[str, torch.Tensor]]
            ) -> dict[str, torch.Tensor]:
    """Return the buffers of the evaluated model, from those of each rank by name."""
    statistics = {f'{path}.{name}'.lstrip('.') for path, module in model.named_modules()
                  if isinstance(module, _NormBase) for name in STATISTICS}
    return {name: mean_of_ranks([rank[name] for rank in ranks]) if name in statistics else value
            for name, value in (ranks[0] if ranks else {}).items()}


def mean_of_ranks(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean, added up in the order of the ranks in double precision.

    >>> mean_of_ranks([torch.tensor([1., 2.]), torch.tensor([2., 2.])])
    tensor([1.5000, 2.0000])
    """
    first, *later = values
    total, equal = first.double(), torch.ones_like(first, dtype=torch.bool)
    for value in later:
        total = total + value.double()
        equal &= value == first
    return torch.where(equal, first, (total / len(values)).to(first.dtype))
