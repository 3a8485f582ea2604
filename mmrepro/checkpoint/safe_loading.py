"""``torch.load`` that builds data and runs no code, with every release of torch.

From 2.6 on, ``weights_only=True`` takes an allow-list that is good enough for what MMEngine saves.
Before, the same list is enforced by an unpickler of Python's own. What a run writes has to be on
the list, :func:`check_readable`.
"""
from __future__ import annotations

import codecs
import collections
import functools
import io
import pickle
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer

from ..errors import CheckpointError
from ..util.text import qualified_name, shorten

# how a user adds a class, for messages
ADDING = ('torch.serialization.add_safe_globals adds to it'
          if hasattr(torch.serialization, 'add_safe_globals') else
          'mmrepro.checkpoint.safe_loading.EXTRA.append(CLASS) adds to it')
_load_of_torch = torch.load  # loaders of MMEngine find another one meanwhile
EXTRA: list[Any] = []  # classes that users trust, for torch before 2.4

# NumPy 1 has a package numpy._core as well, which is empty
_CORE = getattr(np, 'core' if int(np.__version__.partition('.')[0]) < 2 else '_core')
_DTYPES = ('bool', 'uint8', 'int8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64',
           'float16', 'float32', 'float64', 'complex64', 'complex128', 'M8[s]', 'm8[s]', 'U1',
           'S1', 'O')


def _statistic(owner: Any, name: str) -> Any:
    """Replace ``getattr`` in a checkpoint: HistoryBuffer saves its methods, nothing else does.

    Raises:
        UnpicklingError: for any other attribute.
    """
    # the class registers its own four when the first buffer is made, users' own come on import
    known = {'min', 'max', 'current', 'mean', *HistoryBuffer._statistics_methods}
    if owner is HistoryBuffer and name in known:
        return getattr(owner, name)
    raise pickle.UnpicklingError(f'it asks for attribute {name!r} of {owner!r}')


@functools.cache
def allow_list() -> tuple[Any, ...]:
    """Return the objects that a checkpoint may name beside tensors; they only build data.

    Items are objects, or pairs of an object and the name that it has in files.
    """
    arrays = [(getattr(_CORE.multiarray, name), f'numpy.{core}.multiarray.{name}')
              for name in ('_reconstruct', 'scalar')  # NumPy 2 reads what 1 wrote, and vice versa
              for core in ('core', '_core')]
    # protocol 2 names builtins as Python 2 did
    statistics = [(_statistic, f'{module}.getattr') for module in ('builtins', '__builtin__')]
    dtypes = [type(np.dtype(name)) for name in _DTYPES]
    # a Counter holds the milestones of MMEngine's MultiStepLR; newer torch knows it itself
    return (*statistics, *arrays, HistoryBuffer, collections.deque, collections.Counter,
            np.ndarray, np.dtype, *dtypes)


def safe_load(file: str | io.BytesIO, map_location: Any = 'cpu', mapped: bool = False) -> Any:
    """Load what ``torch.save`` wrote; if ``mapped``, tensors are views of the file (torch 2.1).

    Raises:
        UnpicklingError: it holds objects that are not on the allow-list.
    """
    if _takes_names():
        with _allowed():
            return _load_of_torch(file, map_location=map_location, weights_only=True, mmap=mapped)
    options = dict(mmap=mapped) if _version() >= (2, 1) else {}
    return _load_of_torch(file, map_location=map_location, weights_only=False,
                          pickle_module=_MODULE, **options)


_added: list[Any] = []  # by `allow`


def allow() -> None:
    """Let ``torch.load`` of this process accept the allow-list, where torch asks for one.

    So MMEngine and MMDetection load checkpoints of a training outside of a runner, too.
    """
    if _takes_names():
        _added.extend(_missing())
        torch.serialization.add_safe_globals(_added)


def disallow() -> None:
    """Undo :func:`allow`."""
    if _added:
        _remove(_added)
        _added.clear()


def _missing() -> list[Any]:
    present = torch.serialization.get_safe_globals()
    return [entry for entry in allow_list() if entry not in present]


def _remove(entries: list[Any]) -> None:
    kept = [entry for entry in torch.serialization.get_safe_globals() if entry not in entries]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(kept)


@contextmanager
def _allowed() -> Iterator[None]:
    # torch's own context would remove what was there before, too
    missing = _missing()
    torch.serialization.add_safe_globals(missing)
    try:
        yield
    finally:
        _remove(missing)


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in torch.__version__.split('.')[:2])


def _takes_names() -> bool:
    """Whether torch takes pairs of an object and its name in files."""
    return _version() >= (2, 6)


@functools.cache
def _known() -> dict[str, Any]:
    """Return the allow-list by name, with what torch itself accepts in weights."""
    from torch._weights_only_unpickler import _get_allowed_globals
    known = {**_get_allowed_globals(), '_codecs.encode': codecs.encode}  # bytes, in protocol 2
    for entry in allow_list():
        value, name = entry if isinstance(entry, tuple) else (
            entry, f'{entry.__module__}.{entry.__name__}')
        known[name] = value
    return known


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds only objects on the allow-list."""

    def find_class(self, module: str, name: str) -> Any:
        full = f'{module}.{name}'
        value = _known().get(full)
        if value is None:
            added: list[Any] = getattr(torch.serialization, 'get_safe_globals', list)()
            value = next((cls for cls in (*EXTRA, *added) if not isinstance(cls, tuple)
                          and f'{cls.__module__}.{cls.__qualname__}' == full), None)
        if value is None:
            raise pickle.UnpicklingError(f'it asks for {full}, which is not on the allow-list')
        return value


# torch takes this for a pickle module
_MODULE = types.SimpleNamespace(
    __name__='mmrepro.checkpoint.safe_loading', Unpickler=_Unpickler,
    load=lambda file, **options: _Unpickler(file, **options).load())


def check_readable(checkpoint: Mapping[str, Any]) -> None:
    """Fail when a checkpoint is saved, not when it is resumed and too late to mend.

    Raises:
        CheckpointError: names a value that :func:`mmrepro.checkpoint.files.load` refuses.
    """
    skeleton = _without_tensors(checkpoint)
    if _loads(skeleton):
        return
    where, value = _culprit('checkpoint', skeleton)
    trust = '' if _written(value) is None else (
        f'; or, if you trust it: {ADDING}, in a module that the config imports')
    raise CheckpointError(
        f'{where} is a {qualified_name(type(value))} '
        f'({shorten(repr(value))}): no run could resume from this checkpoint, which has to be '
        f'data only. Save it as numbers, strings, tensors, arrays, lists and dicts{trust}')


def _without_tensors(value: Any) -> Any:
    # plain containers only: what a class of its own makes of its contents has to be tried
    if isinstance(value, torch.Tensor) or type(value) is HistoryBuffer:  # large, and data only
        return None
    # a state dict has its metadata in an attribute
    if type(value) in (dict, collections.OrderedDict):
        found = type(value)((key, _without_tensors(item)) for key, item in value.items())
        for name, content in getattr(value, '__dict__', {}).items():
            setattr(found, name, content)
        return found
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item) for item in value)
    return value


def _loads(value: Any) -> bool:
    file = _written(value)
    if file is None:
        return False
    try:
        safe_load(file)
    except pickle.UnpicklingError:
        return False
    return True


def _written(value: Any) -> io.BytesIO | None:
    """Return a file with a value; None where pickle refuses it: a function without a name, a lock.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception:  # whatever a class raises that is not to be pickled
        return None
    file.seek(0)
    return file


def _culprit(where: str, value: Any) -> tuple[str, Any]:
    """Return the path and value of the innermost part that does not load."""
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    for key, part in parts:
        if not _loads(part):
            return _culprit(f'{where}[{key!r}]', part)
    return where, value
