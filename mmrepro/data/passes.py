"""A pass over the data of an adopted loader, the same for any number of workers.

The iterators of an adopted ``DataLoader`` start workers when the first batch is asked for, which is
when the main process would begin to load, and again when the dataset has changed since. A resumed
run continues in the middle of the data: samplers jump to a position, no sample is loaded.
"""
from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple

from mmengine.dist import get_world_size
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from ..errors import SampleDiffersError
from ..util.text import listed
from .dataset_changes import PASS, DatasetSnapshot
from .fetch import KeyedFetch
from .sample_check import Disputed
from .samplers import LoaderPosition, adopt, position_of_loader
from .sampling_orders import is_endless

_begun: weakref.WeakSet[LoaderIterator] = weakref.WeakSet()  # passes that are not at their end


@dataclass
class _PersistentWorkers:
    """The persistent workers of a loader: what they were given, and their user."""
    snapshot: Any = None  # of the dataset
    # returns the pass that began last with the workers; None when it is gone
    user: Callable[[], LoaderIterator | None] = lambda: None


@dataclass
class _Judges:
    """Decides on samples of a loader that differ when they are loaded again."""
    training: Callable[[Disputed], None] | None = None
    named: set[str] = field(default_factory=set)  # fields of a validation that a warning has named


class LoaderIterator:
    """The iterator of an adopted loader; it starts workers at the first ``next()``, from the
    position that the loader has then.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._loader_position: LoaderPosition = loader.batch_sampler._mmrepro_loader_position
        self._batches: Any = None
        self._first = self._done = 0  # batches before the first one, and since
        self._snapshot: DatasetSnapshot | None = None  # of the dataset that the workers have
        self._drawn: Any = None
        self._history: Any = None  # state from which the order is drawn

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._batches is None:
            self._first = self._loader_position.skip
            self._start()
            _begun.add(self)
        elif self._snapshot is not None and self._loader._mmrepro_fetch.per_sample:
            change = self._snapshot.change()
            if change is not None:
                self._restart(change)
        try:
            batch = next(self._batches)
        except StopIteration:
            _begun.discard(self)
            raise
        self._done += 1
        if self._drawn is None:
            self._drawn, self._history = self._loader_position.drawn, self._loader_position.begun
        # another pass may have begun in between
        self._loader_position.drawn, self._loader_position.begun = self._drawn, self._history
        return self._judged(batch) if isinstance(batch, Disputed) else batch

    def _judged(self, disputed: Disputed) -> Any:
        """Return the batch, unless its samples must not differ when they are loaded again.

        Raises:
            SampleDiffersError: no step is repeated that shows whether the training reads the
            difference.
        """
        judges: _Judges = self._loader._mmrepro_judges
        if disputed.alternative is None:
            new = [field for field in disputed.fields if field not in judges.named]
            judges.named.update(new)
            if new:
                print_log(f'{type(self._loader.dataset).__name__}: samples that are loaded twice '
                          f'differ in {listed(new)}: numbers or text, from which metrics should '
                          'not be computed', 'current', logging.WARNING)
        elif judges.training is None:
            raise SampleDiffersError(disputed.message)
        else:
            judges.training(disputed)
        return disputed.batch

    def _start(self) -> None:
        loader = self._loader
        if not loader.num_workers:
            self._batches = _stock_iter(loader)
            return
        workers: _PersistentWorkers = loader._mmrepro_workers
        user = workers.user()
        if not loader.persistent_workers or (user is not self and user in _begun):
            # a hook may look at the data in the middle of a pass: it gets workers of its own
            self._snapshot = DatasetSnapshot(loader.dataset)
            self._batches = loader._get_iterator() if loader.persistent_workers \
                else _stock_iter(loader)
            return
        if loader._iterator is not None:
            change = workers.snapshot.change()
            if change is not None:
                self._say(change)
                loader._iterator = None
        if loader._iterator is None:
            workers.snapshot = DatasetSnapshot(loader.dataset, limits=PASS)
        workers.user = weakref.ref(self)
        self._snapshot = DatasetSnapshot(loader.dataset)
        self._batches = _stock_iter(loader)

    def _restart(self, change: str) -> None:
        """Load the next batches from the dataset as it is now."""
        self._say(change)
        if self._loader._mmrepro_workers.user() is self:
            self._loader._iterator = None
        self._batches = self._drawn = None
        self._loader_position.skip = self._first + self._done
        if self._history is not None:
            self._loader_position.again = self._history.as_dict()
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


def _loader_iter(self: Any) -> LoaderIterator:
    return LoaderIterator(self)


def _loader_get_iterator(self: Any) -> Any:
    """Return an iterator of PyTorch's that loads through the fetch of this loader."""
    attributes = vars(self)  # the loader itself refuses another dataset
    dataset, attributes['dataset'] = self.dataset, self._mmrepro_fetch
    try:
        return self._mmrepro_stock._get_iterator(self)
    finally:
        attributes['dataset'] = dataset


def key_passes(loader: Any, fetch: KeyedFetch) -> None:
    """Let a loader load through ``fetch``, in place; workers of an earlier fetch are abandoned."""
    adopt(loader, {'__iter__': _loader_iter, '_get_iterator': _loader_get_iterator}, fetch=fetch,
          workers=_PersistentWorkers(), judges=_Judges())
    loader._iterator = None


def judge_disputed(loader: Any, judge: Callable[[Disputed], None] | None) -> None:
    """Let ``judge`` decide on batches of a loader for training with samples that differ.

    ``judge`` is called with a batch before the loader returns it; without it, the batch is an
    error.
    """
    if hasattr(loader, '_mmrepro_judges'):
        loader._mmrepro_judges.training = judge


# ---- where a run continues


class DataCursor(NamedTuple):
    """The position of a run in its data: the pass, and the batches of it that are done."""
    epoch: int
    batches: int


def cursor_at(loop: Any, iteration: int, saved: DataCursor | None) -> DataCursor:
    """Return the cursor of a training loop that resumes at ``iteration``.

    ``saved`` is the cursor in the checkpoint, if there is one. Some batch samplers make another
    number of batches than their ``len()`` says, or not always the same number.
    """
    loader = loop.dataloader
    if isinstance(loop, EpochBasedTrainLoop):
        if saved is not None and saved.epoch == loop.epoch:
            return saved
        return DataCursor(loop.epoch, iteration - loop.epoch * len(loader))
    if saved is not None and get_world_size() == 1:  # ranks may be in different passes
        return saved
    sampler = loader.batch_sampler.sampler
    if is_endless(sampler) or not hasattr(sampler, '__len__'):
        return DataCursor(0, iteration)  # one pass
    if saved is not None and saved.epoch == 0 and saved.batches >= 2 * len(loader):
        return DataCursor(0, iteration)  # a user's own endless sampler that has a length
    return DataCursor(*divmod(iteration, len(loader)))


def seek(loader: Any, epoch: int, skip: int, again: dict[str, Any] | None = None) -> None:
    """Let the next pass be ``epoch``, without its first ``skip`` batches.

    ``again``: what these were drawn from, see :class:`~.sampling_orders.OrderHistory`.
    """
    loader.batch_sampler.sampler.set_epoch(epoch)
    loader_position: Any = position_of_loader(loader)
    loader_position.skip = loader_position.resumed = skip
    loader_position.again = (again or {}) if skip else {}


def continue_epochs(loop: EpochBasedTrainLoop) -> None:
    """Number the batches of an epoch that starts in the middle as in a whole epoch."""
    stock = loop.run_iter

    def run_iter(idx: int, data_batch: Any) -> None:
        loader_position = position_of_loader(loop.dataloader)  # a hook may have replaced the loader
        stock(idx + (loader_position.resumed if loader_position else 0), data_batch)

    loop.run_iter = run_iter


class CountedIterator:
    """The iterator of an iteration-based loop, with its ``cursor``.

    In a resumed run, it begins at the batch to which MMEngine would advance it.
    """

    def __init__(self, iterator: Any, iteration: int, cursor: DataCursor) -> None:
        self._iterator, self._pending, self.cursor = iterator, iteration, cursor

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._pending:
            # IterBasedTrainLoop.run loads and drops every batch that was trained on before
            self._pending -= 1
            return None
        data = next(self._iterator)
        epoch, batches = self.cursor
        self.cursor = DataCursor(epoch, batches + 1) if self._iterator._epoch == epoch else \
            DataCursor(self._iterator._epoch, 1)
        return data

    def skip_iter(self, iterations: int) -> None:
        """Advance without loading; onedl-mmengine calls it."""
        self._pending = 0


def continue_iterations(loop: IterBasedTrainLoop, iteration: int,
                        saved: DataCursor | None) -> None:
    """Make MMEngine's fast-forward of the data ("Advance dataloader") skip without loading."""
    cursor = cursor_at(loop, iteration, saved) if iteration else DataCursor(0, 0)
    loop.dataloader_iterator._epoch = cursor.epoch
    loop.dataloader_iterator = CountedIterator(loop.dataloader_iterator, iteration, cursor)
