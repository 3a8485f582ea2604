"""Continue in the middle of the data: samplers are moved, no sample is loaded."""
from __future__ import annotations

from typing import Any, Optional, Tuple

from mmengine.dist import get_world_size
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader

from .loader import placement_of
from .sampling_orders import is_endless

__all__ = ['CountedIterator', 'Place', 'continue_epochs', 'continue_iterations', 'seek', 'where']

Place = Tuple[int, int]  # pass over the data, batches of it that are done


def where(loader: DataLoader, iteration: int, place: Optional[Place] = None) -> Place:
    """Where ``iteration`` begins, in an iteration-based loop.

    Args:
        place: kept by the run that is resumed. Some batch samplers do not make as many batches as
            they say, or not always the same number.
    """
    if place is not None and get_world_size() == 1:  # ranks may be in different passes
        return place
    sampler = loader.batch_sampler.sampler
    if is_endless(sampler) or not hasattr(sampler, '__len__'):
        return 0, iteration  # one pass
    if place is not None and place[0] == 0 and place[1] >= 2 * len(loader):
        return 0, iteration  # a user's own endless sampler, which has a length all the same
    return divmod(iteration, len(loader))


def seek(loader: DataLoader, epoch: int, skip: int) -> None:
    """Let the next pass be ``epoch``, without its first ``skip`` batches."""
    loader.batch_sampler.sampler.set_epoch(epoch)
    placement_of(loader).skip = skip


def continue_epochs(loop: EpochBasedTrainLoop) -> None:
    """Number the batches of an epoch that is entered in the middle as if it were not."""
    stock, placement = loop.run_iter, placement_of(loop.dataloader)

    def run_iter(idx: int, data_batch: Any) -> None:
        stock(idx + placement.skip, data_batch)

    loop.run_iter = run_iter


class CountedIterator:
    """The iterator of an iteration-based loop, which knows its place.

    In a resumed run it stands already where MMEngine means to advance it to.
    """

    def __init__(self, iterator: Any, iteration: int, place: Place) -> None:
        self._iterator, self._pending, self.place = iterator, iteration, place

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._pending:
            # IterBasedTrainLoop.run loads and drops every batch that was trained on before
            self._pending -= 1
            return None
        data = next(self._iterator)
        before, batches = self.place
        self.place = (before, batches + 1) if self._iterator._epoch == before else (
            self._iterator._epoch, 1)
        return data

    def skip_iter(self, iterations: int) -> None:
        """What onedl-mmengine calls to advance."""
        self._pending = 0


def continue_iterations(loop: IterBasedTrainLoop, iteration: int,
                        place: Optional[Place]) -> None:
    """Make MMEngine's "Advance dataloader N steps" a matter of N counts."""
    place = where(loop.dataloader, iteration, place) if iteration else (0, 0)
    loop.dataloader_iterator._epoch = place[0]
    loop.dataloader_iterator = CountedIterator(loop.dataloader_iterator, iteration, place)
