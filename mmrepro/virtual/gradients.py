"""The wrapper of a model on virtual ranks, in the place of DistributedDataParallel."""
from __future__ import annotations

import functools
import operator
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import Tensor, nn
from torch.autograd import Variable

from ..distributed.ordered_sums import ReductionTree, combine_of, nodes_of
from ..distributed.scheduler import current
from ..errors import CollectiveMismatch, VirtualRanksError
from ..objects.walks import tensors
from ..util.scoped import replaced
from .exchange import Processes, groups_of

BUCKET = 25 << 20  # bytes: a bucket takes on gradients until it has these
CHUNK = 1 << 18  # bytes, of a part of a bucket whose gradients are added up at once
_OTHER_PARAMETERS = ('this rank trains other parameters than another rank: freeze (requires_grad) '
                     'the same ones, of the same shapes, on all ranks')


def _add_all(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    torch._foreach_add_(left, right)
    return left


def _views(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return tensors of these shapes that lie one after the other at the beginning of ``flat``."""
    sizes = [shape.numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[:sum(sizes)].split(sizes), shapes)]


def _reference_count(flat: Tensor) -> Any:
    """Count the references to the memory of a tensor."""
    # torch 2.1 has no use count: the memory counts as shared
    count = getattr(torch._C, '_storage_Use_Count', lambda pointer: object())
    return count(flat.untyped_storage()._cdata)


class _Row:
    """A sum of each gradient of a bucket: ``flat``, and as views."""

    def __init__(self, bucket: _Bucket) -> None:
        self.flat = bucket.like.new_zeros(bucket.size + bucket.rest)
        self.views = _views(self.flat, bucket.shapes)
        self._references = _reference_count(self.flat)

    def is_free(self) -> bool:
        """Whether no gradient is a view of the memory."""
        return bool(_reference_count(self.flat) == self._references)


class _Bucket:
    """Gradients that travel together, and their sums, in memory that is kept from step to step.

    A node of the trees of gradients is a row.

    Args:
        tensors: Like the gradients, by number.
        processes: The number of processes, among which a sum is divided.
        nodes: The number of rows that are kept.
    """

    def __init__(self, tensors: dict[int, Tensor], processes: int, nodes: int) -> None:
        self.numbers, self.shapes = list(tensors), [tensor.shape for tensor in tensors.values()]
        self.size = sum(shape.numel() for shape in self.shapes)
        self.rest = -self.size % processes  # each process adds up a part of the same size
        self.like = next(iter(tensors.values())).detach()
        self.chunks: list[_Chunk] = []
        self.received: Any = None  # memory for what processes send
        self.rows: list[_Row] = []  # of the pass under way
        self._kept: list[_Row] = []
        self._nodes = nodes
        self.left = 0  # chunks that are still to come
        self.finish: Any = None  # returns the sum, see Processes.begin

    def row(self, number: int) -> _Row:
        if number == len(self.rows):
            row = next((row for row in self._kept if row not in self.rows and row.is_free()), None)
            if row is None:
                row = _Row(self)
                self._kept.append(row)
                del self._kept[:-self._nodes]
            self.rows.append(row)
        return self.rows[number]


class _Chunk:
    """Gradients of a bucket that are next to each other, and are added up at once.

    Args:
        tensors: Like the gradients, by number.
        first: The place of the first one in the bucket.
        memory: Flat, for the products of one rank with 1/V; other chunks use it as well.
    """

    def __init__(self, bucket: _Bucket, tensors: dict[int, Tensor], first: int,
                 memory: Tensor) -> None:
        self._bucket, self.numbers = bucket, list(tensors)
        self._places = slice(first, first + len(tensors))
        self._products = _views(memory, [tensor.shape for tensor in tensors.values()])
        self._early: dict[int, list[Tensor]] = {}  # of ranks that a lower one has to precede

    def open(self, rank: int) -> None:
        """Begin a pass; ``rank`` is the lowest of this process."""
        self.tree = ReductionTree(_add_all)  # values are lists of views of rows
        self._next = rank  # to be added next

    def put(self, rank: int, gradients: Sequence[Tensor], factor: float) -> None:
        """Add the gradients of a rank, times ``factor``, when those of lower ranks are there."""
        if rank != self._next:
            self._early[rank] = [gradient * factor for gradient in gradients]
            return
        self._add(gradients, factor)
        while self._next in self._early:
            self._add(self._early.pop(self._next), 1)

    def _add(self, gradients: Sequence[Tensor], factor: float) -> None:
        """Add the gradients of the next rank: to a row of its own, or to that of the one before."""
        rank, nodes = self._next, self.tree.nodes
        joins = rank % 2 and nodes and nodes[-1][:2] == (0, rank - 1)
        memory = self._products if joins else self._bucket.row(len(nodes)).views[self._places]
        for gradient, product in zip(gradients, memory):
            torch.mul(gradient, factor, out=product)
        self.tree.add_leaf(rank, memory)
        self._next += 1
        self._bucket.left -= 1


class GradientSums:
    """Adds up the gradients of a model over the ranks, as backward passes make them.

    The ranks of a process share it. Every chunk has a tree of its own, so that a rank that waits
    keeps few gradients. With several processes, a bucket is sent when the last rank of this process
    has filled it; all processes send buckets in the same order.
    """

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._kinds: list[Any] = []  # shape, dtype and device of each gradient
        self._buckets: list[_Bucket] = []
        self.chunks: list[_Chunk] = []
        self.chunk_of: dict[int, _Chunk] = {}  # by number of a gradient
        self._is_open = False  # a rank has begun a pass
        self.coming = 0  # ranks that wait for the sums
        self.holders = 0  # ranks that have still to copy the last ones, or have views as gradients

    @property
    def _mine(self) -> list[int]:
        """The ranks of this process, which are consecutive."""
        return self._processes.members[self._processes.mine]

    @property
    def direct(self) -> bool:
        """Whether gradients stay where they are: a process with one rank takes the mean there."""
        return len(self._mine) == 1 and not self._processes.alone

    def open(self, tensors: Sequence[Tensor]) -> None:
        """Take on the gradients of a pass, which are like ``tensors``; every rank calls it."""
        kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        if kinds != self._kinds:
            if self._is_open:
                raise CollectiveMismatch(_OTHER_PARAMETERS)
            self._make_buckets(tensors)
            self._kinds = kinds
        if not self._is_open:
            self._is_open = True
            for bucket in self._buckets:
                bucket.left, bucket.rows = len(self._mine) * len(bucket.chunks), []
            for chunk in self.chunks:
                chunk.open(self._mine[0])

    def _make_buckets(self, tensors: Sequence[Tensor]) -> None:
        """Fill buckets in the order in which backward passes come to most parameters."""
        last = len(tensors) - 1  # is complete when the pass is
        order = [(number, tensors[number]) for number in [*reversed(range(last)), last]]
        groups = groups_of(order, BUCKET)
        self._buckets = [_Bucket(group, len(self._processes.members),
                                 len(self._mine).bit_length() + 1) for group in groups]
        parts = [groups_of(group.items(), CHUNK) for group in groups]
        memory: dict[Any, Tensor] = {}
        for chunk in [chunk for chunks in parts for chunk in chunks]:
            like, size = next(iter(chunk.values())), sum(map(Tensor.numel, chunk.values()))
            kind = like.dtype, like.device
            if kind not in memory or len(memory[kind]) < size:
                memory[kind] = like.detach().new_empty(size)
        for bucket, chunks in zip(self._buckets, parts):
            first = 0
            for chunk in chunks:
                like = next(iter(chunk.values()))
                bucket.chunks.append(_Chunk(bucket, chunk, first, memory[like.dtype, like.device]))
                first += len(chunk)
        self.chunks = [chunk for bucket in self._buckets for chunk in bucket.chunks]
        self.chunk_of = {number: chunk for chunk in self.chunks for number in chunk.numbers}
        if not self._processes.alone:
            nodes = max(len(nodes_of(ranks)) for ranks in self._processes.members)
            for bucket in self._buckets:
                bucket.received = torch.empty(
                    nodes * bucket.row(0).flat.nbytes, dtype=torch.uint8,
                    device=self._processes.device)

    def put(self, rank: int, chunk: _Chunk, gradients: Sequence[Tensor], factor: float) -> None:
        """Add the gradients of a chunk, times ``factor``."""
        chunk.put(rank, gradients, factor)
        if not self._processes.alone:
            self._begin_full()

    def _begin_full(self) -> None:
        """Send the buckets that are full, up to the first that is not."""
        for bucket in self._buckets:
            if bucket.left:
                return
            if bucket.finish is None:
                nodes = len(bucket.chunks[0].tree.nodes)
                bucket.finish = self._processes.begin([row.flat for row in bucket.rows[:nodes]],
                                                      bucket.received, aside=True)

    # an operation in which the ranks meet, see Meeting

    def add(self, rank: int, used: Tensor) -> None:
        """Take the last tensor of the pass."""
        self.put(rank, self.chunks[-1], [used], 1)

    def finish(self) -> list[Tensor]:
        self._is_open = False
        self.holders, self.coming = self.coming, 0
        roots: dict[int, Tensor] = {}
        for bucket in self._buckets:
            if self._processes.alone:
                for chunk in bucket.chunks:
                    chunk.tree.root()
                flat = bucket.rows[0].flat
            else:
                flat, bucket.finish = bucket.finish(combine_of(dist.ReduceOp.SUM)), None
            roots.update(zip(bucket.numbers, _views(flat, bucket.shapes)))
        return [roots[number] for number in range(len(roots))]


class _BackwardPass:
    """A backward pass under way.

    Args:
        task: Its number to autograd.
        parameters: Those whose gradients are averaged, if they are trained.
    """

    def __init__(self, task: int, parameters: Iterable[Tensor] = ()) -> None:
        self.task = task
        parameters = list(parameters)
        self.trained = [value for value in parameters if value.requires_grad]
        # which have a gradient; at the end a checksum of which are trained, as ranks add it up
        self.used = np.zeros(len(self.trained) + 1, np.int32)
        flags = bytes(value.requires_grad for value in parameters)
        self.used[-1] = self.checksum = zlib.crc32(flags) & 0x7fff
        self.missing: dict[_Chunk, set[int]] = {}  # chunks not moved yet -> gradients to come


@MODEL_WRAPPERS.register_module()
class VirtualDataParallel(nn.Module):
    """Averages the gradients over the virtual ranks in a backward pass.

    Each gradient is multiplied by 1/V and then added up in a fixed tree over the ranks, see
    :mod:`mmrepro.distributed.ordered_sums`. A parameter without a gradient on some ranks counts
    as zero there; without one on all ranks it has none. As with DistributedDataParallel, weights
    and buffers are those of rank 0 at first, and ``no_sync`` around a forward pass leaves the
    gradients of this rank alone.

    Args:
        module: The model, on its device.
        broadcast_buffers: Take the buffers of rank 0 before a forward pass, if the last one has
            averaged gradients.
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
        self._broadcast_buffers = broadcast_buffers
        self.require_forward_param_sync = True  # the name that it has in torch
        self._average = True
        self.sharing: Any = None  # this rank's part in shared weights
        self.sharding: Any = None  # its Sharding, of sharded weights
        self._sums: Any = None  # GradientSums of this process
        self._pass: _BackwardPass | None = None  # the backward pass under way
        self._streams = False  # gradients move when they are made; not in the first pass
        self._nested = False  # a backward pass had others inside
        self._heard: list[Tensor] = []  # parameters whose gradients are reported
        self._handles: list[Any] = []
        self._returned: list[Any] = []  # handles of parameters that the last forward pass returned
        # parameters whose gradients are parts of sums that other ranks have as well
        self._with_views: list[Tensor] = []
        self._take([*module.parameters(), *module.buffers()])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this rank; a copy shares no weights and no process group."""
        return {**self.__dict__, '_group': None, 'sharing': None, 'sharding': None,
                '_sums': None, '_pass': None, '_heard': [], '_handles': [], '_returned': [],
                '_with_views': []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._group = dist.group.WORLD

    def _take(self, values: list[Tensor]) -> None:
        """Overwrite ``values`` with those of rank 0."""
        for value in values:
            dist.broadcast(value.detach(), 0, group=self._group)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave the gradients of forward passes in a block as they are on this rank."""
        return replaced(self, _average=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        average = self._average and torch.is_grad_enabled()
        if self._broadcast_buffers and self.require_forward_param_sync:
            self._take([*self.module.buffers()])
        if average and self._sums is None:
            self._sums = self._group.of_processes(GradientSums, 'the sums of gradients')
        if torch.is_grad_enabled():
            self._leave_common_sums()
            while self._returned:
                self._returned.pop().remove()
        if average and self._sums.holders:
            # the sums of this pass can take the memory
            scheduler: Any = current()
            scheduler.wait(lambda: not self._sums.holders, 'a forward pass')
        outputs = self.module(*args, **kwargs)
        self.require_forward_param_sync = average
        begin = self._begin if average else self._begin_local
        if average or self.sharding is not None and torch.is_grad_enabled():
            for tensor in tensors(outputs):
                if tensor.requires_grad:
                    handle = tensor.register_hook(begin)
                    self._returned += [handle] if tensor.is_leaf else []
        return outputs

    def _begin(self, gradient: Tensor) -> None:
        """Average gradients in the backward pass that has begun, and wait for them at its end.

        Activation checkpointing has backward passes inside of the backward pass, which come to
        parameters more than once. What they make is averaged at the end, and the first pass of all
        is for finding that out.
        """
        task = torch._C._current_graph_task_id()
        if self._pass is not None and task == self._pass.task:
            return
        if self._pass is not None:
            raise VirtualRanksError(
                'a backward pass on this virtual rank ended with an error that was caught, and '
                'another pass begins. Other ranks may have added up gradients of the first one')
        if self.sharding is not None:
            self.sharding.begin_backward(average=True)
        self._leave_common_sums()
        begun = self._pass = _BackwardPass(
            task, self.module.parameters() if self.sharding is None else self.sharding.left_whole)
        if begun.trained:
            self._sums.open([*begun.trained, torch.from_numpy(begun.used)])
            # the last one is `used`
            begun.missing = {chunk: set(chunk.numbers) for chunk in self._sums.chunks[:-1]}
        self._listen(begun.trained)
        Variable._execution_engine.queue_callback(self._reduce)

    def _listen(self, trained: list[Tensor]) -> None:
        """Let every gradient be reported when it is made, to :meth:`_ready`; from pass to pass."""
        if len(trained) == len(self._heard) and all(map(operator.is_, trained, self._heard)):
            return
        for handle in self._handles:
            handle.remove()
        self._heard = trained
        if hasattr(Tensor, 'register_post_accumulate_grad_hook'):  # torch 2.1
            self._handles = [
                value.register_post_accumulate_grad_hook(functools.partial(self._ready, number))
                for number, value in enumerate(trained)]

    def _begin_local(self, gradient: Tensor) -> None:
        """Leave the gradients of sharded weights on this rank in the pass that has begun."""
        task = torch._C._current_graph_task_id()
        if self._pass is None or task != self._pass.task:
            self._pass = _BackwardPass(task)
            self.sharding.begin_backward(average=False)
            Variable._execution_engine.queue_callback(self._end_local)

    @torch.no_grad()
    def _end_local(self) -> None:
        self._pass = None
        self.sharding.end_backward(average=False)

    def _ready(self, number: int, parameter: Tensor) -> None:
        begun = self._pass
        if begun is None or not begun.trained:
            return  # of another pass, whose gradients are not averaged
        chunk = self._sums.chunk_of[number]
        if torch._C._current_graph_task_id() == begun.task:
            if self._streams:
                begun.missing[chunk].discard(number)
                if not begun.missing[chunk]:
                    self._move(begun, chunk)
            return
        self._nested = True
        if chunk not in begun.missing:
            raise VirtualRanksError(
                f'a parameter of shape {tuple(parameter.shape)} is used inside and outside of '
                'torch.utils.checkpoint, which began later than the first step: give it '
                'use_reentrant=False')

    def _move(self, begun: _BackwardPass, chunk: _Chunk) -> None:
        """Move the gradients of a chunk into the sums, to free them while other ranks run."""
        del begun.missing[chunk]
        gradients = []
        for number in chunk.numbers:
            parameter = begun.trained[number]
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            elif gradient.is_sparse:
                raise VirtualRanksError('a sparse gradient of a parameter of shape '
                                        f'{tuple(parameter.shape)}: virtual ranks average dense '
                                        'ones')
            else:
                begun.used[number] = 1
                if not self._sums.direct:
                    parameter.grad = None
            gradients.append(gradient.detach())  # without the graph that create_graph=True gives it
        self._sums.put(self._group.rank(), chunk, gradients, 1. / self._group.size())

    def _move_remaining(self, begun: _BackwardPass) -> Tensor:
        """Move the remaining gradients; return which parameters have one."""
        for chunk in list(begun.missing):
            self._move(begun, chunk)
        return torch.from_numpy(begun.used)

    @torch.no_grad()
    def _reduce(self) -> None:
        ended, self._pass = self._pass, None
        assert ended is not None
        self._streams = not self._nested
        if self.sharding is not None:
            self.sharding.end_backward(average=True)
        if not ended.trained:
            return
        views = self.sharing is not None and self.sharing.views
        self._with_views = ended.trained if views else []
        self._sums.coming += 1
        *means, used = self._group.meet(
            f'the average of {len(ended.trained)} gradients',
            functools.partial(self._move_remaining, ended), lambda: self._sums)
        *counts, checksum = used.tolist()
        if checksum != ended.checksum * self._group.size():
            raise CollectiveMismatch(_OTHER_PARAMETERS)
        taken: set[int] = set()
        for parameter, mean, count in zip(ended.trained, means, counts):
            if count and views:
                parameter.grad = mean
            elif count:
                # memory of its own, with the layout of the parameter, whatever the bucket is
                own = parameter.grad
                place = 0 if own is None else own.untyped_storage().data_ptr()
                if own is None or own.stride() != parameter.stride() or place in taken:
                    own = parameter.grad = torch.empty_like(parameter)
                taken.add(place)
                own.copy_(mean)
        if not views:
            self._sums.holders -= 1

    def _leave_common_sums(self) -> None:
        """Copy gradients that are views of sums of all ranks, before this rank adds to them."""
        if not self._with_views:
            return
        for parameter in self._with_views:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        self._with_views = []
        self._sums.holders -= 1
