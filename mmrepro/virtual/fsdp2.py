"""FSDP2 on virtual ranks: the modules that it divides, and its behavior that differs there.

This is the one module that uses names of FSDP2 which are no public ones: those of :data:`OF_TORCH`,
and what :func:`_of_torch` reads. Nothing of torch's is replaced but a method of the groups of
parameters of one model, which goes with it. The last functions are about the tensors that it has
divided: each rank keeps some of the rows.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import RandomnessError
from ..objects.digests import local_part
from ..util.text import listed

TRIED = ('2.13', )  # releases of torch that sharded weights were tried with
# attributes of FSDPModule; releases before 2.13 lack the last, in which parameters without a
# gradient take part in a sum
OF_TORCH = ('set_custom_reduce_scatter', 'set_gradient_divide_factor',
            'set_force_sum_reduction_for_comms', 'set_requires_gradient_sync', '_get_fsdp_state',
            'set_reduce_scatter_unused_params')
# elements of a block that is gathered by itself; a larger one is divided if it has lists of layers
SMALLEST, LARGEST = 50_000, 8_000_000


def library() -> Any:
    from torch.distributed import fsdp  # slow to import
    return fsdp


def problem() -> str:
    """Return the names that this release of torch lacks, as text; '' for none."""
    missing = [name for name in OF_TORCH if not hasattr(library().FSDPModule, name)]
    return _unknown([f'FSDPModule.{name}' for name in missing]) if missing else ''


def remark() -> str:
    """Return a warning if this release of torch was not tried, else ''."""
    if '.'.join(torch.__version__.split('.')[:2]) in TRIED:
        return ''
    return (f'sharded weights were tried with torch {listed(TRIED)}, and this is torch '
            f'{torch.__version__}')


def _unknown(names: Sequence[str]) -> str:
    return (f'torch {torch.__version__} does not have {listed(names)}: sharded weights were '
            f'tried with torch {listed(TRIED)}')


def _of_torch(thing: Any, *names: str) -> list[Any]:
    """Return attributes of an object of FSDP2 whose names are not public.

    Raises:
        RandomnessError: this release of torch does not have one; names it.
    """
    cls = thing if isinstance(thing, type) else type(thing)
    missing = [f'{cls.__name__}.{name}' for name in names if not hasattr(thing, name)]
    if missing:
        raise RandomnessError(f"randomness.virtual_ranks.memory='sharded', and {_unknown(missing)}")
    return [getattr(thing, name) for name in names]


class Divided:
    """The divided weights of a model.

    Attributes:
        records: FSDP2's own records of them, by the parameters that the model has now.
        used: ids of parameters to which this rank has added a gradient since the last mean.
    """

    def __init__(self, model: nn.Module, mesh: Any, left_whole: set[nn.Parameter]) -> None:
        self.records: dict[nn.Parameter, Any] = {}
        self.used: set[int] = set()
        for module in (*_blocks(model), model):
            sharded: Any = library().fully_shard(
                module, mesh=mesh, reshard_after_forward=True, ignored_params=left_whole)
            groups, = _of_torch(sharded._get_fsdp_state(), '_fsdp_param_groups')
            sharded.set_custom_reduce_scatter(TreeReduceScatter())
            # the sum as it is
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # otherwise, ranks whose networks take other paths would add up other parameters
            sharded.set_reduce_scatter_unused_params(True)
            for group in groups:
                self._take(group)

    def _take(self, group: Any) -> None:
        params, *_ = _of_torch(group, 'fsdp_params', 'post_backward',
                               '_register_post_backward_hook')
        for param in params:
            parameter, = _of_torch(param, 'sharded_param')
            _of_torch(type(param), 'unsharded_param')  # objects have it once they are gathered
            self.records[parameter] = param
        leave_graph_alone(group, self.used)


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

    def __init__(self, mesh: Any, divided: Divided) -> None:
        self._mesh, self._records, self._used = mesh, divided.records, divided.used

    def show(self, parameter: Any, gradient: Tensor) -> None:
        from torch.distributed.tensor import DTensor, Partial
        parameter.grad = DTensor.from_local(gradient, self._mesh, [Partial()], run_check=False)

    def show_all(self) -> None:
        for parameter, record in self._records.items():
            hidden = getattr(record, 'unsharded_param', None)  # None: it was never gathered
            if hidden is not None and hidden.grad is not None:
                self.show(parameter, hidden.grad)
                hidden.grad = None

    def hide(self) -> None:
        for parameter, record in self._records.items():
            gradient: Any = parameter.grad
            if gradient is not None and gradient.placements[0].is_partial():
                record.unsharded_param.grad, parameter.grad = gradient.to_local(), None
                self._used.add(id(parameter))


def leave_graph_alone(group: Any, used: set[int]) -> None:
    """Let FSDP2 finish a group of parameters when all of its gradients are there.

    The ids of the parameters that get one are added to ``used``: FSDP2 takes zeros for the others.

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
        used.add(id(group.fsdp_params[number].sharded_param))
        if not left:
            group.post_backward()

    group._register_post_backward_hook = begin


class TreeReduceScatter:
    """Adds up gradients as VirtualDataParallel does: each is scaled first.

    The class has the methods of FSDP2's ``ReduceScatter``, which can be imported from no public
    module.
    """

    def allocate(self, size: Any, *, dtype: Any, device: Any) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any,
                 async_op: bool = False) -> Any:
        input_tensor.mul_(1. / group.size())
        scatter = getattr(dist, 'reduce_scatter_single', None) or dist.reduce_scatter_tensor
        return scatter(output_tensor, input_tensor, op, group)


def is_sharded(value: Any) -> bool:
    """Whether a tensor is divided among ranks, or is a rank's part of a sum (``DTensor``)."""
    return hasattr(value, 'to_local')


def part_of(whole: Tensor, like: Any) -> Tensor:
    """Return the rows of a tensor that this rank keeps if it is divided as ``like`` is."""
    # as torch.chunk: all ranks but the last ones have the same number of rows
    start = -(-len(whole) // dist.get_world_size()) * dist.get_rank()
    return whole[start:start + len(local_part(like))]


def whole_tensor(value: Any) -> Tensor:
    """Return all of a divided tensor, which the ranks of a process share; others as they are.

    A collective operation. Of a sum that ranks have still to take, it is this rank's part.
    """
    if not is_sharded(value):
        whole: Tensor = value
        return whole
    part = local_part(value).detach()
    if value.placements[0].is_partial():
        return part
    padded = part.new_zeros(-(-len(value) // dist.get_world_size()), *value.shape[1:])
    padded[:len(part)] = part
    group: Any = dist.group.WORLD
    flat: Tensor = group.merged(padded, torch.cat, 'the whole of a tensor')
    return flat[:value.numel()].view(value.shape)
