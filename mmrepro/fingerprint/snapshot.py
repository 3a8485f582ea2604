"""Digests of a step, gathered on their devices and fetched with one copy from each."""
from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ..distributed.unwrap import optim_wrappers
from ..distributed.virtual.shards import is_sharded, whole_tensor
from . import digest

Named = Sequence[tuple[str, torch.Tensor]]


class Snapshot:
    """The digests of one iteration; nothing waits for a device before :meth:`fetch`."""

    def __init__(self) -> None:
        # whether the values are digests; kind, names, values
        self._pending: list[tuple[bool, str, Sequence[str], torch.Tensor]] = []

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
        self._pending.append((True, kind, names, values))

    def add_numbers(self, kind: str, names: Sequence[str], values: Sequence[Any]) -> None:
        """Add tensors of one floating-point element each, or Python numbers."""
        for name, value in zip(names, values):
            number = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)
            bits = number.reshape(1).double().view(torch.int64)
            self._pending.append((False, kind, [name], bits))

    def fetch(self) -> Fetched:
        """Return everything that was added, as Python numbers."""
        result = Fetched({}, {})
        fetched = digest.to_numbers([values for *_, values in self._pending])
        for (is_digest, kind, names, _), numbers in zip(self._pending, fetched):
            target = result.digests if is_digest else result.numbers
            target.setdefault(kind, {}).update(zip(names, numbers))
        return result


class Fetched(NamedTuple):
    """Digests (64 bits, as signed integers) and numbers (the bits of a double) by kind and name."""
    digests: dict[str, dict[str, int]]
    numbers: dict[str, dict[str, int]]

    def combined(self, kind: str) -> str:
        """Combine the digests of a kind as :func:`~.digest.combine_digests` does."""
        return digest.combined_hex(self.digests.get(kind, {}))

    def by_name(self, kind: str) -> dict[str, str]:
        return {name: digest.hex_of(value)
                for name, value in sorted(self.digests.get(kind, {}).items())}

    def floats(self, kind: str) -> dict[str, str]:
        """Return exact hexadecimal floats in the order in which they were added."""
        return {name: struct.unpack('<d', struct.pack('<q', value))[0].hex()
                for name, value in self.numbers.get(kind, {}).items()}


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
