"""The state that a forward and backward pass may change, and the way back.

The walk over the attributes of the modules visits parameters and buffers, numbers, containers,
arrays, generators, and objects of the user's classes. Objects keep their identity; their content is
restored where it has changed.
"""
from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
from mmengine.logging import MessageHub
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from .. import seeds
from ..checkpoint.kept_attributes import kept_attributes
from ..distributed.scheduler import current
from ..distributed.unwrap import buffer_wrappers, optim_wrappers, unwrap
from ..errors import DeterminismError
from ..objects.digests import as_bytes, local_part
from ..objects.walks import (
    GENERATORS,
    PLAIN,
    Walk,
    attributes,
    is_stateful,
    items,
    keys_and_values,
    named_tensors,
    read_state,
    restore_state,
    slot_names,
)
from ..virtual import VirtualDataParallel

MAX_ITEMS = 2000  # of a container that is looked into; longer ones hold data
_LEAVES = (*PLAIN, np.generic, torch.dtype, torch.device)
# of a module: in checkpoints; hooks and submodules, which are walked by themselves
SAVED = ('_parameters', '_buffers')
MACHINERY = ('_modules', '_non_persistent_buffers_set', '_is_full_backward_hook', 'init_cfg')


class _Kind(NamedTuple):
    """The functions that read and write the content of one kind of object in place."""
    cls: tuple[type, ...]
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any] | None  # None: attributes are written one by one


def _refill(obj: Any, content: Any) -> None:
    obj.clear()
    (obj.extend if isinstance(obj, (list, deque)) else obj.update)(content)


_KINDS = (
    # copied to the host, so that a check takes no memory of the device
    _Kind((torch.Tensor, ), lambda tensor: tensor.detach().to('cpu', copy=True),
          lambda tensor, content: tensor.detach().copy_(content)),
    _Kind(GENERATORS, read_state, restore_state),
    _Kind((np.ndarray, ), np.copy, np.copyto),
    _Kind((dict, ), lambda obj: dict(keys_and_values(obj)), _refill),
    _Kind((list, deque), lambda obj: [item for _, item in keys_and_values(obj)], _refill),
    _Kind((set, ), lambda obj: {item for _, item in keys_and_values(obj)}, _refill),
)
_OBJECT = _Kind((object, ), attributes, None)
_MODULE = _Kind((nn.Module, ), lambda module: {
    name: value for name, value in vars(module).items()
    if name not in MACHINERY and '_hooks' not in name}, None)


class _Held(NamedTuple):
    """An object and its content."""
    path: str
    obj: Any
    kind: _Kind
    content: Any
    saved: bool  # whether checkpoints hold it
    saved_names: set[str]  # attributes of it that checkpoints hold

    def path_of(self, name: str) -> str:
        """Return the path of a part that :meth:`differing` has named."""
        return f'{self.path}.{name}' if name else self.path

    def put_back(self, names: Collection[str]) -> None:
        """Restore the parts that :meth:`differing` has named; all of an object without parts."""
        if self.kind.write is not None and names:
            self.kind.write(self.obj, self.content)
        for name in names if self.kind.write is None else ():
            if name not in self.content:  # the class had the value until then
                object.__delattr__(self.obj, name)
            elif name in slot_names(self.obj):
                object.__setattr__(self.obj, name, self.content[name])
            else:  # not by setattr(), which may be the user's
                vars(self.obj)[name] = self.content[name]

    def differing(self) -> list[str]:
        """Return names of the parts that differ from the content; [''] without parts."""
        if isinstance(self.obj, torch.Tensor):  # most of the bytes: compared without a copy
            return [] if _same_bits(self.content, self.obj) else ['']
        now = self.kind.read(self.obj)
        if not isinstance(now, dict) or isinstance(self.obj, GENERATORS):
            return [] if _same(self.content, now) else ['']
        return [name for name in {**self.content, **now}
                if name not in now or name not in self.content
                or not _same(self.content[name], now[name])]


class Attributes:
    """The content of everything that modules hold, when it was captured.

    Args:
        model: its modules are walked.
        more: further objects by name, the start of their paths; they count as saved.
        saved: (owner, name) of attributes that checkpoints keep, beside parameters and buffers.
        left_out: objects that other code restores.
    """

    def __init__(self, model: nn.Module, more: Mapping[str, Any],
                 saved: Iterable[tuple[Any, str]], left_out: Iterable[Any] = ()) -> None:
        self._saved: dict[int, set[str]] = {}
        for owner, name in saved:
            self._saved.setdefault(id(owner), set()).add(name)
        self._held: list[_Held] = []
        left_out = list(left_out)
        # an attribute may be a view of a parameter
        self._memory = {_memory(thing) for thing in left_out
                        if isinstance(thing, torch.Tensor) and _has_content(thing)}
        self._walk = Walk(known=left_out)  # over path, object, whether checkpoints hold it
        # wrappers for several ranks keep state of their communication, which must go on
        modules = {path or 'model': module for path, module in model.named_modules()
                   if not isinstance(module, (DistributedDataParallel, VirtualDataParallel))}
        # first: an attribute may hold a parameter too, which stays saved
        self._walk.add((f'{path}.{name}', vars(module)[name], True)
                       for path, module in modules.items() for name in SAVED)
        for thing in self._walk:
            self._visit(*thing)
        self._walk.queue.clear()
        for path, module in modules.items():
            self._hold(path, module, _MODULE, False)
        for path, obj in more.items():
            self._hold(path, obj, _OBJECT, True)
        for thing in self._walk:
            self._visit(*thing)

    def changed(self, saved: bool = False) -> list[str]:
        """Return the paths of what has changed: of what checkpoints keep, or of all else."""
        return [held.path_of(name) for held in self._held
                for name in (held.differing() if held.saved == saved or held.saved_names else ())
                if (held.saved or name in held.saved_names) == saved]

    def put_back(self, unsaved: bool = True, left: Collection[str] = ()) -> None:
        """Restore what checkpoints keep; if ``unsaved``, all else but the paths in ``left``."""
        for held in self._held:
            held.put_back([name for name in held.differing()
                           if held.saved or name in held.saved_names
                           or unsaved and held.path_of(name) not in left])

    def _visit(self, path: str, obj: Any, saved: bool) -> None:
        if isinstance(obj, (tuple, frozenset)):
            self._look_into(path, obj, saved)
            return
        kind = next((kind for kind in _KINDS if isinstance(obj, kind.cls)), None)
        if kind is None and is_stateful(obj):
            kind = _OBJECT
        if kind is None or not _has_content(obj):
            return
        if not isinstance(obj, torch.Tensor) or _memory(obj) not in self._memory:
            self._hold(path, obj, kind, saved)

    def _hold(self, path: str, obj: Any, kind: _Kind, saved: bool) -> None:
        names = self._saved.get(id(obj), set()) | set(SAVED if kind is _MODULE else ())
        content = kind.read(obj)
        self._held.append(_Held(path, obj, kind, content, saved, names))
        if isinstance(content, (dict, list, set)) and not isinstance(obj, GENERATORS):
            self._look_into(path, content, saved, names, kind in (_OBJECT, _MODULE))

    def _look_into(self, path: str, content: Any, saved: bool, names: Collection[str] = (),
                   of_object: bool = False) -> None:
        if len(content) > MAX_ITEMS:
            return
        keys = content if isinstance(content, dict) else range(len(content))
        self._walk.add((inner, value, saved or key in names)
                       for key, (inner, value) in zip(keys, items(content, path, of_object))
                       if not isinstance(value, (nn.Module, Dataset, *_LEAVES)))


def _memory(tensor: torch.Tensor) -> int:
    return local_part(tensor).untyped_storage().data_ptr()


def _has_content(obj: Any) -> bool:
    if isinstance(obj, torch.Tensor):
        return obj.layout == torch.strided and not (
            obj.is_meta or obj.is_quantized or nn.parameter.is_lazy(obj))
    return not isinstance(obj, np.ndarray) or not (
        obj.dtype.hasobject or isinstance(obj, np.memmap))


def _same(before: Any, now: Any) -> bool:
    """Whether two values are one object, or plain values, tensors or arrays of the same bits."""
    if before is now:
        return True
    if type(before) is not type(now):
        return False
    if isinstance(before, torch.Tensor):
        return _same_bits(before, now)
    if isinstance(before, np.ndarray):
        return (before.dtype, before.shape) == (now.dtype, now.shape) and (
            before.tobytes() == now.tobytes())
    if isinstance(before, _LEAVES):
        return repr(before) == repr(now)
    if isinstance(before, (list, tuple, deque)):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict):
        return list(before) == list(now) and all(map(_same, before.values(), now.values()))
    return isinstance(before, (set, frozenset)) and before == now


def _same_bits(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.dtype != now.dtype or before.shape != now.shape or not _has_content(now):
        return False
    return torch.equal(as_bytes(before.cpu()), as_bytes(now.cpu()))


class StepState:
    """The state of a run before a step: generators, attributes, gradients, loss scale, logs.

    Copies of tensors are held in the memory of the host. Weights that virtual ranks share are left
    out: they belong to the rank that steps for all. So is the state of optimizers, which is larger
    than the weights and which no pass changes. Weights and gradients are included if ``weights``.
    """

    def __init__(self, runner: Any, weights: bool = True) -> None:
        model = unwrap(runner.model)
        self._generators = seeds.capture_rng()
        self._optimizer_state = []
        for wrapper in optim_wrappers(runner.optim_wrapper).values():
            for state in getattr(wrapper.optimizer, 'state', {}).values():
                self._optimizer_state += [(name, value, value._version)
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
        self._takes_buffers = [(wrapper, wrapper.require_forward_param_sync)
                               for wrapper in buffer_wrappers(runner.model).values()]
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

    def check_optimizer(self) -> None:
        """Raise DeterminismError if a forward or backward pass has changed the optimizer's state.
        """
        for name, value, version in self._optimizer_state:
            if value._version != version:
                raise DeterminismError(
                    f'a forward or backward pass has changed {name!r} in the state of the '
                    'optimizer, which is not put back when a step is repeated: change it in a '
                    'hook, after the step, or set randomness.self_checks=dict(steps=0)')

    def put_back(self, unsaved: bool = True, left: Collection[str] = ()) -> None:
        """Put the run back to this state.

        Args:
            unsaved: whether to put back what no checkpoint keeps as well.
            left: paths of it that stay as they are.

        Raises:
            DeterminismError: as :meth:`check_optimizer`.
        """
        self.check_optimizer()
        self._attributes.put_back(unsaved, left)
        for path, weight, trained in self._trainable if unsaved else ():
            if weight.requires_grad != trained and path not in left:
                weight.requires_grad_(trained)
        for module, state in self._saved_by_code:  # as a resume does
            content, metadata = copy.deepcopy(state)
            module._load_from_state_dict(content, '', metadata, False, [], [], [])
        for parameter, gradient, content in self._gradients:
            if gradient is not None and current() is not None:
                # the pass may have made its memory that of a sum, which other ranks still read
                parameter.grad = content.to(gradient.device, copy=True)
                continue
            parameter.grad = gradient
            if gradient is not None:
                # the same tensor: it may be a view into a buffer of the communication
                gradient.detach().copy_(content)
        for wrapper, takes in self._takes_buffers:
            wrapper.require_forward_param_sync = takes
        for logged, before in self._logs:
            logged.clear()
            logged.update(before)
        seeds.restore_rng(self._generators)


def _saves_by_code(module: nn.Module) -> bool:
    """Whether a module has code that says what checkpoints keep of its attributes."""
    return bool(module._state_dict_hooks) or any(
        getattr(type(module), name) is not getattr(nn.Module, name)
        for name in ('get_extra_state', '_save_to_state_dict'))


def _saved(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state that a module's own code saves beside its tensors, and metadata."""
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
