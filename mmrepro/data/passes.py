"""A pass over the data of an adopted loader, the same for any number of workers.

The iterators of an adopted ``DataLoader`` start workers when the first batch is asked for, which is
when the main process would begin to load, and again when the dataset has changed since.
"""
from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Callable

from mmengine.logging import print_log

from .dataset_changes import DatasetSnapshot
from .fetch import KeyedFetch
from .samplers import Placement, adopt

_begun: weakref.WeakSet[Pass] = weakref.WeakSet()  # passes that are not at their end


@dataclass
class _PersistentWorkers:
    """The persistent workers of a loader: the dataset that they were given, and their user."""
    snapshot: Any = None
    # returns the pass that began last with the workers; None when it is gone
    user: Callable[[], Pass | None] = lambda: None


class Pass:
    """The iterator of an adopted loader; it begins at its first batch, where the loader is then."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._placement: Placement = loader.batch_sampler._mmrepro_placement
        self._batches: Any = None
        self._first = self._done = 0  # batches before the first one, and since
        self._snapshot: DatasetSnapshot | None = None  # of the dataset that the workers have
        self._drawn: Any = None
        self._ended = False

    def __iter__(self) -> Pass:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def running(self) -> bool:
        """Whether batches may still come."""
        return self._batches is not None and not self._ended

    def __next__(self) -> Any:
        if self._batches is None:
            self._first = self._placement.skip
            self._start()
            _begun.add(self)
        elif self._snapshot is not None and self._loader._mmrepro_fetch.per_sample:
            change = self._snapshot.change()
            if change is not None:
                self._restart(change)
        try:
            batch = next(self._batches)
        except StopIteration:
            self._ended = True
            _begun.discard(self)
            raise
        self._done += 1
        if self._drawn is None:
            self._drawn = self._placement.drawn
        self._placement.drawn = self._drawn  # another pass may have begun in between
        return batch

    def _start(self) -> None:
        loader = self._loader
        if not loader.num_workers:
            self._batches = _stock_iter(loader)
            return
        workers: _PersistentWorkers = loader._mmrepro_workers
        user = workers.user()
        if not loader.persistent_workers or (user is not None and user.running):
            # a hook may look at the data in the middle of a pass: it gets workers of its own
            self._snapshot = DatasetSnapshot(loader.dataset)
            self._batches = loader._get_iterator() if loader.persistent_workers \
                else _stock_iter(loader)
            return
        change = loader._iterator is not None and workers.snapshot.change()
        if change:
            self._say(change)
            loader._iterator = None
        if loader._iterator is None:
            workers.snapshot = DatasetSnapshot(loader.dataset)
        workers.user = weakref.ref(self)
        self._snapshot = workers.snapshot
        self._batches = _stock_iter(loader)

    def _restart(self, change: str) -> None:
        """Load the next batches from the dataset as it is now."""
        self._say(change)
        if self._loader._mmrepro_workers.user() is self:
            self._loader._iterator = None
        self._batches = self._drawn = None
        self._placement.skip = self._first + self._done
        self._start()

    def _say(self, change: str) -> None:
        print_log(f'{change} has changed since data loading workers were started: they start '
                  'again with the dataset as it is', logger='current', level=logging.INFO)


def unfinished(loaders: Iterable[Any]) -> list[str]:
    """Return class names of datasets whose loaders are in the middle of a pass."""
    return sorted({type(begun._loader.dataset).__name__ for begun in _begun
                   if any(begun._loader is loader for loader in loaders)})


def _stock_iter(loader: Any) -> Any:
    return loader._mmrepro_stock.__iter__(loader)


# ---- methods of adopted loaders


def _loader_iter(self: Any) -> Pass:
    return Pass(self)


def _loader_get_iterator(self: Any) -> Any:
    """Return an iterator of PyTorch's that loads through the fetch of this loader."""
    attributes = vars(self)  # the loader itself refuses another dataset
    dataset, attributes['dataset'] = self.dataset, self._mmrepro_fetch
    try:
        return self._mmrepro_stock._get_iterator(self)
    finally:
        attributes['dataset'] = dataset


def key_passes(loader: Any, fetch: KeyedFetch) -> None:
    """Let a loader load through ``fetch``, in place; workers of an earlier fetch are left."""
    adopt(loader, {'__iter__': _loader_iter, '_get_iterator': _loader_get_iterator}, fetch=fetch,
          workers=_PersistentWorkers())
    loader._iterator = None
