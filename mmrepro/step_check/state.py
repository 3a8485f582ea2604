"""Everything that a forward and backward pass may change, and the way back."""
from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.logging import MessageHub
from torch import nn

from .. import seeds
from ..another_process import UserVariables
from ..checkpoint.adapters import kept_attributes
from ..distributed.unwrap import optim_wrappers, unwrap
from ..distributed.virtual.scheduler import current
from ..errors import DeterminismError
from ..nested import named_tensors
from .attributes import Attributes


class StartAttributes:
    """What no checkpoint keeps, as it was when the training of a runner began.

    A resumed run begins with these values of the attributes of modules, and of the variables of
    user code, that steps change. Those that hooks change are set by the hooks again.
    """

    def __init__(self, runner: Any) -> None:
        model = unwrap(runner.model)
        kept = [*model.parameters(), *model.buffers()]
        self._start = Attributes(model, {}, kept_attributes(model), kept)
        self._variables = _variables(model)
        self._changed_by_steps: set[str] = set()

    def note(self, paths: Iterable[str]) -> None:
        """Add paths that a pass of a step has changed."""
        self._changed_by_steps.update(paths)

    def lost(self) -> list[str]:
        """Return the paths that steps have changed since the start."""
        return [path for path in (*self._start.changed(), *self._variables.changed())
                if path in self._changed_by_steps]

    @contextmanager
    def as_resumed(self, paths: Collection[str]) -> Iterator[None]:
        """Restore attributes to their initial values; inside the block, restore variables too."""
        self._start.put_back_lost(paths)
        with self._variables.as_captured(paths):
            yield


class StepState:
    """The state of a run before a step: generators, attributes, gradients, loss scale, logs.

    Copies of tensors are held in the memory of the host. Weights that virtual ranks share are left
    out: they belong to the rank that steps for all. So is the state of optimizers, which is larger
    than the weights and which no pass changes. Weights and gradients are included if ``weights``.
    """

    def __init__(self, runner: Any, weights: bool = True) -> None:
        model = unwrap(runner.model)
        self._generators = seeds.capture_rng()
        self._optimizer_state = [
            (name, value, value._version)
            for wrapper in optim_wrappers(runner.optim_wrapper).values()
            for state in getattr(wrapper.optimizer, 'state', {}).values()
            for name, value in named_tensors(state)]
        left_out = [value for _, value, _ in self._optimizer_state]
        # virtual ranks share weights, and the one that owns them may have stepped already
        if not weights or getattr(runner.model, 'sharing', None) is not None:
            left_out += model.parameters()
        self._attributes = Attributes(model, _of_wrappers(runner), kept_attributes(model), left_out)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None, Any]] = [
            (parameter, parameter.grad,
             None if parameter.grad is None else parameter.grad.detach().to('cpu', copy=True))
            for parameter in (model.parameters() if weights else ())]
        self._trainable = [(f'{name}.requires_grad', parameter, parameter.requires_grad)
                           for name, parameter in model.named_parameters()]
        self._variables = _variables(model)
        hub = MessageHub.get_current_instance()
        # losses may write to it; the arrays of its buffers are replaced, never written to
        self._logs = [(content, dict(content)) for content in (
            hub.log_scalars, hub.runtime_info, *map(vars, hub.log_scalars.values()))]
        self._saved_by_code = [(module, copy.deepcopy(_saved(module)))
                               for module in model.modules() if _saves_by_code(module)]

    def changed(self) -> list[str]:
        """Return the paths of attributes that have changed and that no checkpoint keeps."""
        return [*self._attributes.changed(), *(
            path for path, weight, trained in self._trainable
            if weight.requires_grad != trained)]

    def changed_variables(self) -> list[str]:
        """Return the paths of variables of user code that have changed."""
        return self._variables.changed()

    def put_back_saved_by_code(self) -> None:
        """Load what the code of modules has saved (``get_extra_state``), as a resume does."""
        for module, state in self._saved_by_code:
            content, metadata = copy.deepcopy(state)
            module._load_from_state_dict(content, '', metadata, False, [], [], [])

    def put_back(self, unsaved: bool = True) -> None:
        """Put the run back to this state; if ``unsaved``, what no checkpoint keeps as well.

        Raises:
            DeterminismError: the forward or backward pass has changed the optimizer's state.
        """
        for name, value, version in self._optimizer_state:
            if value._version != version:
                raise DeterminismError(
                    f'a forward or backward pass has changed {name!r} in the state of the '
                    'optimizer, which is not put back when a step is repeated: change it in a '
                    'hook, after the step, or set randomness.self_checks=dict(steps=0)')
        self._attributes.put_back(unsaved)
        for _, weight, trained in self._trainable if unsaved else ():
            if weight.requires_grad != trained:
                weight.requires_grad_(trained)
        self.put_back_saved_by_code()
        for parameter, gradient, content in self._gradients:
            if gradient is not None and current() is not None:
                # the pass may have made its memory that of a sum, which other ranks still read
                parameter.grad = content.to(gradient.device, copy=True)
                continue
            parameter.grad = gradient
            if gradient is not None:
                # the same tensor: it may be a view into a buffer of the communication
                gradient.detach().copy_(content)
        for logged, before in self._logs:
            logged.clear()
            logged.update(before)
        seeds.restore_rng(self._generators)


def _variables(model: nn.Module) -> UserVariables:
    # virtual ranks take turns within a pass, and share the variables of a process
    return UserVariables(model.modules() if current() is None else ())


def _saves_by_code(module: nn.Module) -> bool:
    """Whether a module has code that says what checkpoints keep of its attributes."""
    return bool(module._state_dict_hooks) or any(
        getattr(type(module), name) is not getattr(nn.Module, name)
        for name in ('get_extra_state', '_save_to_state_dict'))


def _saved(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a module's own code saves beside its parameters and buffers, and metadata."""
    state: dict[str, Any] = {}
    metadata = dict(version=module._version)
    module._save_to_state_dict(state, '', False)
    for hook in module._state_dict_hooks.values():
        hook(module, state, '', metadata)
    # virtual ranks may share parameters, which belong to the rank that steps
    return {name: value for name, value in state.items()
            if name not in module._parameters and name not in module._buffers}, metadata


def _of_wrappers(runner: Any) -> dict[str, Any]:
    """Return optimizer wrappers, which count losses, and their scalers, which begin lazily."""
    wrappers = optim_wrappers(runner.optim_wrapper)
    return {**{f'optim_wrapper {name}': wrapper for name, wrapper in wrappers.items()},
            **{f'loss_scaler {name}': wrapper.loss_scaler for name, wrapper in wrappers.items()
               if getattr(wrapper, 'loss_scaler', None) is not None}}
