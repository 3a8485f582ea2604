"""The buffers of the model that is evaluated and published: the same on all ranks.

Each rank of a training has buffers of its own where no collective operation keeps them equal,
BatchNorm's running statistics first of all. Validation and the checkpoint's ``state_dict`` take the
mean of the statistics over the ranks; of every other buffer, what rank 0 has. Training goes on with
what each rank had.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.dist import get_world_size
from mmengine.hooks import EMAHook
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ..distributed.unwrap import unwrap
from . import rank_state

STATISTICS = ('running_mean', 'running_var')
_BEFORE = ('before_val_epoch', 'before_test_epoch')
# also what comes when an error has ended an evaluation early
_BEHIND = ('after_val_epoch', 'after_test_epoch', 'before_train', 'before_train_iter', *_BEFORE)


class EvaluatedModel:
    """Puts the common buffers into the model of one runner while it is validated or tested.

    Args:
        legacy: the run keeps MMEngine's own streams: every rank evaluates with its own buffers.
    """

    def __init__(self, legacy: bool) -> None:
        self._legacy = legacy
        self._own: list[tuple[torch.Tensor, torch.Tensor]] = []  # a buffer, what it had before

    @contextmanager
    def event(self, name: str, runner: Any) -> Iterator[None]:
        """Call the hooks of an event in this block.

        EMAHook puts averages of weights into the model before the first batch and takes them out
        after the last one: the common buffers come after the one and go before the other.
        """
        if name in _BEHIND:
            self.leave()
        yield
        if name in _BEFORE:
            self.enter(runner)
        elif name in _BEHIND:  # a hook may have evaluated, in vain
            self.leave()

    def enter(self, runner: Any) -> None:
        """Let all ranks have the common buffers. A collective operation."""
        if self._legacy or get_world_size() == 1:
            return
        model = unwrap(runner.model)
        buffers = dict(model.named_buffers())
        ranks = rank_state.gather(dict(attributes={}, gradients={}, buffers=buffers), to_all=True)
        found = _common(model, [ranks[rank]['buffers'] for rank in sorted(ranks)])
        # a queue may have another length on each rank: it stays
        self._own = [(buffers[name], value.to(buffers[name])) for name, value in found.items()
                     if buffers[name].shape == value.shape]
        self._swap()

    def leave(self) -> None:
        """Give the model back what this rank had. May be called at any time."""
        if self._own:  # it is called before every step
            self._swap()
            self._own = []

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The model has what this rank had in this block: a checkpoint is written."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for buffer, other in self._own:
            value = buffer.clone()
            buffer.copy_(other)
            other.copy_(value)


def publish(runner: Any, ranks: Mapping[int, Mapping[str, Mapping[str, Any]]],
            state_dict: dict[str, Any]) -> None:
    """Put the common buffers into ``state_dict``, which goes into a checkpoint.

    Args:
        ranks: what the ranks have in which they differ, see :func:`rank_state.gather`.
    """
    averages = [hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook)]
    # EMAHook has put its averages there, buffers included
    prefix = 'ema.module.' if averages else 'model.'
    own = [{name[len(prefix):]: value for name, value in ranks[rank]['buffers'].items()
            if name.startswith(prefix)} for rank in sorted(ranks)]
    for name, value in _common(unwrap(runner.model), own).items():
        if name in state_dict:
            state_dict[name] = value


def _common(model: nn.Module, ranks: Sequence[Mapping[str, torch.Tensor]]
            ) -> dict[str, torch.Tensor]:
    """From each rank's buffers, by name in ``model``, those of the evaluated model."""
    statistics = {f'{path}.{name}'.lstrip('.') for path, module in model.named_modules()
                  if isinstance(module, _NormBase) for name in STATISTICS}
    return {name: mean_of_ranks([rank[name] for rank in ranks]) if name in statistics else value
            for name, value in (ranks[0] if ranks else {}).items()}


def mean_of_ranks(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean, added up in the order of the ranks in double precision.

    >>> mean_of_ranks([torch.tensor([1., 2.]), torch.tensor([2., 2.])])
    tensor([1.5000, 2.0000])
    """
    first, *others = values
    total, equal = first.double(), torch.ones_like(first, dtype=torch.bool)
    for value in others:
        total = total + value.double()
        equal &= value == first
    return torch.where(equal, first, (total / len(values)).to(first.dtype))
