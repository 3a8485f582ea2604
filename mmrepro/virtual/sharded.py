"""Weights, gradients and the optimizer's state, divided among the virtual ranks by FSDP2.

``fully_shard`` runs on the process group of the virtual ranks: each rank keeps a part of every
tensor, so a process that has all ranks keeps all of it, and one of N processes a share of 1/N. The
group adds up gradients in the tree of :mod:`mmrepro.distributed.ordered_sums`, scaled as
:class:`.gradients.VirtualDataParallel` scales them, and the optimizer steps element by element: so
the bits are those of whole weights.

Weights are divided when the training begins, with everything loaded, and are gathered on rank 0
when a checkpoint is written: files do not depend on it. What was gathered waits in a
:class:`TensorFile`, which takes memory only while a tensor is read.
"""
from __future__ import annotations

import functools
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.distributed as dist
from mmengine.dist import is_main_process
from mmengine.model import BaseAveragedModel
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch import Tensor, nn

from ..distributed.agreement import agree
from ..distributed.unwrap import unwrap
from ..errors import RandomnessError
from ..objects.digests import exact_digest, local_part, shared_array
from . import fsdp2, heap, weight_hooks
from .fsdp2 import is_sharded, part_of, whole_tensor

# optimizers of torch whose step computes each element from the same element of other tensors
BY_ELEMENT = ('SGD', 'Adam', 'AdamW', 'NAdam', 'RAdam', 'Adamax', 'Adagrad', 'Adadelta', 'RMSprop',
              'ASGD', 'Rprop')


def problem(runner: Any) -> str:
    """Return why the weights of a run cannot be divided; '' if they can."""
    wrapper = runner.optim_wrapper
    optimizer = getattr(wrapper, 'optimizer', None)
    if runner.model.sharding is not None:
        return 'runner.train() was called before: build a new runner'
    if fsdp2.problem():
        return fsdp2.problem()
    if type(wrapper) not in (OptimWrapper, AmpOptimWrapper):
        return (f'the optimizer wrapper is {type(wrapper).__name__}: allowed are OptimWrapper and '
                'AmpOptimWrapper')
    if not type(optimizer).__module__.startswith('torch.optim') or \
            type(optimizer).__name__ not in BY_ELEMENT:
        return (f'the step of the optimizer {type(optimizer).__name__} is not known to compute '
                f'each element by itself: allowed are {", ".join(BY_ELEMENT)}')
    if wrapper.clip_grad_kwargs and wrapper.clip_func not in _CLIPS:
        name = getattr(wrapper.clip_func, '__qualname__', wrapper.clip_func)
        return (f'the optimizer wrapper clips gradients with {name}, which sees a part of each: '
                f'allowed are {" and ".join(clip.__name__ for clip in _CLIPS)} of torch')
    return weight_hooks.problem(runner.hooks)


class Sharding:
    """The sharded weights of one rank's model, and the state of its optimizer.

    The runner has them loaded, the same on all ranks.
    """

    def __init__(self, runner: Any) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        self._model: Any = unwrap(runner.model)
        # of a hook of the user's, something else may have this name
        averages = [average for average in (
            getattr(hook, 'ema_model', None) for hook in runner.hooks)
            if isinstance(average, BaseAveragedModel)]
        self._optimizer = runner.optim_wrapper.optimizer
        group = dist.new_group(list(range(dist.get_world_size())))
        device = next(self._model.parameters()).device.type
        self._mesh = DeviceMesh.from_group(group, device)
        # frozen ones have no gradient that says when their last use in a backward pass is over;
        # FSDP2 does not divide scalars
        whole = {name: value for name, value in self._model.named_parameters()
                 if not value.requires_grad or value.ndim == 0}
        self.left_whole, self._names_of_whole = list(whole.values()), list(whole)
        parameters, divided = self._divide(self._model)
        self._used, self._sums = divided.used, fsdp2.LocalSums(self._mesh, divided)
        for old, new in parameters.items():
            if old.grad is not None and is_sharded(new):  # of the iterations before a resume
                self._sums.show(new, old.grad)
        self._divide_optimizer(parameters)
        self._divided = {self._model: dict(self._model.named_parameters())}
        for average in averages:
            self._divide(average.module)
            shown = self._divided[average.module] = dict(
                average.module.named_parameters(remove_duplicate=False))
            average.avg_parameters = {name: shown.get(name, value)
                                      for name, value in average.avg_parameters.items()}
        wrapper = runner.optim_wrapper
        if wrapper.clip_grad_kwargs:
            wrapper.clip_func = _CLIPS[wrapper.clip_func]
        if hasattr(wrapper, 'loss_scaler'):
            wrapper.loss_scaler._unscale_grads_ = functools.partial(
                _unscale, wrapper.loss_scaler._unscale_grads_)
        for hook in runner.hooks:
            weight_hooks.adapter_of(hook).adapt_sharded(hook)

    def _divide(self, model: nn.Module
                ) -> tuple[dict[nn.Parameter, nn.Parameter], fsdp2.Divided]:
        """Divide the weights of a model; returns the new ones by those that it had, and more."""
        before = dict(model.named_parameters())
        divided = fsdp2.Divided(
            model, self._mesh, {before[name] for name in self._names_of_whole})
        after = dict(model.named_parameters())
        return {value: after[name] for name, value in before.items()}, divided

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
        return DTensor.from_local(
            part_of(value, parameter).clone(), self._mesh, parameter.placements, run_check=False,
            shape=parameter.shape, stride=parameter.stride())

    def begin_backward(self, average: bool) -> None:
        """Go on with what this rank has added up, and average it over the ranks or not."""
        self._model.set_requires_gradient_sync(average)
        self._used.clear()  # of a pass that an error has ended
        self._sums.hide()

    def end_backward(self, average: bool) -> None:
        """Show the sums of this rank, or drop the gradients that no rank has computed."""
        if not average:
            self._sums.show_all()
            return
        # FSDP2 puts zeros where no rank has computed a gradient
        parameters = [value for value in self._divided[self._model].values()
                      if is_sharded(value)]
        used = torch.tensor([value.grad is not None and id(value) in self._used
                             for value in parameters], dtype=torch.int32)
        dist.all_reduce(used)
        for value, count in zip(parameters, used.tolist()):
            if not count:
                value.grad = None

    @contextmanager
    def gathered(self, folder: str | None) -> Iterator[Callable[[], None]]:
        """Gather weights and the optimizer's state: rank 0 saves them inside of the block.

        A collective operation. Tensors are gathered one at a time.

        Args:
            folder: Where a file may keep them until then; None: the memory of the host does.

        Yields:
            A function that frees the memory of those that have been read from the file.
        """
        weights_of = [value for parameters in self._divided.values()
                      for value in parameters.values()]
        states_of = [self._optimizer.state.get(value, {})
                     for group in self._optimizer.param_groups for value in group['params']]
        divided = [*weights_of, *(value for state in states_of for value in state.values())]
        with TensorFile(folder if is_main_process() else None,
                        filter(is_sharded, divided)) as file:
            weights = {id(value): _gathered_on_rank_0(value, file)
                       for value in weights_of if is_sharded(value)}
            states = [{key: _gathered_on_rank_0(value, file) for key, value in state.items()}
                      for state in states_of]
            with self._shown(weights, states) if is_main_process() else nullcontext():
                yield file.let_go

    @contextmanager
    def _shown(self, weights: dict[int, Tensor], states: list[dict[str, Any]]) -> Iterator[None]:
        """Put whole tensors into state dicts inside the block: weights by id, states by number."""
        def put_weights(module: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
            for name, value in module.named_parameters(remove_duplicate=False):
                if prefix + name in state and id(value) in weights:
                    state[prefix + name] = weights[id(value)]

        def put_states(optimizer: Any, state: dict[str, Any]) -> None:
            state['state'] = {number: states[number] for number in state['state']}

        with ExitStack() as handles:
            for model in self._divided:
                handles.enter_context(model._register_state_dict_hook(put_weights))
            handles.enter_context(self._optimizer.register_state_dict_post_hook(put_states))
            yield


def _gathered_on_rank_0(value: Any, file: TensorFile) -> Any:
    """Return all of a divided tensor on rank 0, in the file; others as they are. Collective."""
    if not is_sharded(value):
        return value
    whole = whole_tensor(value)
    return file.keep(whole.cpu()) if is_main_process() else None


def _clip_norm(parameters: list[Any], max_norm: float, norm_type: float = 2.,
               error_if_nonfinite: bool = False, foreach: bool | None = None) -> Tensor:
    """Clip by the norm of whole gradients, computed as in torch's ``clip_grad_norm_``."""
    norms = [torch.linalg.vector_norm(whole_tensor(value.grad), norm_type) for value in parameters]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f'the norm of order {norm_type} of the gradients is {total.item()}')
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for value in parameters:
        local_part(value.grad).mul_(factor)
    return total


def _clip_values(parameters: list[Any], clip_value: float, foreach: bool | None = None) -> None:
    for value in parameters:
        local_part(value.grad).clamp_(-clip_value, clip_value)


def _unscale(unscale: Callable[..., Any], optimizer: Any, *args: Any) -> dict[torch.device, Tensor]:
    """Unscale the parts of gradients; a step is skipped if any rank has found an infinity."""
    groups = [[_with_gradient(local_part(value.grad)) for value in group['params']
               if value.grad is not None] for group in optimizer.param_groups]
    found: dict[torch.device, Tensor] = unscale(
        SimpleNamespace(param_groups=[dict(params=group) for group in groups]), *args)
    for value in found.values():
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return found


def _with_gradient(gradient: Tensor) -> Tensor:
    value = gradient.detach()
    value.grad = gradient
    return value


_CLIPS: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.utils.clip_grad_norm_: _clip_norm, nn.utils.clip_grad_value_: _clip_values}


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
    if fsdp2.remark():
        runner.logger.warning(fsdp2.remark())
    runner.model.sharding = Sharding(runner)
    heap.keep_large_blocks_apart()  # gathered blocks come and go
    values = list(unwrap(runner.model).parameters())
    kept, total = (sum(map(size, values)) / 1e6 for size in (
        lambda value: local_part(value).numel(), Tensor.numel))
    runner.logger.info(f'sharded weights: of {total:.1f} million, this rank keeps {kept:.1f} '
                       'million, with their gradients and the state of the optimizer')


def gathered_weights(runner: Any, folder: str | None
                     ) -> AbstractContextManager[Callable[[], None]]:
    """Let rank 0 see whole weights in state dicts inside the block; collective if divided.

    Arguments and value are those of :meth:`Sharding.gathered`.
    """
    sharding = getattr(runner.model, 'sharding', None)
    return nullcontext(lambda: None) if sharding is None else sharding.gathered(folder)


ALIGNMENT = 64  # bytes at which a tensor begins


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


class TensorFile:
    """A file without a name, of tensors.

    Args:
        folder: Of the file. None, or where it cannot be written: tensors stay in memory.
        tensors: Of the sizes and types of those that will be kept, in any order.
    """

    def __init__(self, folder: str | None, tensors: Iterable[Tensor]) -> None:
        self._file: Any = None
        self._map: mmap.mmap | None = None
        self._end = 0
        size = sum(map(_room, tensors))
        if folder is None or not size:
            return
        try:
            os.makedirs(folder, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
            self._file.truncate(size)
            self._map = mmap.mmap(self._file.fileno(), size)
        except OSError:  # not a folder to write to, or a file system that does not map files
            pass

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._file is not None:
            self._file.close()

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same values whose memory is the file."""
        if self._map is None or not tensor.numel():
            return tensor
        flat, begin = tensor.contiguous().view(-1), self._end
        array: Any = shared_array(flat.view(torch.uint8))
        content, done = memoryview(array), 0
        try:
            while done < len(content):  # through the map, the file would take memory
                done += os.pwrite(self._file.fileno(), content[done:], begin + done)
        except OSError:  # no room
            return tensor
        self._end += _room(tensor)
        return torch.frombuffer(self._map, dtype=flat.dtype, count=flat.numel(),
                                offset=begin).view(tensor.shape)

    def let_go(self) -> None:
        """Free the memory of what has been read."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
