"""Generators that data are drawn from: those that datasets keep, and those of the whole process.

Datasets, transforms and samplers keep generators for themselves. They are found through attributes,
and start a stream wherever the global generators start one. The global generators belong to the
whole process: in the process that trains, its thread alone may load.
"""
from __future__ import annotations

import random
import signal
import threading
import types
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from .. import seeds
from ..errors import RandomnessError
from ..objects.walks import (
    GENERATORS,
    PLAIN,
    Named,
    Walk,
    direct_references,
    indirect_references,
    kind_of,
    read_state,
    restore_state,
)
from ..util.libraries import belongs_to_user

Generators = dict[str, Any]  # path -> generator

MAX_OBJECTS = 10000  # visited; the nearest ones first
# values that hold nothing; modules and classes hold what belongs to others
_LEAVES = (*PLAIN, np.ndarray, torch.Tensor, type, types.ModuleType, torch.device, torch.dtype)


def _is_global(generator: Any) -> bool:
    """Whether a generator is a global one, which every stream seeds anyway."""
    numpy_generator = np.random.mtrand._rand
    return any(generator is known for known in (
        random._inst, torch.default_generator, numpy_generator, numpy_generator._bit_generator))


def _is_data(thing: Any) -> bool:
    return not isinstance(thing, (list, tuple, dict, deque)) and \
        hasattr(type(thing), '__getitem__') and hasattr(type(thing), '__len__')


def find(thing: Any, name: str, data: bool = True) -> Generators:
    """Return the generators that ``thing`` reaches through attributes, containers, closures and the
    globals that its methods use.

    Args:
        name: of the thing, where a path begins.
        data: look into datasets that the thing holds.

    Raises:
        RandomnessError: a generator cannot be seeded.
    """
    if isinstance(thing, _LEAVES):
        return {}
    generators: Generators = {}
    walk = Walk([(name, thing)], MAX_OBJECTS)

    def look(things: Iterable[Named], late: bool = False) -> None:
        """Keep generators, and queue objects that may hold some.

        If ``late``, classes count too, and a generator that cannot be seeded is passed over. Code
        that no sample runs may name it; where a sample draws from it, the check of samples says so.
        """
        for path, value in things:
            if isinstance(value, _LEAVES) and not (
                    late and isinstance(value, type) and belongs_to_user(value.__module__)):
                continue
            if not isinstance(value, GENERATORS):
                if data or not _is_data(value):
                    walk.add([(path, value)])
            elif walk.is_new(value) and not _is_global(value):
                with suppress(RandomnessError) if late else nullcontext():
                    _check_seedable(path, value)
                    while path in generators:  # an attribute of a class and of its base
                        path += "'"
                    generators[path] = value

    for path, obj in walk:
        look(direct_references(obj, path))
    # Paths are part of the keys of streams, so the order of the two is fixed: a generator has the
    # path by which `direct_references` reaches it, and `indirect_references` adds others.
    del walk.queue[MAX_OBJECTS:]
    already_inside = len(walk.queue)
    for number, (path, obj) in enumerate(walk):
        look(indirect_references(obj, path), late=True)
        if number >= already_inside:
            look(direct_references(obj, path), late=True)
    return generators


def _check_seedable(path: str, generator: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        raise RandomnessError(
            f'{path} is a random.SystemRandom, whose numbers come from the operating system and '
            'cannot be repeated; use random.Random')
    kind = kind_of(generator)
    state = kind.read(generator)
    try:
        kind.seed(generator, seeds.derive(0, 'sample'))
    except (TypeError, ValueError, AttributeError) as error:
        raise RandomnessError(f'{path} is a {type(generator).__name__} that cannot be seeded '
                              f'({error}); use numpy.random.default_rng(), or the global '
                              'generators, which mmrepro seeds for every sample') from error
    kind.restore(generator, state)


def begin_stream(generators: Generators, root: seeds.Root, stream: str, *key: seeds.Key) -> None:
    """Put the global generators at the start of a stream, and each of ``generators`` too."""
    seeds.seed_all(root, stream, *key)
    for path, generator in generators.items():
        kind_of(generator).seed(generator, seeds.derive(root, stream, *key, 'generator', path))


@contextmanager
def isolated(generators: Generators) -> Iterator[None]:
    """Leave the generators as they were, whatever the block draws or raises."""
    before = [(generator, read_state(generator)) for generator in generators.values()]
    try:
        yield
    finally:
        for generator, state in before:
            restore_state(generator, state)


# Wakes the main thread. Nothing else sends it, and a process without a handler ignores it.
_SIGNAL = signal.SIGURG


_threads: WeakSet[threading.Thread] = WeakSet()  # training threads: one, or virtual ranks by turns
_take_turns = False
_refusal = ''  # the message of an error that the main thread has not raised yet


def claim_for_this_thread(turns: bool = False) -> None:
    """Register the calling thread: it trains, validates or tests.

    With ``turns``, exactly one of the registered threads runs at a time.
    """
    global _threads, _take_turns
    others = _threads if turns and _take_turns else ()
    _threads, _take_turns = WeakSet([*others, threading.current_thread()]), turns
    # a handler of the user stays
    if threading.current_thread() is threading.main_thread() and \
            signal.getsignal(_SIGNAL) is signal.SIG_DFL:
        signal.signal(_SIGNAL, _interrupt)


def check_thread(action: str) -> None:
    """Refuse an ``action`` that may draw random numbers in a thread that does not train.

    Where the main thread trains, it gets the error as well: it may wait for the other thread.

    Raises:
        RandomnessError: another thread trains.
    """
    global _refusal
    thread, main = threading.current_thread(), threading.main_thread()
    if thread in _threads or not any(map(threading.Thread.is_alive, _threads)):
        return
    text = (f'the thread {thread.name!r} {action} in the process that trains: both would draw from '
            'the same generators. Load in workers, without a thread: num_workers=1 or more, and '
            'prefetch_factor')
    if main in _threads and signal.getsignal(_SIGNAL) is _interrupt:
        _refusal = text
        # raise_signal() would not end its wait for a lock
        signal.pthread_kill(main.ident or 0, _SIGNAL)
    else:
        text += '. The training may now wait forever for this thread, and cannot be interrupted'
    raise RandomnessError(text)


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _refusal
    text, _refusal = _refusal, ''
    if text:
        raise RandomnessError(text)
