"""A 64-bit digest of a tensor's bits, computed where the tensor lives; digests of values and steps.

The arithmetic is in :mod:`mmrepro.fingerprint.hash_arithmetic`. Digests of a step are gathered on
their devices, and fetched with one copy from each.
"""
from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.model import BaseAveragedModel
from torch import nn

from ..distributed.unwrap import held_averages, optim_wrappers
from ..objects.digests import unpacked
from ..objects.walks import attributes, has_attribute, slot_names
from ..util.text import encoded
from ..virtual import is_sharded, whole_tensor
from . import hash_arithmetic as arithmetic

SCHEME = 1


def text_key(text: str) -> int:
    """Return a number below 2^64: the first 8 bytes of the BLAKE2b digest of ``text``."""
    return int.from_bytes(hashlib.blake2b(encoded(text), digest_size=8).digest(), 'little')


@functools.lru_cache(maxsize=1 << 16)
def _header_key(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return text_key(f'{str(dtype)[6:]} {"x".join(map(str, shape))}')


@functools.lru_cache(maxsize=1 << 16)
def _name_key(name: str) -> int:
    return text_key(f'name {name}')


def tensor_digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return the digest as a 0-d int64 tensor on the tensor's device, without synchronizing.

    Tensors have the same digest if dtype, shape and the bits of all elements agree; strides do not
    count.

    Raises:
        TypeError: ``tensor`` has no bytes of its own (meta).
    """
    return tensor_digests([tensor])[0]


def tensor_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the ``[n]`` int64 digests of tensors on one device, computed with few kernels."""
    if not tensors:
        return torch.zeros(0, dtype=torch.int64)
    device = tensors[0].device
    headers, data, in_parts = [], [], {}
    for number, tensor in enumerate(tensors):
        packed = unpacked(tensor)
        if packed is not None:
            in_parts[number] = _digest_of_parts(*packed)
            tensor = torch.empty(0, device=device)
        headers.append(_header_key(tensor.dtype, tuple(tensor.shape)))
        data.append(_plain(tensor))
    if device.type != 'cpu':
        digests = arithmetic.device_digests(data, headers)
    elif len(data) == 1:  # taken for every module and operator, so it has to be fast
        digests = arithmetic.host_digest(data[0], headers[0])
    else:
        digests = arithmetic.host_digests(data, headers)
    for number, value in in_parts.items():
        digests[number] = value
    return digests


def combine_digests(names: Sequence[str], values: torch.Tensor) -> torch.Tensor:
    """Combine ``[n]`` named digests into a 0-d one; their order does not count."""
    salts = arithmetic.constant(('names', values.device, tuple(names)), lambda: np.array(
        [_name_key(name) for name in names], np.uint64))
    return arithmetic.mix(arithmetic.mix(values ^ salts).sum() + arithmetic.signed(
        (len(names) + 1) * arithmetic.GOLDEN & arithmetic.MASK))


def combined_hex(digests: Mapping[str, int]) -> str:
    """Combine digests that are Python integers, as :func:`combine_digests` does."""
    total = sum(arithmetic.mix_int((value & arithmetic.MASK) ^ _name_key(name))
                for name, value in digests.items())
    return hex_of(arithmetic.mix_int(
        (total + (len(digests) + 1) * arithmetic.GOLDEN) & arithmetic.MASK))


def hex_of(value: int) -> str:
    """Return 16 hexadecimal digits of a signed or unsigned 64-bit integer."""
    return f'{value & arithmetic.MASK:016x}'


def to_hex(values: Sequence[torch.Tensor]) -> list[str]:
    """Return 16 hexadecimal digits for each 0-d digest."""
    return [hex_of(number) for number, in to_numbers([value.view(1) for value in values])]


def to_numbers(values: Sequence[torch.Tensor]) -> list[list[int]]:
    """Return the elements of 1-d tensors, with one copy from each device."""
    result: list[list[int]] = [[]] * len(values)
    for device in {value.device for value in values}:
        mine = [i for i, value in enumerate(values) if value.device == device]
        numbers = iter(torch.cat([values[i] for i in mine]).tolist())
        for i in mine:
            result[i] = list(itertools.islice(numbers, len(values[i])))
    return result


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as contiguous one-dimensional memory."""
    if tensor.is_meta:
        raise TypeError(f'a tensor of {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device} has '
                        'no bits to take a digest of; allowed: tensors with data')
    if tensor.numel() == 0:  # its strides may be anything, which views refuse
        return torch.zeros(0, dtype=torch.uint8, device=tensor.device)
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.numel() < 2:  # counts as contiguous with any stride, bytes need a stride of 1
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(-1)


def _digest_of_parts(kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    names = [f'{kind} {number}' for number in range(len(parts))]
    return combine_digests(names, tensor_digests(parts))


# --- nested values ------------------------------------------------------------------------------

def value_digest(value: Any) -> torch.Tensor:
    """Return a 0-d digest of nested data, on the CPU unless a tensor in it lives elsewhere.

    Dicts (their order does not count), sequences, tensors, arrays, MMEngine's data elements,
    MMDetection's boxes and masks, numbers, text; other objects count by their attributes, and those
    without any that are shown as an address, such as a lock, by their type.
    """
    text: list[str] = []
    tensors: list[torch.Tensor] = []
    _describe(value, text, tensors, ())
    result = torch.tensor(arithmetic.signed(text_key(''.join(text))))
    for device in sorted({tensor.device for tensor in tensors}, key=str):
        mine = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.device == device]
        digests = tensor_digests([tensor for _, tensor in mine])
        names = ['before', *(str(i) for i, _ in mine)]
        before = result.pin_memory() if device.type == 'cuda' and not result.is_cuda else result
        before = before.to(device, non_blocking=True).view(1)
        result = combine_digests(names, torch.cat([before, digests]))
    return result


def _describe(value: Any, text: list[str], tensors: list[torch.Tensor],
              within: tuple[Any, ...]) -> None:
    """Append a description of ``value`` to ``text``, depth first; its tensors to ``tensors``."""
    items = []
    if id(value) in within:
        text.append('(above)')
    elif isinstance(value, torch.Tensor):
        text.append('T,')
        tensors.append(value)
    elif isinstance(value, np.ndarray) and value.dtype != object:
        text.append(f'A {value.dtype} {value.shape},')
        # as bytes, because torch has not all dtypes
        flat = np.ascontiguousarray(value).reshape(-1)
        flat = flat if flat.flags.writeable else flat.copy()
        tensors.append(torch.from_numpy(flat.view(np.uint8)))
    elif isinstance(value, np.generic):
        text.append(f'{value.dtype}:{value.tobytes().hex()},')
    elif value is None or isinstance(value, (bool, int, str, bytes)):
        text.append(f'{type(value).__name__}:{value!r},')
    elif isinstance(value, float):
        # the bits, because NaNs differ and repr does not say so
        text.append(f'float:{struct.pack(">d", value).hex()},')
    elif isinstance(value, PurePath):  # its attributes keep its text and hash, once asked for
        text.append(f'{type(value).__name__}:{str(value)!r},')
    elif isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: repr(item[0]))
        text.append(f'dict{len(items)}')
    elif isinstance(value, (list, tuple, np.ndarray)):
        items = list(enumerate(np.atleast_1d(value) if isinstance(value, np.ndarray) else value))
        text.append(f'list{len(items)}')
    elif isinstance(value, (set, frozenset)):
        items = list(enumerate(sorted(value, key=repr)))
        text.append(f'set{len(items)}')
    elif has_attribute(value, 'all_items'):  # mmengine's data elements
        items = sorted(value.all_items())
        text.append(type(value).__name__)
    elif has_attribute(value, '__dict__') or slot_names(value):
        items = sorted(attributes(value).items())
        text.append(type(value).__qualname__)
    else:
        shown = repr(value)
        shown = '(address)' if ' at 0x' in shown else shown
        text.append(f'{type(value).__qualname__}:{shown}')
    for name, item in items:
        text.append(f'{{{name!r}=')
        _describe(item, text, tensors, (*within, id(value)))
        text.append('}')


Named = Sequence[tuple[str, torch.Tensor]]
# attributes of an averaged model that are tensors of its own anyway, or settings of torch's
_MACHINERY = {*vars(nn.Module()), 'avg_parameters'}


class Snapshot:
    """The digests of one iteration; nothing waits for a device before :meth:`fetch`."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, Sequence[str], torch.Tensor]] = []  # kind, names, values

    def add(self, kind: str, named: Named) -> None:
        """Add the digests of named tensors on any devices.

        Tensors that are divided among ranks are gathered one at a time: a collective operation.
        """
        for name, tensor in named:
            if is_sharded(tensor):
                self.add_digests(kind, [name], tensor_digests([whole_tensor(tensor)]))
        named = [(name, tensor) for name, tensor in named if not is_sharded(tensor)]
        for device in {tensor.device for _, tensor in named}:
            mine = [(name, tensor) for name, tensor in named if tensor.device == device]
            self.add_digests(kind, [name for name, _ in mine],
                             tensor_digests([tensor for _, tensor in mine]))

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
        fetched = to_numbers([values for *_, values in self._pending])
        for (kind, names, _), numbers in zip(self._pending, fetched):
            bits.setdefault(kind, {}).update(zip(names, numbers))
        return Fetched(bits)


class Fetched(NamedTuple):
    """The 64 bits of digests and of double-precision numbers, as signed integers."""
    bits: dict[str, dict[str, int]]  # by kind and name

    def combined(self, kind: str) -> str:
        """Combine the digests of a kind as :func:`~.digest.combine_digests` does."""
        return combined_hex(self.bits.get(kind, {}))

    def by_name(self, kind: str) -> dict[str, str]:
        return {name: hex_of(value)
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
                    value = value_digest(value)
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
        named += [(f'{path}:{name}', value_digest(value))
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
        return bool(value.dtype != object)
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic))
