"""The wrapper of a model on virtual ranks, in the place of DistributedDataParallel."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn
from torch.autograd import Variable

from ...errors import VirtualRanksError
from ...nested import tensors
from .sharded import is_divided


@MODEL_WRAPPERS.register_module()
class VirtualDataParallel(nn.Module):
    """Averages the gradients over the virtual ranks when a backward pass has ended.

    Each gradient is multiplied by 1/V and then added up in a fixed tree over the ranks, see
    :mod:`mmrepro.distributed.reduction_tree`. A parameter without a gradient on some ranks counts
    as zero there; without one on all ranks it has none. As with DistributedDataParallel, weights
    and buffers are those of rank 0 at first, and ``no_sync`` around a forward pass leaves the
    gradients of this rank alone.

    Args:
        module: The model, on its device.
        broadcast_buffers: Take the buffers of rank 0 before every forward pass.
        detect_anomalous_params: As with MMDistributedDataParallel.
        find_unused_parameters, static_graph, gradient_as_bucket_view, bucket_cap_mb: Accepted;
            unused parameters are always found.
    """

    # methods that MMEngine calls; they need `module` and `detect_anomalous_params` only
    train_step = MMDistributedDataParallel.train_step
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step
    _run_forward = MMDistributedDataParallel._run_forward

    def __init__(self, module: nn.Module, broadcast_buffers: bool = True,
                 detect_anomalous_params: bool = False, find_unused_parameters: bool = False,
                 static_graph: bool = False, gradient_as_bucket_view: bool = False,
                 bucket_cap_mb: float | None = None) -> None:
        super().__init__()
        self.module = module
        self.detect_anomalous_params = detect_anomalous_params
        self._group: Any = dist.group.WORLD  # a VirtualGroup
        self._broadcast_buffers, self._take_buffers = broadcast_buffers, True
        self._average = True
        self._queued = False
        self.sharing: Any = None  # this rank's part in shared weights
        self.sharding: Any = None  # its Sharding, of divided weights
        self._take([*module.parameters(), *module.buffers()])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this rank; a copy shares no weights and no process group."""
        return {**self.__dict__, '_group': None, 'sharing': None, 'sharding': None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group = dist.group.WORLD

    def _take(self, values: list[Tensor]) -> None:
        """Overwrite ``values`` with those of rank 0."""
        for value in values:
            dist.broadcast(value.detach(), 0, group=self._group)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave the gradients of forward passes in this block as they are on this rank."""
        before, self._average = self._average, False
        try:
            yield
        finally:
            self._average = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        average = self._average and torch.is_grad_enabled()
        if self._broadcast_buffers and self._take_buffers:
            self._take([*self.module.buffers()])
        outputs = self.module(*args, **kwargs)
        self._take_buffers = average
        if average:
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)
        return outputs

    def _begin(self, gradient: Tensor) -> None:
        """Average gradients when the backward pass that has begun has ended.

        A hook of a parameter would be too early: activation checkpointing has backward passes
        inside of the backward pass.
        """
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued = False
        if self.sharding is not None:
            self.sharding.end_backward()
        parameters = [value for value in self.module.parameters()
                      if value.requires_grad and not is_divided(value)]
        if not parameters:
            return
        used = torch.tensor([value.grad is not None for value in parameters],
                            dtype=torch.int32)
        factor = 1. / self._group.size()
        *means, counts = self._group.reduced(
            lambda: [*(_move_gradient(value, factor) for value in parameters), used],
            dist.ReduceOp.SUM, f'the average of {len(parameters)} gradients')
        views = self.sharing is not None and self.sharing.views
        for parameter, mean, count in zip(parameters, means, counts.tolist()):
            if count:
                # memory of its own, with the layout of the parameter, whatever the bucket is
                parameter.grad = mean if views else torch.empty_like(parameter).copy_(mean)


def _move_gradient(parameter: nn.Parameter, factor: float) -> Tensor:
    """Move the scaled gradient out of the parameter, to free it while other ranks run."""
    gradient, parameter.grad = parameter.grad, None
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.is_sparse:
        raise VirtualRanksError(f'a sparse gradient of a parameter of shape '
                                f'{tuple(parameter.shape)}: virtual ranks average dense ones')
    return gradient.mul_(factor)
