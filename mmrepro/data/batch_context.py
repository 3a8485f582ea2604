"""The batch that is being loaded in this process, for transforms that mix samples of a batch."""
from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cached_property
from typing import Any, Union

from .. import seeds
from ..errors import MMReproError, RandomnessError
from ..util.scoped import replaced
from . import dataset_tree, generators
from .data_errors import sample_error
from .generators import Generators
from .samplers import plain

# Samples outside the batch, chosen at random, that cached transforms may mix in. A mosaic takes
# three partners, and stock's condition for a mosaic is five cached results.
EXTRA_SAMPLES = 5

_loading: ContextVar[BatchContext | None] = ContextVar('loading', default=None)


def current_batch() -> BatchContext | None:
    """Return the batch that is being loaded in this thread, or None."""
    return _loading.get()


@contextmanager
def loading(batch: BatchContext) -> Iterator[BatchContext]:
    """Make ``batch`` the current batch inside the block."""
    token = _loading.set(batch)
    try:
        yield batch
    finally:
        _loading.reset(token)


class _Captured(BaseException):
    """Ends the loading of a sample at the transform whose input is wanted.

    A BaseException: transforms that catch Exception must not stop it.
    """


# the number of a sample in the batch; or (path of a subtree, number of an extra sample of it)
Handle = Union[int, tuple[dataset_tree.Path, int]]


class BatchSubtree:
    """The samples of a batch that reach a transform: those of the subtree that holds it."""

    def __init__(self, batch: BatchContext, path: dataset_tree.Path) -> None:
        self.path, self._batch = path, batch
        self._members = [number for number, of_sample in enumerate(batch.paths)
                         if of_sample[:len(path)] == path]

    def handle(self, offset: int) -> Handle:
        """Return the sample at an offset: extra samples come first, then those of the batch."""
        if offset < EXTRA_SAMPLES:
            return self.path, offset
        return self._members[offset - EXTRA_SAMPLES]

    def current(self) -> int:
        """Return the offset of the sample being loaded, or where it would be as a member."""
        current = self._batch.current
        if isinstance(current, int):
            return EXTRA_SAMPLES + bisect.bisect_left(self._members, current)
        path, number = current
        return number if path == self.path else EXTRA_SAMPLES


class BatchContext:
    """The samples of a batch, each addressable up to any transform of its pipeline.

    The first ``EXTRA_SAMPLES`` are chosen at random for this batch, and loaded only on request. The
    samples of the batch follow. Everything is a function of the positions of the batch's samples,
    so any worker gives the same result. In a concatenated dataset, a transform mixes samples of the
    subtree that it belongs to, and the extra samples come from that subtree. ``kept`` are the
    generators that the dataset keeps. A dataset that loads batches has one handle for all samples.
    """

    def __init__(self, dataset: Any, root: seeds.Root, stream: str, batch: Sequence[Any],
                 kept: Generators | None = None) -> None:
        self.dataset, self._kept = dataset, kept or {}
        self.loads_batches = dataset_tree.loads_batches(dataset)
        self._root, self.stream, self._batch = root, stream, batch
        self._entries: list[tuple[Any, tuple[Any, ...]]] = [
            (plain(index), (index.epoch, index.position)) for index in batch]
        self._extra: dict[dataset_tree.Path, list[tuple[Any, tuple[Any, ...]]]] = {}
        self._datasets: dict[dataset_tree.Path, Any] = {(): dataset}
        self._subtrees: dict[int, BatchSubtree] = {}
        self.current: Handle = 0
        self._wanted: object | None = None
        self._states: dict[tuple[int, Handle], Any] = {}

    def again(self) -> BatchContext:
        """Return the same batch with no sample loaded."""
        return BatchContext(self.dataset, self._root, self.stream, self._batch, self._kept)

    def handles(self) -> range:
        """Return the handles of the batch's samples."""
        return range(1 if self.loads_batches else len(self._entries))

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leave the global generators and those of the dataset as they were."""
        with seeds.isolate_rng(accelerators=False), generators.isolated(self._kept):
            yield

    @cached_property
    def paths(self) -> list[dataset_tree.Path]:
        """The path of each sample through the dataset tree."""
        return [dataset_tree.path_of(self.dataset, index) for index, _ in self._entries]

    def subtree(self, transform: object) -> BatchSubtree:
        """Return the samples that reach ``transform``.

        Raises:
            RandomnessError: when the dataset loads the batch as a whole.
        """
        if self.loads_batches:
            raise RandomnessError(
                f'{type(transform).__name__} mixes samples, and {type(self.dataset).__name__} '
                'loads whole batches by its own __getitems__, in which no sample can be told '
                'from another; remove one of both')
        if id(transform) not in self._subtrees:
            path, self._datasets[path] = dataset_tree.holder(self.dataset, transform)
            self._subtrees[id(transform)] = BatchSubtree(self, path)
        return self._subtrees[id(transform)]

    def entry(self, handle: Handle) -> tuple[Any, tuple[Any, ...]]:
        """Return index and stream key of a sample."""
        if isinstance(handle, int):
            return self._entries[handle]
        path, number = handle
        if path not in self._extra:
            size = len(self._datasets[path])
            _, first = self._entries[0]
            key = (*first, 'extra', *path)
            draw = seeds.python_generator(self._root, self.stream, *key)
            self._extra[path] = [(draw.randrange(size), (*key, k)) for k in range(EXTRA_SAMPLES)]
        return self._extra[path][number]

    def branch(self, handle: Handle) -> list[Any]:
        """Return the datasets that are asked for a sample, the outermost first."""
        return dataset_tree.branch(self._top(handle), self.entry(handle)[0])

    def _top(self, handle: Handle) -> Any:
        return self.dataset if isinstance(handle, int) else self._datasets[handle[0]]

    def load(self, handle: Handle) -> Any:
        """Load a sample from the start of its stream.

        Raises:
            SampleError: from what the dataset has raised.
        """
        try:
            return self._load(handle)
        except MMReproError:
            raise
        except Exception as error:
            raise sample_error(self._top(handle), self.entry(handle)[0], error) from error

    def _load(self, handle: Handle) -> Any:
        index, key = self.entry(handle)
        dataset = self._top(handle)
        self.current = handle
        if not self.loads_batches:
            generators.begin_stream(self._kept, self._root, self.stream, *key)
            return dataset[index]
        generators.begin_stream(self._kept, self._root, self.stream, *key, 'batch')
        entries = self._entries if isinstance(handle, int) else [(index, key)]
        return dataset.__getitems__([index for index, _ in entries])

    def reached(self, transform: object, results: Any) -> None:
        """Note the input of a transform for the current sample; the first call counts."""
        self._states.setdefault((id(transform), self.current), results)
        if self._wanted is transform:
            raise _Captured

    def state(self, transform: object, handle: Handle) -> Any:
        """Return the input of ``transform`` for a sample.

        Raises:
            RuntimeError: when that sample's pipeline does not reach the transform.
        """
        key = (id(transform), handle)
        if key not in self._states:
            with self.isolated(), replaced(self, current=handle, _wanted=transform), \
                    suppress(_Captured):
                self.load(handle)
        if key not in self._states:
            raise RuntimeError(
                f'{type(transform).__name__} mixes samples, but the pipeline of sample '
                f'{self.entry(handle)[0]} does not reach it; put it into the pipeline itself, '
                'not into a choice or a chance, and join datasets by ConcatDataset')
        return self._states[key]
