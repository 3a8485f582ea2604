"""Samples that are loaded twice, to see whether a sample depends on its stream alone.

A worker repeats the first sample that it sees of every pipeline, then its samples number 1, 2, 4,
8, ..., and at least one of so many as ``randomness.self_checks.samples`` says. Between the two
loads it loads another sample, so that caches and counters show. A collate function of the user's
own is called twice for a batch with such a sample. What is repeated is compared and dropped: it
leaves no trace in the batch.
"""
from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Callable

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..config import RandomnessConfig
from ..digests import exact_digest, first_difference
from ..errors import RandomnessError, SampleDiffersError
from . import dataset_tree
from .batch_context import EXTRA_SAMPLES, BatchContext, Handle, loading

# what explains a difference: datasets that the sample comes from, a function that loads it and one
# that loads another -> lines for the message
Explain = Callable[[Sequence[Any], Callable[[], Any], Callable[[], Any]], list[str]]

_LOADED, _REPEATED, _SEEN = 0, 1, 2  # columns of a worker; from _SEEN on pipelines
_PIPELINES = 16  # beside those that there are at first; hooks bring new ones
# streams of samples, in the user's words
_PURPOSES = {'sample': 'training', 'val': 'validation', 'test': 'test'}


class SampleCheck:
    """Decides which samples of a loader are repeated, and compares them.

    Args:
        dataset: of the loader.
        every: repeat at least one of so many samples.
        names: of dataset classes whose samples cannot be repeated.
        workers: of the loader. Their counts are in shared memory: they outlive the processes.
        explain: says where a difference comes from; a spawned worker unpickles it.
    """

    def __init__(self, dataset: Any, every: int, names: Sequence[str], workers: int,
                 explain: Explain | None = None) -> None:
        self._every, self._names, self._explain = every, frozenset(names), explain
        pipelines = len(list(dataset_tree.nodes(dataset))) + _PIPELINES
        counts = torch.zeros(max(workers, 1), _SEEN + pipelines, dtype=torch.int64)
        self._counts = counts.share_memory_() if workers else counts
        self._known: set[tuple] = set()
        self._batch_is_due = False

    def repeated(self) -> int:
        """Samples that all workers have repeated until now."""
        return int(self._counts[:, _REPEATED].sum())

    def forget(self) -> None:
        """A pipeline was changed: its next sample is the first one."""
        self._known.clear()

    def load_all(self, context: BatchContext) -> list[Any]:
        """All samples of the batch, some of them loaded twice.

        Raises:
            SampleDiffersError: the two results of a sample differ.
        """
        items, due = [], {}
        for handle in context.handles():
            items.append(context.load(handle))
            if self._is_due(context, handle):
                # at once: samples that are loaded later must not change it
                due[handle] = exact_digest(items[-1])
        self._batch_is_due = bool(due)
        if due:
            with context.isolated():
                self._repeat(context, items, due)
        return items

    def collate(self, function: Callable[[Any], Any], name: str, start: Sequence[int],
                items: Any) -> Any:
        """What a collate function makes of a batch; called twice if a sample was repeated.

        Args:
            function: begins its stream at every call.
            name: of the user's function.
            start: epoch and position of the batch's first sample.

        Raises:
            SampleDiffersError: the two results differ.
        """
        if not self._batch_is_due:
            return function(items)
        others = copy.deepcopy(items)  # the function may write into them
        batch = function(items)
        first = exact_digest(batch)  # now: the function may return memory that it writes again
        again = function(others)
        if exact_digest(again) != first:
            raise SampleDiffersError('\n  '.join([
                f'collate function {name}: the batch of epoch {start[0]} that begins at position '
                f'{start[1]} was collated twice from the same samples and the same random '
                'numbers, and the results differ: a run with it can be neither repeated nor '
                'resumed',
                _difference(batch, again),
                'to do: let the result depend on the samples and on the global generators only']))
        return batch

    def _row(self) -> Any:
        info = get_worker_info()
        return self._counts[info.id % len(self._counts) if info else 0].numpy()

    def _is_due(self, context: BatchContext, handle: Handle) -> bool:
        datasets = context.branch(handle)
        if self._cannot_repeat(datasets):
            return False
        row = self._row()
        row[_LOADED] += 1
        count = int(row[_LOADED])
        new = self._is_new(context, handle, datasets, row)
        return new or count & (count - 1) == 0 or count % self._every == 0

    def _cannot_repeat(self, datasets: Sequence[Any]) -> bool:
        return bool(self._names) and any(type(one).__name__ in self._names for one in datasets)

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

    def _repeat(self, context: BatchContext, items: list[Any], due: Mapping[Handle, str]) -> None:
        for handle, first in due.items():
            if exact_digest(items[handle - EXTRA_SAMPLES]) != first:
                raise SampleDiffersError(self._message(
                    context, handle, 'was overwritten when other samples were loaded', [
                        'the pipeline returns memory that it keeps and writes again',
                        'to do: return a copy']))
        twin, before = context.again(), context.handles()[-1]
        with loading(twin):
            for handle, first in due.items():
                self._row()[_REPEATED] += 1
                if before == handle:
                    self._load_another(twin, handle)
                again = _loaded(twin, handle)
                if exact_digest(again) != first:
                    raise SampleDiffersError(self._message(
                        context, handle, 'was loaded twice from the same random numbers, and the '
                        'results differ', [_difference(items[handle - EXTRA_SAMPLES], again),
                                           *self._explanation(context, handle)]))
                before = handle

    def _load_another(self, twin: BatchContext, handle: Handle) -> None:
        """Load a sample that is not ``handle``, unless there is none that may be loaded."""
        for other in twin.handles():
            if other != handle and not self._cannot_repeat(twin.branch(other)):
                _loaded(twin, other)
                return
        if isinstance(twin.entry(handle)[0], tuple):
            return  # the extra samples are numbers
        for other in range(EXTRA_SAMPLES):
            if not self._cannot_repeat(twin.branch(other)):
                # the sampler may have left it out, because it cannot be loaded
                with suppress(Exception):
                    twin.load(other)
                    return

    def _explanation(self, context: BatchContext, handle: Handle) -> list[str]:
        def load(what: Callable[[BatchContext], Any]) -> Any:
            twin = context.again()
            with loading(twin):
                return what(twin)

        return [] if self._explain is None else self._explain(
            context.branch(handle), lambda: load(lambda twin: twin.load(handle)),
            lambda: load(lambda twin: self._load_another(twin, handle)))

    def _message(self, context: BatchContext, handle: Handle, what: str,
                 lines: list[str]) -> str:
        index, (epoch, position) = context.entry(handle)
        name, info = type(context.branch(handle)[-1]).__name__, get_worker_info()
        return '\n  '.join([
            f'{name}: sample {index} ({_PURPOSES[context.stream]}, epoch {epoch}, position '
            f'{position}{f", worker {info.id}" if info else ""}) {what}: a run with this pipeline '
            'can be neither repeated nor resumed',
            *lines,
            f'if {name} cannot repeat, say so: '
            f"randomness.self_checks.nonrepeatable_datasets=['{name}']"])


def _difference(first: Any, second: Any) -> str:
    """In a line, for results whose digests have differed."""
    found = first_difference(first, second)
    if found is None:
        return ('the second result has overwritten the first: what the dataset, a transform or the '
                'function keeps is changed in place; copy it first')
    where, one, other = found
    return f'they differ in {where or "all"}: {one}, then {other}'


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
    """A number other than 0 for the classes of datasets and transforms; the same in any process."""
    names = [str(path)]
    for dataset in datasets:
        names.append(_class_name(dataset))
        names += [f'{where} {_class_name(one)}' for where, one in dataset_tree.transforms(
            getattr(dataset, 'pipeline', None))]
    digest = hashlib.blake2b('\n'.join(names).encode(), digest_size=7).digest()
    return 1 + int.from_bytes(digest, 'little')


def _class_name(thing: Any) -> str:
    return getattr(thing, '__qualname__', type(thing).__qualname__)


def sample_check(loader: DataLoader, config: RandomnessConfig,
                 explain: Explain | None = None) -> SampleCheck | None:
    """The check of a loader's samples; None where the settings ask for none."""
    checks = config.self_checks
    if config.deterministic is not True or config.worker_seed != 'sample' or not checks.samples:
        return None
    return SampleCheck(loader.dataset, checks.samples, checks.nonrepeatable_datasets,
                       loader.num_workers, explain)


def checked(loader: DataLoader) -> int:
    """How many samples of a loader were loaded twice until now, by all of its workers."""
    check = getattr(getattr(loader, 'batch_sampler', None), '_sample_check', None)
    return check.repeated() if check is not None else 0


def left_out(config: RandomnessConfig, loaders: Iterable[Any]) -> list[str]:
    """The datasets among ``loaders`` that are not checked because they are said not to repeat.

    Args:
        loaders: data loaders, configs of data loaders, or None.

    Raises:
        RandomnessError: for a name that no dataset has, with the nearest one.
    """
    known = {name: None for loader in loaders for name in _names(loader)}
    for name in config.self_checks.nonrepeatable_datasets:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0)
            hint = f'; did you mean {near[0]!r}?' if near else ''
            raise RandomnessError(
                f'randomness.self_checks.nonrepeatable_datasets has the name {name!r}, and no '
                f'dataset of this run is of that class{hint} Its datasets: {", ".join(known)}')
    return list(config.self_checks.nonrepeatable_datasets)


def _names(loader: Any) -> Iterator[str]:
    if isinstance(loader, DataLoader):
        yield from (type(node.dataset).__name__ for node in dataset_tree.nodes(loader.dataset))
    elif isinstance(loader, Mapping):
        yield from _types(loader.get('dataset'))


def _types(cfg: Any) -> Iterator[str]:
    """Class names in the config of a dataset, other than those of transforms."""
    if isinstance(cfg, Mapping):
        if 'type' in cfg:
            kind = cfg['type']
            yield getattr(kind, '__name__', None) or str(kind).rpartition('.')[2]
        for key in ('dataset', 'datasets'):
            yield from _types(cfg.get(key))
    elif isinstance(cfg, (list, tuple)):
        for one in cfg:
            yield from _types(one)
    elif cfg is not None and not isinstance(cfg, str):
        yield from (type(node.dataset).__name__ for node in dataset_tree.nodes(cfg))
