"""Continue in the middle of the data: samplers jump to a position, no sample is loaded."""
from __future__ import annotations

from typing import Any, NamedTuple

from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop

from .loader import placement_of
from .sampling_orders import is_endless


class DataCursor(NamedTuple):
    """How far a run is in its data: pass over the data, and batches of that pass that are done."""
    epoch: int
    batches: int


def cursor_at(loop: Any, iteration: int, saved: DataCursor | None) -> DataCursor:
    """Return the cursor of a training loop that resumes at ``iteration``.

    Args:
        saved: cursor in the checkpoint, if there is one. Some batch samplers make another number of
            batches than their ``len()`` says, or not always the same number.
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


def seek(loader: Any, epoch: int, skip: int) -> None:
    """Let the next pass be ``epoch``, without its first ``skip`` batches."""
    loader.batch_sampler.sampler.set_epoch(epoch)
    placement: Any = placement_of(loader)
    placement.skip = placement.resumed = skip


def continue_epochs(loop: EpochBasedTrainLoop) -> None:
    """Number the batches of an epoch that starts in the middle as in a whole epoch."""
    stock = loop.run_iter

    def run_iter(idx: int, data_batch: Any) -> None:
        placement = placement_of(loop.dataloader)  # a hook may have replaced the loader
        stock(idx + (placement.resumed if placement else 0), data_batch)

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
