"""Weights, gradients and the optimizer's state, divided among the virtual ranks by FSDP2.

``fully_shard`` runs on the process group of the virtual ranks: each rank keeps a part of every
tensor, so a process that has all ranks keeps all of it, and one of N processes a share of 1/N. The
group adds up gradients in the tree of :mod:`mmrepro.distributed.reduction_tree`, scaled as
:class:`.gradients.VirtualDataParallel` scales them, and the optimizer steps element by element: so
the bits are those of whole weights.

Weights are divided when the training begins, with everything loaded, and are gathered on rank 0
when a checkpoint is written: files do not depend on it.
"""
from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from mmengine.dist import is_main_process
from mmengine.optim import OptimWrapper
from torch import Tensor, nn

from ...digests import exact_digest, local
from ...errors import RandomnessError
from ..agreement import agree
from ..unwrap import unwrap
from . import weight_hooks

SINCE = '2.13'  # of torch: parameters without a gradient take part in a sum
# optimizers of torch whose step computes each element from the same element of other tensors
BY_ELEMENT = ('SGD', 'Adam', 'AdamW', 'NAdam', 'RAdam', 'Adamax', 'Adagrad', 'Adadelta', 'RMSprop',
              'ASGD', 'Rprop')
HOOKS = {  # that do not take part -> why
    'SyncNormHook': 'SyncNormHook averages whole weights of normalization layers',
    'MeanTeacherHook': 'MeanTeacherHook moves a frozen teacher, and frozen weights stay whole',
}
# elements of a block that is gathered by itself; a larger one is divided if it has lists of layers
SMALLEST, LARGEST = 50_000, 8_000_000


def problem(runner: Any) -> str:
    """Return why the weights of a run cannot be divided; '' if they can."""
    wrapper = runner.optim_wrapper
    optimizer = getattr(wrapper, 'optimizer', None)
    if runner.model.sharding is not None:
        return 'runner.train() was called before: build a new runner'
    if not hasattr(_fsdp().FSDPModule, 'set_reduce_scatter_unused_params'):
        return f'torch {torch.__version__} does not have what it needs: {SINCE} has'
    if type(wrapper) is not OptimWrapper:
        return f'the optimizer wrapper is {type(wrapper).__name__}: allowed is OptimWrapper'
    if not type(optimizer).__module__.startswith('torch.optim') or \
            type(optimizer).__name__ not in BY_ELEMENT:
        return (f'the step of the optimizer {type(optimizer).__name__} is not known to compute '
                f'each element by itself: allowed are {", ".join(BY_ELEMENT)}')
    if wrapper._accumulative_counts > 1:
        return (f'accumulative_counts={wrapper._accumulative_counts}: what ranks accumulate is '
                'not divided; use more virtual ranks instead')
    for hook in runner.hooks:
        if type(hook).__name__ in HOOKS:
            return HOOKS[type(hook).__name__]
    return weight_hooks.problem(runner.hooks)


def _fsdp() -> Any:
    from torch.distributed import fsdp  # slow to import
    return fsdp


class Sharding:
    """The sharded weights of one rank's model, and the state of its optimizer.

    Args:
        runner: with all weights and states loaded, the same on all ranks.
    """

    def __init__(self, runner: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        self._model = unwrap(runner.model)
        averages = [hook.ema_model for hook in runner.hooks if hasattr(hook, 'ema_model')]
        self._optimizer = runner.optim_wrapper.optimizer
        group = dist.new_group(list(range(dist.get_world_size())))
        device = next(self._model.parameters()).device.type
        self._mesh = DeviceMesh.from_group(group, device)
        _note_unused_parameters()
        # frozen ones have no gradient that says when their last use in a backward pass is over;
        # FSDP2 does not divide scalars
        whole = {name: value for name, value in self._model.named_parameters()
                 if not value.requires_grad or value.ndim == 0}
        self.left_whole, self._names_of_whole = list(whole.values()), list(whole)
        self._reduce_scatter = _tree_reduce_scatter()
        self._divide_optimizer(self._divide(self._model))
        self._divided = {self._model: dict(self._model.named_parameters())}
        for average in averages:
            self._divide(average.module)
            divided = self._divided[average.module] = dict(
                average.module.named_parameters(remove_duplicate=False))
            average.avg_parameters = {name: divided.get(name, value)
                                      for name, value in average.avg_parameters.items()}
        if runner.optim_wrapper.clip_grad_kwargs:
            runner.optim_wrapper.clip_func = _CLIPS[runner.optim_wrapper.clip_func.__name__]

    def _divide(self, model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
        """Divide the weights of a model; returns the new parameters by those that it had."""
        before = dict(model.named_parameters())
        left_whole = {before[name] for name in self._names_of_whole}
        for module in (*_blocks(model), model):
            sharded: Any = _fsdp().fully_shard(
                module, mesh=self._mesh, reshard_after_forward=True, ignored_params=left_whole)
            _leave_graph_alone(sharded)
            sharded.set_custom_reduce_scatter(self._reduce_scatter)
            # the sum as it is
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
            # otherwise, ranks whose networks take other paths would add up other parameters
            sharded.set_reduce_scatter_unused_params(True)
        after = dict(model.named_parameters())
        return {value: after[name] for name, value in before.items()}

    def _divide_optimizer(self, parameters: dict[nn.Parameter, nn.Parameter]) -> None:
        state = dict(self._optimizer.state)
        for group in self._optimizer.param_groups:
            group['params'] = [parameters[old] for old in group['params']]
        self._optimizer.state.clear()
        for old, entries in state.items():
            self._optimizer.state[parameters[old]] = {
                key: self._part_of(value, parameters[old])
                if is_sharded(parameters[old]) and isinstance(value, Tensor)
                and value.shape == old.shape else value
                for key, value in entries.items()}

    def _part_of(self, value: Tensor, parameter: Any) -> Tensor:
        """Return this rank's part of a tensor, divided as the parameter is."""
        from torch.distributed.tensor import DTensor
        rows = len(parameter.to_local())
        # as torch.chunk: all ranks but the last ones have the same number of rows
        start = -(-len(value) // dist.get_world_size()) * dist.get_rank()
        return DTensor.from_local(
            value[start:start + rows].clone(), self._mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride())

    def end_backward(self) -> None:
        """Take the gradients away that no rank has computed: FSDP2 puts zeros there."""
        unused = _noted()
        parameters = [value for value in self._divided[self._model].values()
                      if is_sharded(value)]
        used = torch.tensor([value.grad is not None and id(value) not in unused
                             for value in parameters], dtype=torch.int32)
        unused.clear()
        dist.all_reduce(used)
        for value, count in zip(parameters, used.tolist()):
            if not count:
                value.grad = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather weights and the optimizer's state: rank 0 saves them inside of the block.

        A collective operation. Tensors are gathered one at a time, into the memory of the host.
        """
        weights = {id(value): _kept(value) for parameters in self._divided.values()
                   for value in parameters.values() if is_sharded(value)}
        states = [{key: _kept(value) for key, value in self._optimizer.state[value].items()}
                  if value in self._optimizer.state else {}
                  for group in self._optimizer.param_groups for value in group['params']]
        if not is_main_process():
            yield
            return

        def put_weights(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
            for name, value in module.named_parameters(remove_duplicate=False):
                if prefix + name in state and id(value) in weights:
                    state[prefix + name] = weights[id(value)]

        def put_states(optimizer: Any, state: dict[str, Any]) -> None:
            state['state'] = {number: states[number] for number in state['state']}

        handles = [*(model._register_state_dict_hook(put_weights) for model in self._divided),
                   self._optimizer.register_state_dict_post_hook(put_states)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def is_sharded(value: Any) -> bool:
    """Whether a tensor is divided among ranks."""
    return hasattr(value, 'to_local')


def whole_tensor(value: Any) -> Tensor:
    """Return all of a divided tensor, which the ranks of a process share; others as they are.

    A collective operation.
    """
    if not is_sharded(value):
        return value
    part = value.to_local().detach()
    padded = part.new_zeros(-(-len(value) // dist.get_world_size()), *value.shape[1:])
    padded[:len(part)] = part
    group: Any = dist.group.WORLD
    flat: Tensor = group.merged(padded, torch.cat, 'the whole of a tensor')
    return flat[:value.numel()].view(value.shape)


def _kept(value: Any) -> Any:
    """Return all of a divided tensor on rank 0, in the memory of the host; others as they are."""
    if not is_sharded(value):
        return value
    whole = whole_tensor(value)
    return whole.cpu() if is_main_process() else None


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


_thread = threading.local()  # `unused`: ids of parameters that this rank has not used


def _noted() -> set[int]:
    if not hasattr(_thread, 'unused'):
        _thread.unused = set()
    return _thread.unused


def _note_unused_parameters() -> None:
    """Note the parameters for which FSDP2 asks for zeros, because they have no gradient."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param
    kind: Any = _fsdp_param.FSDPParam
    zeros = kind.unsharded_zero_grad_data
    if not hasattr(zeros.fget, '_mmrepro_notes'):
        def noted(param: Any) -> Tensor:
            _noted().add(id(param.sharded_param))
            return zeros.fget(param)

        noted._mmrepro_notes = True  # type: ignore[attr-defined]
        kind.unsharded_zero_grad_data = property(noted)


def _leave_graph_alone(module: Any) -> None:
    """Let FSDP2 finish a module when all of its gradients are there.

    FSDP2 puts a function into the graph at the inputs of a module, whose backward finishes it. But
    then gradients of an input that others use as well are added up in another order.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        left: set[int] = set()  # indices of parameters whose gradients are to come

        def begin(args: Any, kwargs: Any, group: Any = group, left: set[int] = left) -> Any:
            for number, param in enumerate(group.fsdp_params) if torch.is_grad_enabled() else ():
                left.add(number)
                if not hasattr(param.unsharded_param, '_mmrepro_counts'):
                    param.unsharded_param._mmrepro_counts = \
                        param.unsharded_param.register_post_accumulate_grad_hook(
                            functools.partial(count, group, left, number))
            return args, kwargs

        def count(group: Any, left: set[int], number: int, param: Tensor) -> None:
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


def _clip_norm(parameters: list[Any], max_norm: float, norm_type: float = 2.,
               error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """Clip by the norm of whole gradients, computed as in torch's ``clip_grad_norm_``."""
    norms = [torch.linalg.vector_norm(whole_tensor(value.grad), norm_type) for value in parameters]
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f'the norm of order {norm_type} of the gradients is {total.item()}')
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for value in parameters:
        local(value.grad).mul_(factor)
    return total


def _clip_values(parameters: list[Any], clip_value: float, foreach: bool | None = None) -> None:
    for value in parameters:
        local(value.grad).clamp_(-clip_value, clip_value)


_CLIPS = {'clip_grad_norm_': _clip_norm, 'clip_grad_value_': _clip_values}


def shard_weights(runner: Any) -> None:
    """Divide the weights of a training that is about to begin among the virtual ranks.

    Every rank calls this function when its weights are loaded and its hooks are ready.

    Raises:
        RandomnessError: it is not possible, says why.
    """
    text = problem(runner)
    wrapper = runner.optim_wrapper
    digest = '' if text else exact_digest([
        {name: value.detach() for name, value in unwrap(runner.model).named_parameters()},
        wrapper.state_dict()])
    starts = agree('the start of a training with sharded weights', (text, digest), list)
    text = next(filter(None, (start[0] for start in starts)), '')
    if not text and len({start[1] for start in starts}) > 1:
        text = 'weights or the state of the optimizer are not the same on all ranks'
    if text:
        raise RandomnessError(f"randomness.virtual_ranks.memory='sharded', and {text}. Other kinds "
                              "of memory are None, 'shared' and 'separate'")
    runner.model.sharding = Sharding(runner)


def whole(runner: Any) -> AbstractContextManager[None]:
    """Let rank 0 see whole weights in state dicts inside the block; collective if divided."""
    sharding = getattr(runner.model, 'sharding', None)
    return nullcontext() if sharding is None else sharding.whole()
