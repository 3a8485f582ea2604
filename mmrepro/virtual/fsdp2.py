"""FSDP2 on virtual ranks: which modules it divides, and what it does in another way."""
from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# elements of a block that is gathered by itself; a larger one is divided if it has lists of layers
SMALLEST, LARGEST = 50_000, 8_000_000


def library() -> Any:
    from torch.distributed import fsdp  # slow to import
    return fsdp


def divide(model: nn.Module, mesh: Any, left_whole: set[nn.Parameter]) -> dict[nn.Parameter, Any]:
    """Divide the weights of a model.

    Returns:
        dict: FSDP2's own records of them, by the parameters that the model has now.
    """
    note_unused_parameters()
    reduce_scatter = _tree_reduce_scatter()
    records: dict[nn.Parameter, Any] = {}
    for module in (*_blocks(model), model):
        sharded: Any = library().fully_shard(
            module, mesh=mesh, reshard_after_forward=True, ignored_params=left_whole)
        sharded.set_custom_reduce_scatter(reduce_scatter)
        # the sum as it is
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        # otherwise, ranks whose networks take other paths would add up other parameters
        sharded.set_reduce_scatter_unused_params(True)
        for group in sharded._get_fsdp_state()._fsdp_param_groups:
            leave_graph_alone(group)
            records.update((param.sharded_param, param) for param in group.fsdp_params)
    return records


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered when their forward pass runs.

    They are elements of lists of layers in a backbone, encoder or decoder: other parts of a
    detector are called by methods of their own.
    """
    parts = [part for name, part in model.named_modules()
             if name.rpartition('.')[2] in ('backbone', 'encoder', 'decoder')]
    return list(dict.fromkeys(block for part in parts for block in _blocks_in(part)))


def _blocks_in(part: nn.Module) -> Iterator[nn.Module]:
    for child in part.children():
        size = sum(value.numel() for value in child.parameters())
        in_list = isinstance(part, (nn.Sequential, nn.ModuleList))
        inner = list(_blocks_in(child)) if not in_list or size > LARGEST else []
        yield from inner
        if in_list and not inner and size >= SMALLEST:
            yield child


class LocalSums:
    """Gradients that a rank adds up over iterations, before ranks take their mean.

    FSDP2 hides them, in its ``records`` of divided parameters. Between two passes they are the
    gradients of parameters, as those of whole weights are: all of a tensor, as this rank's part of
    a sum.
    """

    def __init__(self, mesh: Any, records: dict[nn.Parameter, Any]) -> None:
        self._mesh, self._records = mesh, records

    def show(self, parameter: Any, gradient: Tensor) -> None:
        from torch.distributed.tensor import DTensor, Partial
        parameter.grad = DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False)

    def show_all(self) -> None:
        for parameter, record in self._records.items():
            hidden = getattr(record, '_unsharded_param', None)
            if hidden is not None and hidden.grad is not None:
                self.show(parameter, hidden.grad)
                hidden.grad = None

    def hide(self) -> None:
        for parameter, record in self._records.items():
            gradient: Any = parameter.grad
            if gradient is not None and gradient.placements[0].is_partial():
                record.unsharded_param.grad, parameter.grad = gradient.to_local(), None


_thread = threading.local()  # `unused`, see noted()


def noted() -> set[int]:
    """Return the ids of parameters that this rank has not used in its backward pass."""
    if not hasattr(_thread, 'unused'):
        _thread.unused = set()
    return _thread.unused


def note_unused_parameters() -> None:
    """Note the parameters for which FSDP2 asks for zeros, because they have no gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    kind: Any = _fsdp_param.FSDPParam
    zeros = kind.unsharded_zero_grad_data
    if not hasattr(zeros.fget, '_mmrepro_notes'):
        def noting(param: Any) -> Tensor:
            noted().add(id(param.sharded_param))
            return zeros.fget(param)

        noting._mmrepro_notes = True  # type: ignore[attr-defined]
        kind.unsharded_zero_grad_data = property(noting)


def leave_graph_alone(group: Any) -> None:
    """Let FSDP2 finish a group of parameters when all of its gradients are there.

    FSDP2 puts a function into the graph at the inputs of a module, whose backward finishes it. But
    then gradients of an input that others use as well are added up in another order.
    """
    left: set[int] = set()  # indices of parameters whose gradients are to come

    def begin(args: Any, kwargs: Any) -> Any:
        for number, param in enumerate(group.fsdp_params) if torch.is_grad_enabled() else ():
            left.add(number)
            if not hasattr(param.unsharded_param, '_mmrepro_counts'):
                param.unsharded_param._mmrepro_counts = \
                    param.unsharded_param.register_post_accumulate_grad_hook(
                        functools.partial(count, number))
        return args, kwargs

    def count(number: int, param: Tensor) -> None:
        left.discard(number)
        if not left:
            group.post_backward()

    group._register_post_backward_hook = begin


def _tree_reduce_scatter() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

    class TreeReduceScatter(ReduceScatter):
        """Adds up gradients as VirtualDataParallel does: each is scaled first."""

        def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
                     async_op: bool = False) -> Any:
            input_tensor.mul_(1. / group.size())
            scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
            return scatter(output_tensor, input_tensor, op, group)

    return TreeReduceScatter()
