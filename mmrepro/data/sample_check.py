"""Load some samples again, to detect samples that depend on more than their stream.

A worker repeats the first sample of each pipeline, then its samples number 1, 2, 4, 8, ..., and
each ``interval``-th. Between the two loads it loads another sample, so that caches and counters
show. A third load is what another process would load: from a copy of the dataset that has loaded
nothing, with the variables of user code as they were, under other ids. A collate function of the
user is called again for a batch with a repeated sample, and so is a copy of it. Further results are
compared and dropped: they leave no trace in the batch.
"""
from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any, Callable, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..another_process import UserVariables, copied, other_ids
from ..config import RandomnessConfig, SelfChecks
from ..digests import exact_digest, first_difference
from ..errors import RandomnessError, SampleDiffersError
from ..intervals import is_due
from ..text import class_name, did_you_mean, listed
from . import dataset_tree, written_files
from .batch_context import EXTRA_SAMPLES, BatchContext, Handle, loading
from .dataset_changes import DatasetSnapshot, variables_of

# explains a difference: datasets that the sample comes from, a function that loads it, a function
# that loads another sample -> lines for the message
Explain = Callable[[Sequence[Any], Callable[[], Any], Callable[[], Any]], list[str]]

_LOADED, _REPEATED, _SEEN = 0, 1, 2  # columns of a worker; from _SEEN on, marks of pipelines
_NEW_PIPELINES = 16  # that hooks may bring
# streams of samples, in the user's words
_PURPOSES = {'sample': 'training', 'val': 'validation', 'test': 'test'}


class _Start(NamedTuple):
    """A dataset before this process has loaded a sample of it."""
    copy: Any
    variables: UserVariables
    snapshot: DatasetSnapshot  # of the dataset itself, from which samples are loaded since


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
        self._epoch: int | None = None  # of the samples that are loaded
        self._start: _Start | None = None  # None: not to be copied, or changed by hooks
        # in the main process: the dataset as the last batch has left it, variables at the end of a
        # pass
        self._left: Any = None
        self._variables: UserVariables | None = None
        # of the collate function: the first epoch, a copy and the variables before its first call
        self._collate: tuple[int, Any, UserVariables] | None = None

    def forget(self) -> None:
        """Treat the next sample of each pipeline as its first: a pipeline was changed."""
        self._known.clear()
        self._epoch = None

    def load(self, context: BatchContext, epoch: int) -> list[Any]:
        """Load the samples of a batch, and some of them once more.

        Raises:
            SampleDiffersError: the two results of a sample differ.
        """
        self._begin(context.dataset, epoch)
        items, due = [], {}
        with written_files.named(type(context.dataset).__name__):
            for handle in context.handles():
                items.append(context.load(handle))
                if self._must_repeat(context, handle):
                    # at once: samples that are loaded later must not change it
                    due[handle] = exact_digest(items[-1])
        self._batch_is_due = bool(due)
        if due:
            with context.isolated():
                self._repeat(context, items, due)
        self._end(context.dataset)
        return items

    def _begin(self, dataset: Any, epoch: int) -> None:
        """Copy the dataset before the first sample that this process loads.

        Hooks of the main process may change it between two batches, and variables between two
        passes. From then on, no sample is loaded from the copy.
        """
        if self._epoch is None:
            self._left, untouched = DatasetSnapshot(dataset), copied(dataset)
            self._start = None if untouched is None else _Start(
                untouched, variables_of(dataset), self._left)
        elif get_worker_info() is None:
            variables, self._variables = self._variables, None
            begins = epoch != self._epoch or variables is not None
            if self._left.change() or begins and (variables is None or variables.changed()):
                self._start = None
        self._epoch = epoch

    def _end(self, dataset: Any) -> None:
        """Note what the samples of a batch have left, before hooks change it."""
        if self._start is not None and get_worker_info() is None and self._left.change():
            self._left = DatasetSnapshot(dataset)

    def end_pass(self, dataset: Any) -> None:
        """Note, in the main process, variables at the end of a pass, before hooks change them."""
        if self._start is not None:
            self._variables = variables_of(dataset)

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
                due: Mapping[int, str]) -> None:
        """Compare samples with what they were: now, loaded again, and as another process has them.

        ``due`` are the digests of samples when they were loaded.
        """
        for handle, first in due.items():
            if exact_digest(items[handle]) != first:
                raise self._error(
                    context, handle, 'was overwritten when other samples were loaded',
                    'the pipeline returns memory that it keeps and writes again',
                    'to do: return a copy')
        previous: Handle = context.handles()[-1]  # another sample has to come in between
        with loading(context.again()) as twin:
            for handle, first in due.items():
                self._row()[_REPEATED] += 1
                if previous == handle:
                    self._load_another(twin, handle)
                again = _loaded(twin, handle)
                if exact_digest(again) != first:
                    raise self._error(
                        context, handle, 'was loaded twice from the same random numbers, and the '
                        'results differ', _difference(items[handle], again),
                        *self._explanation(context, handle))
                previous = handle
        start = self._start
        if start is None:
            return
        for handle, first in due.items():
            with loading(context.again(copied(start.copy))) as alone, \
                    start.variables.as_captured(), other_ids():
                again = _loaded(alone, handle)
            if exact_digest(again) != first:
                raise self._error(
                    context, handle, 'was loaded as another process loads it, from a copy of the '
                    'dataset that has loaded no other sample, and the results differ',
                    _difference(items[handle], again), *_kept_from_others(start))

    def collate(self, keyed: Callable[[Any, Any], Any], function: Any, name: str,
                start: Sequence[int], items: Any) -> Any:
        """Call a collate function; again if a sample of the batch was repeated.

        Args:
            keyed: called with the function and samples: calls it at the start of its stream.
            start: epoch and position of the batch's first sample.

        Raises:
            SampleDiffersError: the results differ.
        """
        if self._collate is None:
            self._collate = start[0], copied(function), UserVariables([function])
        if not self._batch_is_due:
            return keyed(function, items)
        epoch, untouched, variables = self._collate
        again: list[tuple[str, Any, Callable]] = [('', function, nullcontext)]
        if untouched is not None and start[0] == epoch:
            again.append((', as another process collates it', copied(untouched),
                          variables.as_captured))
        # the function may write into the samples
        copies = [copy.deepcopy(items) for _ in again]
        batch = keyed(function, items)
        first = exact_digest(batch)  # now: the function may return memory that it writes again
        for (how, once_more, surroundings), samples in zip(again, copies):
            with surroundings(), other_ids() if how else nullcontext():
                result = keyed(once_more, samples)
            if exact_digest(result) != first:
                raise SampleDiffersError('\n  '.join([
                    f'collate function {name}: the batch of epoch {start[0]} that begins at '
                    f'position {start[1]} was collated again from the same samples and the same '
                    f'random numbers{how}, and the results differ: a run with it can be neither '
                    'repeated nor resumed',
                    _difference(batch, result),
                    'to do: let the result depend on the samples and on the global generators '
                    'only']))
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
            if not self._cannot_repeat(twin.branch(extra)):
                # the sampler may have left it out, because it cannot be loaded
                with suppress(Exception):
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

    def _error(self, context: BatchContext, handle: Handle, what: str,
               *lines: str) -> SampleDiffersError:
        index, (epoch, position) = context.entry(handle)
        name, info = type(context.branch(handle)[-1]).__name__, get_worker_info()
        return SampleDiffersError('\n  '.join([
            f'{name}: {"the batch of " * context.loads_batches}sample {index} '
            f'({_PURPOSES[context.stream]}, epoch {epoch}, position '
            f'{position}{f", worker {info.id}" if info else ""}) {what}: a run with this pipeline '
            'can be neither repeated nor resumed',
            *lines,
            f'if {name} cannot repeat, say so: '
            f"randomness.self_checks.nonrepeatable_datasets=['{name}']"]))


def _kept_from_others(start: _Start) -> list[str]:
    paths = list(filter(None, [start.snapshot.change(), *start.variables.changed()]))
    return ['it depends on ' + (
        f'what earlier samples have left in {listed(paths)}' if paths
        else 'the number of the process or worker'),
        'to do: compute it when the dataset is built, or from the sample alone']


def _check_of(loader: Any) -> SampleCheck | None:
    return getattr(getattr(loader, '_mmrepro_fetch', None), 'check', None)


def end_pass(loader: Any) -> None:
    """Call when a loop has used up a loader, before hooks may change variables."""
    check = _check_of(loader)
    if check is not None and not loader.num_workers:
        check.end_pass(loader.dataset)


def _difference(first: Any, second: Any) -> str:
    """Describe in a line how results differ whose digests have differed."""
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
    check = _check_of(loader)
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
