"""Load some samples again, to detect samples that depend on more than their stream.

A worker repeats the first sample of each pipeline, then its samples number 1, 2, 4, 8, ..., and
each ``interval``-th. Between the two loads it loads another sample, so that caches and counters
show. A collate function of the user is called again for a batch with a repeated sample.

A sample for training that differs travels with its batch, as :class:`Disputed`: only the main
process can tell whether the training reads what differs. The batch is the one without the check.

Files that a sample writes are named while it is repeated: what later samples read from them depends
on who was first.
"""
from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import date, time, timedelta
from typing import Any, Callable, NamedTuple

import cv2
import numpy as np
import torch
from mmengine.logging import print_log
from torch.utils.data import DataLoader, get_worker_info

from ..config import RandomnessConfig, SelfChecks, is_due
from ..errors import RandomnessError, SampleDiffersError
from ..objects.digests import differences, exact_digest, first_difference
from ..objects.walks import PLAIN
from ..util.scoped import replaced
from ..util.text import class_name, did_you_mean
from . import dataset_tree
from .batch_context import EXTRA_SAMPLES, BatchContext, Handle, loading

# explains a difference: datasets that the sample comes from, a function that loads it, a function
# that loads another sample -> lines for the message
Explain = Callable[[Sequence[Any], Callable[[], Any], Callable[[], Any]], list[str]]

_LOADED, _REPEATED, _SEEN = 0, 1, 2  # columns of a worker; from _SEEN on, marks of pipelines
_NEW_PIPELINES = 16  # pipelines that hooks may bring
# streams of samples, in the user's words
_PURPOSES = {'sample': 'training', 'val': 'validation', 'test': 'test'}
# may differ in a validation: predictions come from arrays
_PLAIN = (*PLAIN, np.generic, date, time, timedelta)


class Difference(NamedTuple):
    """Samples of a batch that differ when they are loaded again.

    Attributes:
        items: the samples of the batch, with the results of the second load.
        message: of the error, if the difference matters.
        fields: the paths that differ, in the words of the message.
        plain: only numbers and text differ.
    """
    items: Any
    message: str
    fields: list[str]
    plain: bool


class Disputed(NamedTuple):
    """A batch, on its way to the main process, with samples that differ when loaded again.

    PyTorch pins the memory of the parts of a named tuple.

    Attributes:
        batch: what the run trains on.
        alternative: the same batch with the results of the second load; None: the difference is
            worth a warning.
        message: of the error, if the difference matters.
        fields: the paths that differ, in the words of the message.
    """
    batch: Any
    alternative: Any
    message: str
    fields: list[str]

    def swapped(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
                ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a step with the alternative in place of the batch.

        Raises:
            SampleDiffersError: the batch is not among the arguments.
        """
        if not any(value is self.batch for value in (*args, *kwargs.values())):
            raise SampleDiffersError(self.message)

        def swap(value: Any) -> Any:
            return self.alternative if value is self.batch else value

        return tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}


class SampleCheck:
    """Decides which samples of a loader are repeated, and compares them.

    Args:
        loader: the counts of its workers are in shared memory: they outlive the processes.
        explain: says where a difference comes from; a spawned worker unpickles it.
    """

    def __init__(self, loader: Any, checks: SelfChecks, explain: Explain | None) -> None:
        self._interval, self._explain = checks.samples, explain
        self._names = frozenset(checks.nonrepeatable_datasets)
        pipelines = len(list(dataset_tree.nodes(loader.dataset))) + _NEW_PIPELINES
        counts = torch.zeros(max(loader.num_workers, 1), _SEEN + pipelines, dtype=torch.int64)
        self.counts = counts.share_memory_() if loader.num_workers else counts
        self._known: set[tuple[Any, ...]] = set()
        self._batch_is_due = False
        self._explained: dict[tuple[str, ...], list[str]] = {}  # by the fields that differ

    def forget(self) -> None:
        """Treat the next sample of each pipeline as its first: a pipeline was changed."""
        self._known.clear()

    def load(self, context: BatchContext) -> tuple[list[Any], Difference | None]:
        """Load the samples of a batch, and some of them once more; return how these differ.

        Raises:
            SampleDiffersError: a sample was overwritten, or cannot be loaded again.
        """
        items, due = [], {}
        with naming_written_files(type(context.dataset).__name__):
            for handle in context.handles():
                items.append(context.load(handle))
                if self._must_repeat(context, handle):
                    # at once: samples that are loaded later must not change it
                    due[handle] = exact_digest(items[-1])
        self._batch_is_due = bool(due)
        if not due:
            return items, None
        with context.isolated():
            return items, self._repeat(context, items, due)

    def _must_repeat(self, context: BatchContext, handle: Handle) -> bool:
        """Whether a sample that was just loaded is to be repeated."""
        datasets = context.branch(handle)
        if self._cannot_repeat(datasets):
            return False
        row = self._row()
        row[_LOADED] += 1
        new = self._is_new(context, handle, datasets, row)
        return new or is_due(int(row[_LOADED]), self._interval)

    def _repeat(self, context: BatchContext, items: Sequence[Any],
                due: Mapping[int, str]) -> Difference | None:
        """Compare samples with what they were: now, and loaded again.

        ``due`` are the digests of samples when they were loaded.
        """
        for handle, first in due.items():
            if exact_digest(items[handle]) != first:
                raise SampleDiffersError(self._message(
                    context, handle, 'was overwritten when other samples were loaded',
                    'the pipeline returns memory that it keeps and writes again',
                    'to do: return a copy'))
        previous: Handle = context.handles()[-1]  # another sample has to come in between
        differing: dict[int, Any] = {}
        with loading(context.again()) as twin:
            for handle, first in due.items():
                self._row()[_REPEATED] += 1
                if previous == handle:
                    self._load_another(twin, handle)
                again = _loaded(twin, handle)
                if exact_digest(again) != first:
                    differing[handle] = again
                previous = handle
        if not differing:
            return None
        found = self._difference(context, items, differing)
        if any(exact_digest(items[handle]) != due[handle] for handle in differing):
            raise SampleDiffersError(found.message)  # the batch was overwritten
        return found

    def _difference(self, context: BatchContext, items: Sequence[Any],
                    differing: Mapping[int, Any]) -> Difference:
        found = [difference for handle, again in differing.items()
                 for difference in differences(items[handle], again)]
        fields = list(dict.fromkeys(path for path, _, _ in found))
        handle, again = next(iter(differing.items()))
        if tuple(fields) not in self._explained:
            self._explained[tuple(fields)] = self._explanation(context, handle)
        message = self._message(
            context, handle, 'was loaded twice from the same random numbers, and the results '
            'differ', _shown(items[handle], again), *self._explained[tuple(fields)])
        return Difference(
            [differing.get(number, item) for number, item in enumerate(items)], message, fields,
            all(isinstance(value, _PLAIN) for _, *values in found for value in values))

    def collate(self, keyed: Callable[[Any], Any], name: str, start: Sequence[int], items: Any
                ) -> Any:
        """Call a collate function; again if a sample of the batch was repeated.

        Args:
            keyed: calls the function with samples, at the start of its stream.
            start: epoch and position of the batch's first sample.

        Raises:
            SampleDiffersError: the results differ.
        """
        if not self._batch_is_due:
            return keyed(items)
        copies = _copied(items)  # the function may write into the samples
        batch = keyed(items)
        if copies is None:
            return batch
        first = exact_digest(batch)  # now: the function may return memory that it writes again
        again = keyed(copies)
        if exact_digest(again) != first:
            raise SampleDiffersError('\n  '.join([
                f'collate function {name}: the batch of epoch {start[0]} that begins at position '
                f'{start[1]} was collated again from the same samples and the same random '
                'numbers, and the results differ: a run with it can be neither repeated nor '
                'resumed', _shown(batch, again),
                'to do: let the result depend on the samples and on the global generators only']))
        return batch

    def _row(self) -> Any:
        info = get_worker_info()
        return self.counts[info.id % len(self.counts) if info else 0].numpy()

    def _cannot_repeat(self, datasets: Sequence[Any]) -> bool:
        return not self._names.isdisjoint(type(dataset).__name__ for dataset in datasets)

    def _is_new(self, context: BatchContext, handle: Handle, datasets: Sequence[Any],
                row: Any) -> bool:
        """Whether no sample of these datasets with their pipelines was seen by this worker."""
        key = tuple(map(id, datasets))
        if key in self._known:
            return False
        self._known.add(key)
        path = dataset_tree.path_of(context.dataset, context.entry(handle)[0])
        mark, seen = _mark(path, datasets), row[_SEEN:]
        if mark in seen or not (seen == 0).any():
            return False
        seen[(seen == 0).argmax()] = mark
        return True

    def _load_another(self, twin: BatchContext, handle: Handle) -> None:
        """Load a sample other than ``handle``, if any may be loaded."""
        for neighbor in twin.handles():
            if neighbor != handle and not self._cannot_repeat(twin.branch(neighbor)):
                _loaded(twin, neighbor)
                return
        if isinstance(twin.entry(handle)[0], tuple):
            return  # the extra samples are numbers
        for number in range(EXTRA_SAMPLES):
            extra = (), number  # of the whole dataset
            # the sampler may have left it out, because it cannot be loaded; or nobody knows how
            # many there are
            with suppress(Exception):
                if not self._cannot_repeat(twin.branch(extra)):
                    twin.load(extra)
                    return

    def _explanation(self, context: BatchContext, handle: Handle) -> list[str]:
        def load() -> Any:
            with loading(context.again()) as twin:
                return twin.load(handle)

        def load_another() -> None:
            with loading(context.again()) as twin:
                self._load_another(twin, handle)

        return [] if self._explain is None else self._explain(
            context.branch(handle), load, load_another)

    def _message(self, context: BatchContext, handle: Handle, what: str, *lines: str) -> str:
        index, (epoch, position) = context.entry(handle)
        name, info = type(context.branch(handle)[-1]).__name__, get_worker_info()
        what_for = 'the batch of ' if context.loads_batches else ''
        worker = f', worker {info.id}' if info else ''
        return '\n  '.join([
            f'{name}: {what_for}sample {index} ({_PURPOSES[context.stream]}, epoch {epoch}, '
            f'position {position}{worker}) {what}: a run with this pipeline can be neither '
            'repeated nor resumed',
            *lines,
            f'if {name} cannot repeat, say so: '
            f"randomness.self_checks.nonrepeatable_datasets=['{name}']"])


def _shown(first: Any, second: Any) -> str:
    """Describe in one line how two results with different digests differ."""
    difference = first_difference(first, second)
    if difference is None:
        return ('the second result has overwritten the first: what the dataset, a transform or the '
                'function keeps is changed in place; copy it first')
    path, then, now = difference
    return f'they differ in {path or "all"}: {then}, then {now}'


def _loaded(context: BatchContext, handle: Handle) -> Any:
    try:
        return context.load(handle)
    except Exception as error:
        index, (epoch, position, *_) = context.entry(handle)
        raise SampleDiffersError(
            f'sample {index} (epoch {epoch}, position {position}) could not be loaded once more, '
            f'to compare the results: {type(error).__name__}: {error}\n  name datasets that '
            'cannot repeat in randomness.self_checks.nonrepeatable_datasets') from error


def _copied(items: Any) -> Any:
    """Return a copy of samples; None where they hold what cannot be copied, such as a lock.

    A copy may be something else: an image of Pillow that shares an array's memory is read-only.
    """
    try:
        copied = copy.deepcopy(items)
        return copied if exact_digest(copied) == exact_digest(items) else None
    except Exception:  # whatever a class of the user raises
        return None


def _mark(path: dataset_tree.Path, datasets: Sequence[Any]) -> int:
    """Return a number above 0 for classes of datasets and transforms, the same in any process."""
    names = [str(path)]
    for dataset in datasets:
        names.append(class_name(dataset))
        names += [f'{where} {class_name(transform)}' for where, transform
                  in dataset_tree.transforms(getattr(dataset, 'pipeline', None))]
    digest = hashlib.blake2b('\n'.join(names).encode(), digest_size=7).digest()
    return 1 + int.from_bytes(digest, 'little')


def checked(loader: Any) -> int:
    """Return how many samples of a loader its workers have loaded twice until now."""
    check = getattr(getattr(loader, '_mmrepro_fetch', None), 'check', None)
    return 0 if check is None else int(check.counts[:, _REPEATED].sum())


def left_out(config: RandomnessConfig, loaders: Iterable[Any]) -> list[str]:
    """Return the datasets of ``loaders`` (built, configs or None) that settings exempt from checks.

    Raises:
        RandomnessError: the settings have a name that no dataset has; says the nearest name.
    """
    known = {name: None for loader in loaders for name in _names(loader)}
    for name in config.self_checks.nonrepeatable_datasets:
        if name not in known:
            hint = did_you_mean(name, known, cutoff=0) or '.'
            raise RandomnessError(
                f'randomness.self_checks.nonrepeatable_datasets has the name {name!r}, and no '
                f'dataset of this run is of that class{hint} Its datasets: {", ".join(known)}')
    return list(config.self_checks.nonrepeatable_datasets)


def _names(given: Any) -> Iterator[str]:
    """Yield class names of datasets, without those of transforms."""
    if isinstance(given, Mapping):
        if 'type' in given:
            yield class_name(given['type'])
        for key in ('dataset', 'datasets'):
            yield from _names(given.get(key))
    elif isinstance(given, (list, tuple)):
        for item in given:
            yield from _names(item)
    elif given is not None and not isinstance(given, str):
        dataset = given.dataset if isinstance(given, DataLoader) else given
        yield from (type(node.dataset).__name__ for node in dataset_tree.nodes(dataset))


# in the address of a SQLite database that is not written
_READ_ONLY = re.compile(r'file:.*[?&](mode=(ro|memory)|immutable=1)\b')
# audit events of Python that make a file -> position of its path
_EVENTS = {'sqlite3.connect': 0, 'os.symlink': 1, 'os.link': 1, 'os.rename': 1}

# of the samples that are being loaded; None outside
_files: ContextVar[list[str] | None] = ContextVar('files', default=None)
_named: set[str] = set()  # datasets


def _note(path: Any) -> None:
    files = _files.get()
    if files is not None and isinstance(path, (str, bytes, os.PathLike)) and path != os.devnull:
        files.append(os.fsdecode(path))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS:
        path = args[_EVENTS[event]]
        if event != 'sqlite3.connect' or not (
                isinstance(path, str) and (path == ':memory:' or _READ_ONLY.match(path))):
            _note(path)
    elif event == 'open':
        path, mode, flags = args
        if flags & (os.O_WRONLY | os.O_RDWR) or set('wax+').intersection(mode or ''):
            _note(path)


def _noting(write: Callable[..., Any], position: int, name: str) -> Callable[..., Any]:
    """Return a function that writes a file without an audit event, and notes its path."""
    @functools.wraps(write)
    def noted(*args: Any, **kwargs: Any) -> Any:
        _note(args[position] if len(args) > position else kwargs.get(name))
        return write(*args, **kwargs)
    return noted


_add_once = functools.cache(sys.addaudithook)


@contextmanager
def naming_written_files(dataset: str) -> Iterator[None]:
    """Name the first file that this block opens for writing, once for each dataset.

    The audit hook that sees the files stays in the process.
    """
    _add_once(_audit)
    files: list[str] = []
    token = _files.set(files)
    try:
        with replaced(cv2, imwrite=_noting(cv2.imwrite, 0, 'filename')), \
                replaced(torch, save=_noting(torch.save, 1, 'f')):
            yield
    finally:
        _files.reset(token)
    if files and dataset not in _named:
        _named.add(dataset)
        print_log(
            f'{dataset}: a sample has written {files[0]} while it was loaded. If samples read it, '
            'they depend on which worker was the first: write it before the training', 'current',
            logging.WARNING)
