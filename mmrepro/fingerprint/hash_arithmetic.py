"""The arithmetic of digests: on the CPU in NumPy, on other devices in PyTorch.

The digest of one tensor, in integers modulo 2^64 (every number here is part of the file format;
a change is another :data:`mmrepro.fingerprint.digest.SCHEME`):

- ``x[j]`` is the 64-bit word at byte ``8 j`` of the elements in logical (row-major) order,
  little-endian, with zeros after the last. Words are grouped in blocks of :data:`BLOCK`.
- The sum of block ``b`` is ``s[b] = sum_j x[j] * KEYS[0, j] + (x[j] >> 32) * KEYS[1, j]``, ``j``
  counted within the block; the shift is that of unsigned numbers.
- ``total = sum_b mix(s[b] + (b + 1) * GOLDEN)``, the digest ``mix(total ^ key(header))`` with
  the header ``'float32 2x3'``, dtype and shape; ``key(text)`` is the first 8 bytes of the text's
  BLAKE2b digest.

Every 32-bit half of a word has a 64-bit key of its own: ``KEYS[0, j]`` the lower and ``2^32 KEYS[0,
j] + KEYS[1, j]`` the upper one. So two fixed blocks that differ, in whatever way, have the same sum
for at most one in 2^33 choices of the keys, usually for one in 2^64 (multiply-shift for vectors, in
Thorup, "High Speed Hashing for Integers and Strings", arXiv:1504.06804). Sums of integers do not
depend on the order of their terms: any blocking, any device gives the same value.
"""
from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, NamedTuple

import numpy as np
import torch

from ..objects.digests import shared_array

BLOCK = 1024  # 64-bit words; a block and its keys stay in the first-level cache
BLOCK_BYTES = 8 * BLOCK
MIN_SHARE = 128  # blocks (1 MiB) of a thread; waking it costs more than fewer blocks do
ROWS = 128  # blocks per call of NumPy: more leave the cache, fewer cost calls
DEVICE_BYTES = 1 << 26  # bytes that a GPU hashes at once; the extra memory is three times this
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: its multiples visit all residues
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # splitmix64's finalizer
KEY_SEED = 0x6D6D726570726F31  # 'mmrepro1'

MAX_CONSTANTS = 256  # cached constants; images of new sizes add new ones

MASK = (1 << 64) - 1
_constants: dict[tuple[Any, ...], torch.Tensor] = {}


def mix_int(value: int) -> int:
    """Apply splitmix64's finalizer, a bijection in which every bit depends on every bit."""
    for shift, factor in MIX:
        value = ((value ^ (value >> shift)) * factor) & MASK
    return value


@functools.lru_cache(maxsize=1)
def keys() -> np.ndarray:
    """Return KEYS: ``[2, BLOCK]`` odd numbers, splitmix64's sequence from :data:`KEY_SEED`."""
    numbers = [mix_int((KEY_SEED + (i + 1) * GOLDEN) & MASK) | 1 for i in range(2 * BLOCK)]
    return np.array(numbers, np.uint64).reshape(2, BLOCK)


# --- on the CPU: NumPy, whose loops over integers are faster than those of PyTorch ---------------

def _mix_array(values: np.ndarray) -> np.ndarray:
    """Mix ``values`` in place and return it."""
    for shift, factor in MIX:
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    return values


class _Scratch(threading.local):
    """Buffer for the upper halves of ROWS blocks; allocating it per call costs page faults."""

    def __init__(self) -> None:
        self.upper = np.empty((ROWS, BLOCK), np.uint64)


_scratch = _Scratch()


def _block_sums(words: np.ndarray, sums: np.ndarray) -> None:
    """Write the ``[n]`` sums of ``[n, BLOCK]`` words; in pieces that stay in the cache."""
    lower, upper = keys()
    scratch = _scratch.upper
    for start in range(0, len(words), ROWS):
        part = words[start:start + ROWS]
        target, shifted = sums[start:start + ROWS], scratch[:len(part)]
        np.right_shift(part, np.uint64(32), out=shifted)
        np.einsum('ij,j->i', part, lower, out=target)
        target += np.einsum('ij,j->i', shifted, upper)


def _many_block_sums(data: np.ndarray, sums: np.ndarray) -> None:
    """Write the sums of the blocks in ``data``, bytes, on as many threads as torch's operators."""
    words = data.view('<u8').reshape(-1, BLOCK)
    threads = torch.get_num_threads()
    if threads == 1 or len(words) < 2 * MIN_SHARE:
        _block_sums(words, sums)
        return
    share = max(MIN_SHARE, -(-len(words) // threads))
    list(_pool(threads).map(_block_sums, *(
        [array[start:start + share] for start in range(0, len(words), share)]
        for array in (words, sums))))


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix='mmrepro-digest')


# threads do not survive a fork: a data loader worker starts its own
os.register_at_fork(after_in_child=_pool.cache_clear)


@functools.cache
def _steps_of(bits: int) -> np.ndarray:
    return np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def _steps_to(count: int) -> np.ndarray:
    """Return the ``[count]`` terms that are added to the sums of blocks 0, 1, ..."""
    return _steps_of(max(10, (count - 1).bit_length()))[:count]


def host_digest(tensor: torch.Tensor, header: int) -> torch.Tensor:
    """Return the ``[1]`` digest of a one-dimensional tensor; the fast path of single tensors."""
    data = shared_array(tensor.view(torch.uint8))
    whole, rest = divmod(len(data), BLOCK_BYTES)
    sums = np.empty(whole + (rest > 0), np.uint64)
    if whole:
        _many_block_sums(data[:len(data) - rest], sums[:whole])
    if rest:
        row = np.zeros((1, BLOCK_BYTES), np.uint8)
        row[0, :rest] = data[len(data) - rest:]
        _block_sums(row.view('<u8'), sums[whole:])
    sums += _steps_to(len(sums))
    total = int(_mix_array(sums).sum())
    # torch.tensor would take longer than all of the above
    return torch.from_numpy(np.array([mix_int(total ^ header)], np.uint64).view(np.int64))


def host_digests(tensors: Sequence[torch.Tensor], headers: Sequence[int]) -> torch.Tensor:
    """Return the digests of one-dimensional tensors; partial blocks are hashed together."""
    arrays = [shared_array(tensor.view(torch.uint8)) for tensor in tensors]
    counts = [-(-len(data) // BLOCK_BYTES) for data in arrays]
    starts = [0, *itertools.accumulate(counts)]
    sums = np.empty(starts[-1], np.uint64)
    partial, rests = [], []  # numbers of partial blocks, and their bytes
    for data, start in zip(arrays, starts):
        whole, rest = divmod(len(data), BLOCK_BYTES)
        _many_block_sums(data[:len(data) - rest], sums[start:start + whole])
        if rest:
            partial.append(start + whole)
            rests.append(data[len(data) - rest:])
    if rests:
        rows = np.zeros((len(rests), BLOCK_BYTES), np.uint8)
        for row, data in zip(rows, rests):
            row[:len(data)] = data
        partial_sums = np.empty(len(rests), np.uint64)
        _block_sums(rows.view('<u8'), partial_sums)
        sums[partial] = partial_sums
    sums += np.concatenate([_steps_to(count) for count in counts])
    running = np.zeros(len(sums) + 1, np.uint64)
    np.cumsum(_mix_array(sums), out=running[1:])
    totals = running[starts[1:]] - running[starts[:-1]]
    values = _mix_array(totals ^ np.array(headers, np.uint64))
    return torch.from_numpy(values.view(np.int64))


# --- on other devices: PyTorch, many tensors in few kernels -------------------------------------

def constant(key: tuple[Any, ...], make: Callable[[], np.ndarray]) -> torch.Tensor:
    """Return a constant uint64 array as int64 on the device ``key[1]``; copied once, cached."""
    if key not in _constants:
        if len(_constants) >= MAX_CONSTANTS:
            _constants.clear()
        device = key[1]
        host = torch.from_numpy(make().view(np.int64))
        if device.type == 'cuda':
            host = host.pin_memory()
        _constants[key] = host.to(device, non_blocking=True)
    return _constants[key]


class _Piece(NamedTuple):
    """Whole blocks of one tensor; the last is filled up with zeros later."""
    number: int  # of the tensor
    first: int  # number of the first block
    data: torch.Tensor  # int32 or uint8


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def mix(values: torch.Tensor) -> torch.Tensor:
    for shift, factor in MIX:
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * signed(factor)
    return values


def device_digests(tensors: Sequence[torch.Tensor], headers: Sequence[int]) -> torch.Tensor:
    """Return the digests of :func:`host_digests`, computed with few kernels on any device."""
    device = tensors[0].device
    totals = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for batch in _batches(tensors):
        totals = totals + _batch_totals(batch, len(tensors), device)
    salts = constant(('headers', device, tuple(headers)), lambda: np.array(headers, np.uint64))
    return mix(totals ^ salts)


def _batches(tensors: Sequence[torch.Tensor]) -> Iterable[list[_Piece]]:
    """Group pieces of one dtype into batches of DEVICE_BYTES."""
    waiting: dict[torch.dtype, list[_Piece]] = {}
    sizes: dict[torch.dtype, int] = {}
    for number, tensor in enumerate(tensors):
        whole = tensor.view(torch.uint8)
        size = whole.numel()
        for start in range(0, size, DEVICE_BYTES):
            data = whole[start:start + DEVICE_BYTES]
            if data.numel() % 4 == 0 and data.storage_offset() % 4 == 0:
                data = data.view(torch.int32)
            batch = waiting.setdefault(data.dtype, [])
            batch.append(_Piece(number, start // BLOCK_BYTES, data))
            sizes[data.dtype] = sizes.get(data.dtype, 0) + data.numel() * data.element_size()
            if sizes[data.dtype] >= DEVICE_BYTES:
                yield waiting.pop(data.dtype)
                del sizes[data.dtype]
    yield from waiting.values()


def _batch_totals(batch: Sequence[_Piece], count: int, device: torch.device) -> torch.Tensor:
    """Return the ``[count]`` contributions of these pieces to the totals of all tensors."""
    width = BLOCK_BYTES // batch[0].data.element_size()
    zeros = torch.zeros(width, dtype=batch[0].data.dtype, device=device)
    parts, layout = [], []
    for piece in batch:
        rest = -piece.data.numel() % width
        parts += [piece.data, zeros[:rest]] if rest else [piece.data]
        layout.append((piece.number, piece.first, -(-piece.data.numel() // width)))
    words = torch.cat(parts).view(torch.int64).view(-1, BLOCK)
    lower, upper = constant(('keys', device), keys)
    sums = (words * lower).sum(1)
    sums += (((words >> 32) & 0xFFFFFFFF) * upper).sum(1)
    where = (device, tuple(layout), count)
    steps = constant(('steps', *where), lambda: np.concatenate(
        [_steps_to(first + n)[first:] for _, first, n in layout]))
    ends = constant(('ends', *where), lambda: _block_ends(layout, count))
    # sums over the blocks of each tensor: adding by index would be refused as non-deterministic
    running = torch.nn.functional.pad(mix(sums + steps).cumsum(0), (1, 0))[ends]
    return running[1] - running[0]


def _block_ends(layout: Sequence[tuple[int, int, int]], count: int) -> np.ndarray:
    """Return ``[2, count]``: where the blocks of every tensor start and end in a batch."""
    owners = np.concatenate([np.full(n, number) for number, _, n in layout])  # ascending
    return np.stack([np.searchsorted(owners, np.arange(count), side)
                     for side in ('left', 'right')]).astype(np.uint64)
