"""The buffers of the model that is evaluated and published: the same on all ranks.

Each rank of a training has buffers of its own where no collective operation keeps them equal,
BatchNorm's running statistics first of all. Validation and the checkpoint's ``state_dict`` take the
mean of the statistics over the ranks, and the other buffers of rank 0. Training goes on with the
buffers of each rank.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.dist import get_world_size
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..distributed.unwrap import ema_hooks, unwrap
from . import rank_state

STATISTICS = ('running_mean', 'running_var')


class EvaluatedModel:
    """Puts the common buffers into the model of one runner while it is evaluated.

    EMAHook puts averages of weights into the model before the first batch and takes them out after
    the last: :meth:`enter` comes after the former, :meth:`leave` before the latter. If ``legacy``,
    as in MMEngine, every rank evaluates with its own buffers.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        # buffers of the model, and what they had before
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, wrapped: nn.Module) -> None:
        """Put the common buffers into the model. A collective operation."""
        if self._legacy or get_world_size() == 1:
            return
        model = unwrap(wrapped)
        buffers = dict(model.named_buffers())
        ranks = rank_state.gather(dict(buffers=buffers), to_all=True)
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
    """Put the buffers that ``ranks`` of :func:`rank_state.gather` share into a ``state_dict``."""
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
