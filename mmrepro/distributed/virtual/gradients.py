"""The wrapper of a model on virtual ranks, in the place of DistributedDataParallel."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn
from torch.autograd import Variable

from .group import VirtualGroup

__all__ = ['VirtualDataParallel']

BUCKET = 25 << 20  # bytes; gradients travel in pieces of at least this size


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

    # what MMEngine calls; they need `module` and `detect_anomalous_params` only
    train_step = MMDistributedDataParallel.train_step
    val_step = MMDistributedDataParallel.val_step
    test_step = MMDistributedDataParallel.test_step
    _run_forward = MMDistributedDataParallel._run_forward

    def __init__(self, module: nn.Module, broadcast_buffers: bool = True,
                 detect_anomalous_params: bool = False, find_unused_parameters: bool = False,
                 static_graph: bool = False, gradient_as_bucket_view: bool = False,
                 bucket_cap_mb: Optional[float] = None) -> None:
        super().__init__()
        self.module = module
        self.detect_anomalous_params = detect_anomalous_params
        self._group: VirtualGroup = dist.group.WORLD
        self._broadcast_buffers, self._take_buffers = broadcast_buffers, True
        self._average = True
        self._queued = False
        self.sharing: Any = None  # this rank's part in shared weights
        self._take(list(module.parameters()) + list(module.buffers()))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Forward passes in this block leave the gradients as they are on this rank."""
        before, self._average = self._average, False
        try:
            yield
        finally:
            self._average = before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.sharing is not None:
            self.sharing.before_forward()
        average = self._average and torch.is_grad_enabled()
        if self._broadcast_buffers and self._take_buffers:
            self._take(list(self.module.buffers()))
        outputs = self.module(*args, **kwargs)
        self._take_buffers = average
        if average:
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._begin)
        return outputs

    def _begin(self, gradient: Tensor) -> None:
        """A backward pass has begun: average when it has ended, and no earlier.

        A hook of a parameter would be too early: activation checkpointing has backward passes
        inside of the backward pass.
        """
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        self._queued = False
        parameters = [one for one in self.module.parameters() if one.requires_grad]
        if not parameters:
            return
        buckets = _buckets(parameters)
        used = torch.tensor([one.grad is not None for one in parameters], dtype=torch.int32)
        flat = [_scaled(bucket, 1. / self._group.size()) for bucket in buckets]
        *means, used = self._group.reduced(
            [*flat, used], dist.ReduceOp.SUM, f'the average of {len(parameters)} gradients')
        found = {id(one) for one, count in zip(parameters, used.tolist()) if count}
        views = self.sharing is not None and self.sharing.views
        for bucket, mean in zip(buckets, means):
            for one, part in zip(bucket, mean.split([one.numel() for one in bucket])):
                if id(one) in found:
                    part = part.view(one.shape)
                    # memory of its own, with the layout of the parameter, whatever the bucket is
                    one.grad = part if views else torch.empty_like(one).copy_(part)

    @torch.no_grad()
    def _take(self, tensors: List[Tensor]) -> None:
        """Give ``tensors`` the values of rank 0."""
        for bucket in _buckets(tensors):
            flat = torch.cat([one.detach().reshape(-1) for one in bucket])
            dist.broadcast(flat, 0, group=self._group)
            for one, part in zip(bucket, flat.split([one.numel() for one in bucket])):
                one.detach().copy_(part.view(one.shape))


def _scaled(parameters: List[nn.Parameter], factor: float) -> Tensor:
    """The gradients, times ``factor``, one after the other; the parameters have none afterwards."""
    flat = parameters[0].new_empty(sum(one.numel() for one in parameters))
    for one, part in zip(parameters, flat.split([one.numel() for one in parameters])):
        gradient, one.grad = one.grad, None  # while other ranks run, the sum is kept only
        if gradient is None:
            part.zero_()
        elif gradient.is_sparse:
            raise NotImplementedError(f'a sparse gradient of a parameter of shape '
                                      f'{tuple(one.shape)}: virtual ranks average dense ones')
        else:
            torch.mul(gradient, factor, out=part.view(one.shape))
    return flat


def _buckets(tensors: List[Any]) -> List[List[Any]]:
    """Tensors of one type and device together, in pieces of about :data:`BUCKET` bytes."""
    found: List[List[Any]] = []
    open_ones: Dict[Tuple[Any, Any], List[Any]] = {}
    sizes: Dict[Tuple[Any, Any], int] = {}
    for one in tensors:
        kind = one.dtype, one.device
        if kind not in open_ones or sizes[kind] >= BUCKET:
            open_ones[kind], sizes[kind] = [], 0
            found.append(open_ones[kind])
        open_ones[kind].append(one)
        sizes[kind] += one.numel() * one.element_size()
    return found


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
