"""Streams of random numbers: pure functions of the root seed and of the position in the run.

Every stream is addressed by ``(root, stream, *key)`` and nothing else: not by what ran before, not
by the process that asks. The derivation is part of the file format (``SCHEME``), documented in
``docs/explanation/streams.md`` and pinned by golden values in the tests:

    message = b'mmrepro' | u8 SCHEME | u64 root | field(stream) | field(k) for k in key
    field   = b'i' | i64                      for an integer
            | b's' | u32 length | UTF-8 bytes for a string
    digest  = BLAKE2b(message, 48 bytes)      (RFC 7693, unkeyed; all integers little-endian)

    digest[ 0:16] -> Python's ``random`` (one 128-bit integer)
    digest[16:32] -> NumPy's global generator (four 32-bit words)
    digest[32:40] -> torch's CPU generator (64 bits, of which its Mersenne Twister keeps the low 32)
    digest[40:48] -> every accelerator's generator (64 bits)

A field is self-delimiting, so two different addresses never give the same message, and a 384-bit
digest does not collide in practice. Seeds next to each other (0, 1, 2) share nothing.

A stream may have a root of its own (:class:`RootSeed`), which then stands in the message.
"""
from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, NamedTuple, Union

import numpy as np

SCHEME = 1
MAX_SEED = 2**32 - 1  # the largest seed that NumPy's and MMEngine's own functions take

# name: what is drawn from it
STREAMS = {
    'init': 'building the model, initial weights',
    'sampler': 'permutations and source choice of the samplers',
    'sample': 'everything inside one dataset[i]',
    'hook': 'hooks before a step, loops between two steps, and where an epoch begins and ends',
    'step': 'everything in the main process during one training step',
    'val': 'validation, by training iteration and batch',
    'test': 'testing, by batch',
    'worker': 'a data loading worker outside of any sample',
    'dataset': 'choices made once, while a dataset is loaded',
}

Key = Union[int, str]


class Seeds(NamedTuple):
    """Seeds of one stream, one per generator.

    Attributes:
        python: 128-bit integer for ``random.seed``.
        numpy: four 32-bit words for ``numpy.random.seed``.
        torch: 64-bit integer for the CPU generator.
        accelerator: 64-bit integer for the generators of CUDA, NPU, MLU, MUSA and XPU.
    """
    python: int
    numpy: tuple[int, int, int, int]
    torch: int
    accelerator: int


@dataclass(frozen=True)
class RootSeed:
    """The root of all streams of a run.

    >>> root = RootSeed(42, dict(init=7))
    >>> derive(root, 'init') == derive(7, 'init'), derive(root, 'step', 3) == derive(42, 'step', 3)
    (True, True)

    Attributes:
        seed: 0 to 2**64 - 1.
        streams: roots of single streams, by stream.
    """
    seed: int
    streams: Mapping[str, int] = field(default_factory=dict, hash=False)

    def of(self, stream: str) -> int:
        """Return the root of one stream."""
        return self.streams.get(stream, self.seed)


Root = Union[int, RootSeed]  # roots that functions here accept

_root: RootSeed | None = None
_seed_of_program: int | None = None

_DIGEST = struct.Struct('<16s4IQQ')


def check_seed(seed: object, name: str = 'seed') -> int:
    """Return ``seed`` when it is an integer in [0, 2**32 - 1].

    Raises:
        TypeError: for anything but an integer (a bool is not a seed).
        ValueError: for an integer out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f'{name}={seed!r} has type {type(seed).__name__}; allowed is an int from 0 '
                        f'to {MAX_SEED}')
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f'{name}={seed!r} is out of range; allowed is 0 to {MAX_SEED}')
    return int(seed)


def _field(part: Key) -> bytes:
    if isinstance(part, str):
        text = part.encode()
        return b's' + struct.pack('<I', len(text)) + text
    return b'i' + struct.pack('<q', part)


@lru_cache(maxsize=64)
def _prefix(root_seed: int, stream: str) -> hashlib.blake2b:
    if stream not in STREAMS:
        raise ValueError(f'unknown stream {stream!r}; known are {", ".join(STREAMS)}')
    return hashlib.blake2b(
        b'mmrepro' + struct.pack('<BQ', SCHEME, root_seed) + _field(stream), digest_size=48)


def _digest(root: Root, stream: str, key: tuple[Key, ...]) -> bytes:
    seed = root.of(stream) if isinstance(root, RootSeed) else root
    state = _prefix(seed, stream).copy()
    for part in key:
        state.update(_field(part))
    return state.digest()


def derive(root: Root, stream: str, *key: Key) -> Seeds:
    """Return the seeds of the stream ``(root, stream, *key)``.

    Args:
        root: the run's seed, 0 to 2**64 - 1, or a :class:`RootSeed`.
        stream: one of :data:`STREAMS`.
        key: integers (64 bit, signed) and strings: the position in the run.

    Raises:
        ValueError: for an unknown stream.
        struct.error: for a key part that is neither an integer of 64 bits nor a string.

    >>> derive(0, 'step', 1) == derive(0, 'step', 1)
    True
    >>> derive(0, 'sampler', 1) == derive(1, 'sampler', 0)
    False
    """
    python, a, b, c, d, cpu, accelerator = _DIGEST.unpack(_digest(root, stream, key))
    return Seeds(int.from_bytes(python, 'little'), (a, b, c, d), cpu, accelerator)


def seed_all(root: Root, stream: str, *key: Key) -> None:
    """Put Python, NumPy, torch and every accelerator at the start of a stream."""
    import torch  # not at the top: a process may start again before it needs torch
    digest = _digest(root, stream, key)
    random.seed(int.from_bytes(digest[:16], 'little'))
    np.random.seed(np.frombuffer(digest, np.dtype('<u4'), 4, 16))
    torch.default_generator.manual_seed(int.from_bytes(digest[32:40], 'little'))
    _seed_accelerators(int.from_bytes(digest[40:], 'little'))


def _seed_accelerators(seed: int) -> None:
    import torch
    # A forked worker must not touch CUDA, and before initialization there is no generator yet:
    # torch.cuda.manual_seed_all queues the seed for the moment of initialization.
    if torch.cuda.is_initialized():
        if not torch.cuda._is_in_bad_fork():
            for generator in torch.cuda.default_generators:
                generator.manual_seed(seed)
    elif (torch.version.cuda or torch.version.hip) and torch.utils.data.get_worker_info() is None:
        torch.cuda.manual_seed_all(seed)
    for name in _other_accelerators():
        getattr(torch, name).manual_seed_all(seed)


@cache
def _other_accelerators() -> tuple[str, ...]:
    """Return device modules of MMEngine that this torch has, with a generator to seed."""
    import torch
    modules = {name: getattr(torch, name, None) for name in ('npu', 'mlu', 'musa', 'xpu')}
    return tuple(name for name, module in modules.items() if module is not None
                 and module.is_available() and hasattr(module, 'manual_seed_all'))


def python_generator(root: Root, stream: str, *key: Key) -> random.Random:
    """Return a new ``random.Random`` at the start of a stream."""
    return random.Random(derive(root, stream, *key).python)


def random_state(root: Root, stream: str, *key: Key) -> np.random.RandomState:
    """Return a new ``numpy.random.RandomState`` at the start of a stream.

    Its draws are the same on every platform and version: NumPy has frozen them (NEP 19).
    """
    return np.random.RandomState(np.array(derive(root, stream, *key).numpy, np.uint32))


def root() -> RootSeed | None:
    """Return the root of the run that is active in this process, or None."""
    return _root


def set_root(root: Root | None, of_a_run: bool = True) -> None:
    """Make ``root`` the root of this process (None: no run is active).

    Args:
        of_a_run: False for a seed that a program has set by itself, see :func:`seed_of_program`.
    """
    global _root, _seed_of_program
    if root is not None:
        root = root if isinstance(root, RootSeed) else RootSeed(root)
        check_seed(root.seed)
    _root = root
    _seed_of_program = None if of_a_run or root is None else root.seed


def seed_of_program() -> int | None:
    """Return the seed that a program has set; None if there is none, or a run came since."""
    return _seed_of_program


def capture_rng(accelerators: bool = True) -> tuple[Any, ...]:
    """Return the states of all global generators, for :func:`restore_rng`."""
    import torch
    states = {}
    for name in ('cuda', *_other_accelerators()) if accelerators else ():
        module = getattr(torch, name)
        if getattr(module, 'is_initialized', bool)() and not getattr(
                module, '_is_in_bad_fork', bool)():
            states[name] = module.get_rng_state_all()
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), states


def restore_rng(state: tuple[Any, ...]) -> None:
    """Put all global generators back to where :func:`capture_rng` saw them."""
    import torch
    python, numpy, cpu, states = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    for name, of_devices in states.items():
        getattr(torch, name).set_rng_state_all(of_devices)


@contextmanager
def isolate_rng(accelerators: bool = True) -> Iterator[None]:
    """Leave the global generators as they were, whatever the block draws or raises.

    >>> import random
    >>> before = random.getstate()
    >>> with isolate_rng():
    ...     _ = random.random()
    >>> random.getstate() == before
    True
    """
    state = capture_rng(accelerators)
    try:
        yield
    finally:
        restore_rng(state)
