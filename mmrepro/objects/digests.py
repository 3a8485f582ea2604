"""SHA-256 of nested values: equal only for equal bytes.

The digests of the package, and why each exists:

- :func:`state_digest` is written into files and shown to users, so its form is fixed.
- :func:`exact_digest` tells all values apart and is compared within one version only.
- :mod:`mmrepro.fingerprint.digest`, 64 bits, is computed after every step on the device that holds
  the tensors; SHA-256 would copy them to the host.
- CRC32 of generator states (:mod:`mmrepro.fingerprint.generator_states`) is taken several times
  per operator; a collision hides a hint on the cause, never a difference.
- BLAKE2b with 7 bytes (:mod:`mmrepro.data.sample_check`) fits an integer in shared memory.
- SHA-256 of the bytes of a file seals checkpoints and identifies annotations and images.
"""
from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, BinaryIO, Callable

import numpy as np
import torch

from ..util.text import encoded, shorten
from .walks import attributes, has_attribute, in_slots, items

# objects without content: code, and paths, whose attributes cache hashes
CODE = (type, BuiltinFunctionType, FunctionType, MethodType, ModuleType, PurePath)
ARRAY = '__array_interface__'
_BY_ROWS = 'crow_indices', 'col_indices', 'values'
_BY_COLUMNS = 'ccol_indices', 'row_indices', 'values'
_SPARSE = {  # layout -> methods that return its parts
    torch.sparse_coo: ('_indices', '_values'),
    torch.sparse_csr: _BY_ROWS, torch.sparse_bsr: _BY_ROWS,
    torch.sparse_csc: _BY_COLUMNS, torch.sparse_bsc: _BY_COLUMNS,
}
_CHUNK = 1 << 22  # bytes of a file that are read at a time


def state_digest(state: Any) -> str:
    """Return the SHA-256 of nested values, keys sorted.

    Tensors and arrays count with dtype and shape; objects with their class and attributes, never
    with their address; sets with the sorted ``repr`` of their items; other values with their
    ``repr``.

    Files hold such digests, so their form is fixed: a tuple counts as a list, which is what JSON
    makes of it, and [1, 11] has the digest of [11, 1]. Within a version, use :func:`exact_digest`.
    """
    digest = hashlib.sha256()
    _update(digest, lambda text: digest.update(encoded(text)), state, (), False)
    return digest.hexdigest()


def exact_digest(state: Any) -> str:
    """Return a digest that tells all values apart, but for the order of a dict's keys.

    Not for files: its form may change.

    >>> state_digest([1, 11]) == state_digest((11, 1))
    True
    >>> len({exact_digest(value) for value in ([1, 11], [11, 1], (1, 11), [1, [11]], ['1', 11])})
    5
    """
    digest = hashlib.sha256()

    def write(text: str) -> None:
        content = encoded(text)
        digest.update(b'%d %b' % (len(content), content))

    _update(digest, write, state, (), True)
    return digest.hexdigest()


def file_digest(file: BinaryIO, size: int = sys.maxsize) -> str:
    """Return the SHA-256 of an open file, or of its first ``size`` bytes."""
    digest = hashlib.sha256()
    file.seek(0)
    while block := file.read(min(_CHUNK, size)):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is divided among ranks (``DTensor``)."""
    part: torch.Tensor = getattr(tensor, '_local_tensor', tensor)
    return part


def unpacked(tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]] | None:
    """Return the kind of a tensor that is no block of memory, and the dense tensors in it.

    Sparse, nested, quantized ones and those of MKL-DNN; None for all others.
    """
    if tensor.is_nested:  # without a shape
        return f'nested {tensor.layout} {tensor.dtype}', [*tensor.detach().unbind()]
    if tensor.is_quantized:
        return _dequantizable(tensor)
    if tensor.layout == torch.strided:
        return None
    kind = f'{tensor.layout} {tuple(tensor.shape)}'
    parts = _SPARSE.get(tensor.layout)
    if parts is None:
        return kind, [tensor.detach().to_dense()]
    return kind, [getattr(tensor.detach(), name)() for name in parts]


def _dequantizable(tensor: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    kind = f'{tensor.qscheme()} {tensor.dtype} {tuple(tensor.shape)}'
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        scale = torch.tensor([tensor.q_scale(), tensor.q_zero_point()], dtype=torch.float64)
        return kind, [tensor.int_repr(), scale]
    return f'{kind} {tensor.q_per_channel_axis()}', [
        tensor.int_repr(), tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat; in the same memory if it is contiguous.

    A view whose conjugate or sign is computed when it is read has no memory of its own.
    """
    flat = local_part(tensor).detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.stride() != (1, ):  # a single element counts as contiguous with any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def shared_array(content: torch.Tensor) -> np.ndarray:
    """Return the bytes of a tensor of the host, see :func:`as_bytes`, as an array in its memory.

    After ``Tensor.numpy()`` torch would refuse to resize that memory, as observers of quantization
    and sharded weights do.
    """
    return np.from_dlpack(content)


def _update(digest: Any, write: Callable[[str], None], value: Any, above: tuple[int, ...],
            exact: bool) -> None:
    """Add a value to a digest. It is held by the objects with the ids ``above``, and may hold them.
    """
    def update(part: Any, within: tuple[int, ...] = above) -> None:
        _update(digest, write, part, within, exact)

    packed = unpacked(value) if isinstance(value, torch.Tensor) else None
    if packed is not None:
        write(packed[0])
        update(packed[1])
    elif isinstance(value, torch.Tensor):
        write(f'tensor {value.dtype} {tuple(value.shape)}')
        digest.update(shared_array(as_bytes(value.cpu())))  # numpy has no bfloat16
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        # the repr of a long array leaves most of it out
        write(f'array {value.dtype} {value.shape}')
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        write(f'dict {len(value)}')
        for key in sorted(value, key=repr):
            write(repr(key))
            update(value[key])
    elif isinstance(value, np.ndarray):
        if exact:
            write(f'array of objects {value.shape}')
        update(value.tolist())
    elif isinstance(value, (list, tuple)):
        write(f'{type(value).__name__ if exact else "list"} {len(value)}')
        for item in value:
            update(item)
    elif isinstance(value, (set, frozenset)):
        if exact:
            write(type(value).__name__)
        update(sorted(map(repr, value)))
    elif _has_parts(value) and id(value) not in above:
        write(type(value).__qualname__)
        update(_attributes(value), (*above, id(value)))
    else:
        text = repr(value)
        if ' at 0x' in text:
            text = getattr(value, '__qualname__', type(value).__qualname__)
        write(text)


def _has_parts(value: Any) -> bool:
    return not isinstance(value, (*CODE, np.generic)) and (
        has_attribute(value, '__dict__') or bool(in_slots(value)) or has_attribute(value, ARRAY))


def _attributes(value: Any) -> dict[str, Any]:
    if has_attribute(value, 'all_items'):
        # the properties of MMEngine's data elements are elsewhere than in their attributes
        return dict(value.all_items())
    array = {ARRAY: np.asarray(value)} if has_attribute(value, ARRAY) else {}  # an image of Pillow
    return {**attributes(value), **array}


def differences(a: Any, b: Any, path: str = '', depth: int = 20
                ) -> Iterator[tuple[str, Any, Any]]:
    """Yield path and both values of what differs in two nested values; the innermost ones.

    >>> list(differences(dict(a=[1, 2], b=3), dict(a=[1, 3], b=4)))
    [("['a'][1]", 2, 3), ("['b']", 3, 4)]
    """
    if exact_digest(a) == exact_digest(b):
        return
    parts_a, parts_b = _named(a), _named(b)
    inner = False
    if depth and type(a) is type(b) and parts_a.keys() == parts_b.keys():
        for name, part in parts_a.items():
            for difference in differences(part, parts_b[name], path + name, depth - 1):
                inner = True
                yield difference
    if not inner:
        yield path, a, b


def first_difference(a: Any, b: Any, path: str = '') -> tuple[str, str, str] | None:
    """Return where two nested values first differ, and both values there; None if they are equal.

    >>> first_difference(dict(a=[1, 2]), dict(a=[1, 3]))
    ("['a'][1]", '2', '3')
    """
    return next(((where, _shown(value, other), _shown(other, value))
                 for where, value, other in differences(a, b, path)), None)


def _named(value: Any) -> dict[str, Any]:
    """Return the parts of a value, by the text that follows its name."""
    if isinstance(value, (list, tuple)):
        return dict(items(value, ''))
    if isinstance(value, dict):
        return dict(items({key: value[key] for key in sorted(value, key=repr)}, ''))
    packed = unpacked(value) if isinstance(value, torch.Tensor) else None
    if packed is not None:
        return {f' ({packed[0]}, part {number})': part for number, part in enumerate(packed[1])}
    if isinstance(value, (torch.Tensor, np.ndarray)) or not _has_parts(value):
        return {}
    return dict(items(dict(sorted(_attributes(value).items())), '', attributes=True))


def _shown(value: Any, compared: Any) -> str:
    """Show a value; of an array, the first element that differs from that of ``compared``."""
    is_packed = isinstance(value, torch.Tensor) and unpacked(value) is not None
    if is_packed or not isinstance(value, (torch.Tensor, np.ndarray)):
        return shorten(repr(value))
    shape = tuple(value.shape)
    text = f'{value.dtype} {shape}'
    if not isinstance(compared, type(value)) or compared.shape != value.shape or (
            compared.dtype != value.dtype):
        return text
    flat, flat_compared = value.reshape(-1), compared.reshape(-1)
    first = int((_rows(flat) != _rows(flat_compared)).any(1).argmax())
    return f'{flat[first]!r} at {[int(i) for i in np.unravel_index(first, shape)]} of {text}'


def _rows(flat: Any) -> np.ndarray:
    """Return a row for each element of a flat array; rows are equal where bits are."""
    if isinstance(flat, torch.Tensor):
        content = shared_array(as_bytes(flat.cpu()))
    elif flat.dtype.hasobject:
        content = np.array([exact_digest(element) for element in flat])
    else:
        content = np.frombuffer(flat.tobytes(), np.uint8)
    return content.reshape(len(flat), -1)
