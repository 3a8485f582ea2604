"""Digests of a step, gathered on their devices and fetched with one copy from each."""
from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.model import BaseAveragedModel
from torch import nn

from ..distributed.unwrap import held_averages, optim_wrappers
from ..virtual import is_sharded, whole_tensor
from . import digest

Named = Sequence[tuple[str, torch.Tensor]]
# attributes of an averaged model that are tensors of its own anyway, or settings of torch's
_MACHINERY = {*vars(nn.Module()), 'avg_parameters'}


class Snapshot:
    """The digests of one iteration; nothing waits for a device before :meth:`fetch`."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, Sequence[str], torch.Tensor]] = []  # kind, names, values

    def add(self, kind: str, named: Named) -> None:
        """Add the digests of named tensors on any devices.

        Those that are divided among ranks are gathered, one at a time: a collective operation.
        """
        for name, tensor in named:
            if is_sharded(tensor):
                self.add_digests(kind, [name], digest.tensor_digests([whole_tensor(tensor)]))
        named = [(name, tensor) for name, tensor in named if not is_sharded(tensor)]
        for device in {tensor.device for _, tensor in named}:
            mine = [(name, tensor) for name, tensor in named if tensor.device == device]
            self.add_digests(kind, [name for name, _ in mine],
                             digest.tensor_digests([tensor for _, tensor in mine]))

    def add_digests(self, kind: str, names: Sequence[str], values: torch.Tensor) -> None:
        self._pending.append((kind, names, values))

    def add_numbers(self, kind: str, names: Sequence[str], values: Sequence[Any]) -> None:
        """Add tensors of one floating-point element each, or Python numbers."""
        for name, value in zip(names, values):
            number = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
            self._pending.append((kind, [name], number.reshape(1).double().view(torch.int64)))

    def fetch(self) -> Fetched:
        """Return everything that was added, as Python numbers."""
        bits: dict[str, dict[str, int]] = {}
        fetched = digest.to_numbers([values for *_, values in self._pending])
        for (kind, names, _), numbers in zip(self._pending, fetched):
            bits.setdefault(kind, {}).update(zip(names, numbers))
        return Fetched(bits)


class Fetched(NamedTuple):
    """The 64 bits of digests and of double-precision numbers, as signed integers."""
    bits: dict[str, dict[str, int]]  # by kind and name

    def combined(self, kind: str) -> str:
        """Combine the digests of a kind as :func:`~.digest.combine_digests` does."""
        return digest.combined_hex(self.bits.get(kind, {}))

    def by_name(self, kind: str) -> dict[str, str]:
        return {name: digest.hex_of(value)
                for name, value in sorted(self.bits.get(kind, {}).items())}

    def floats(self, kind: str) -> dict[str, str]:
        """Return exact hexadecimal floats in the order in which they were added."""
        return {name: struct.unpack('<d', struct.pack('<q', value))[0].hex()
                for name, value in self.bits.get(kind, {}).items()}


def gradients_of(names: dict[int, str], parameters: Sequence[torch.Tensor]) -> Named:
    """Return the existing gradients by name; ``names`` is by ``id`` of the parameter."""
    return [(names.get(id(parameter), f'unnamed {i}'), parameter.grad)
            for i, parameter in enumerate(parameters) if parameter.grad is not None]


def named_state(names: dict[int, str], optim_wrapper: Any) -> Named:
    """Return the state of all optimizers and of automatic mixed precision, which may skip steps.

    Numbers and text become tensors that hold their digest.
    """
    tensors = []
    for prefix, wrapper in optim_wrappers(optim_wrapper).items():
        prefix = f'{prefix}:' if prefix else ''
        for number, (parameter, state) in enumerate(wrapper.optimizer.state.items()):
            name = names.get(id(parameter), f'unnamed {number}')
            for key, value in state.items():
                if not isinstance(value, torch.Tensor):
                    value = digest.value_digest(value)
                tensors.append((f'{prefix}{name}.{key}', value))
        scaler = getattr(wrapper, 'loss_scaler', None)
        for key in ('_scale', '_growth_tracker'):
            value = getattr(scaler, key, None)
            if isinstance(value, torch.Tensor):
                tensors.append((f'{prefix}loss_scaler.{key}', value))
    return tensors


def named_averages(hooks: Iterable[Any]) -> Named:
    """Return the state of all averages that hooks hold, as :func:`named_state` does.

    Weights have names such as ``EMAHook.ema_model.backbone.weight``; what belongs to the average
    itself, attributes too, such as ``EMAHook.ema_model:steps``.
    """
    named = []
    for path, average in held_averages(hooks).items():
        for name, value in (*average.named_parameters(), *average.named_buffers()):
            inner = name.startswith('module.')
            named.append((f'{path}.{name[7:]}' if inner else f'{path}:{name}', value.detach()))
        named += [(f'{path}:{name}', digest.value_digest(value))
                  for name, value in _plain_attributes(average).items()]
    return named


def _plain_attributes(average: BaseAveragedModel) -> dict[str, Any]:
    """Return the attributes that are data, those of the classes of the user included."""
    classes = type(average).__mro__
    values: dict[str, Any] = {}
    for cls in reversed(classes[:classes.index(BaseAveragedModel)]):
        values.update((name, value) for name, value in vars(cls).items()
                      if not name.startswith('__'))
    values.update((name, value) for name, value in vars(average).items()
                  if name not in _MACHINERY)
    return {name: list(value) if isinstance(value, deque) else value
            for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return not is_sharded(value)
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic))
