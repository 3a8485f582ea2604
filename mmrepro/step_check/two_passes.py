"""The forward pass of a virtual rank, first without gradients: ``virtual_ranks_memory='low'``.

In models that communicate in the forward pass, a rank waits there for the others and keeps its
activations meanwhile. Here the ranks meet in a first pass that keeps none. Then what it has changed
is put back, and each rank runs forward and backward without waiting: the operations give what they
gave in the first pass.
"""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import Any, Iterator, Tuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.unwrap import unwrap
from ..distributed.virtual.scheduler import current
from ..distributed.virtual.tape import PassesDiffer, Tape
from .check import copied
from .state import StepState

__all__ = ['forward_twice']


def forward_twice(runner: Any) -> None:
    """Let the forward passes of a training on virtual ranks run twice, if the config says so."""
    scheduler = current()
    if scheduler is None or len(scheduler.ranks) == 1 or \
            runner.repro.virtual_ranks_memory != 'low':
        return
    communicating = _communicates_backward(unwrap(runner.model))
    if communicating:
        runner.logger.warning(
            f"randomness.virtual_ranks_memory='low' has no effect on activations: {communicating} "
            'communicates in the backward pass, which needs those of all ranks')
    else:
        runner.model.first_pass = _FirstPass(runner)


def _communicates_backward(model: nn.Module) -> str:
    """The class of a layer whose gradient depends on other ranks; ''."""
    return next((type(module).__name__ for module in model.modules()
                 if 'SyncBatchNorm' in type(module).__name__), '')


class _FirstPass:

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @contextmanager
    def __call__(self, module: nn.Module, args: Tuple[Any, ...], kwargs: dict) -> Iterator[None]:
        """Run the first pass of ``module``; call it again in the block.

        Raises:
            RuntimeError: the passes differ, or the first one needs gradients; says why.
        """
        rank = current().me
        rank.tape = Tape()
        try:
            with _disable_current_modes():
                self._first(module, args, kwargs)
            rank.tape.rewind()
            yield
            rank.tape.end()
        except PassesDiffer as error:
            raise RuntimeError(
                "randomness.virtual_ranks_memory='low' runs every forward pass twice, the first "
                f'time without gradients, and the two differ: {error}. Leave it out') from error
        finally:
            rank.tape = None

    def _first(self, module: nn.Module, args: Tuple[Any, ...], kwargs: dict) -> None:
        state = StepState(self._runner, gradients=False)
        args, kwargs = copied(self._runner, args, kwargs)
        with ExitStack() as contexts:
            for hook in self._runner.hooks:
                if hasattr(hook, 'paused'):
                    contexts.enter_context(hook.paused())
            contexts.enter_context(torch.no_grad())
            # what autocast casts here has no gradient: the second pass must not find it
            contexts.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            module(*args, **kwargs)
        state.put_back()
