"""Continue in the middle of the data: samplers are moved, no sample is loaded."""
from __future__ import annotations

from typing import Any, Tuple

from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from torch.utils.data import DataLoader

from .loader import placement_of

__all__ = ['continue_epochs', 'continue_iterations', 'seek', 'where']


def where(loader: DataLoader, iteration: int) -> Tuple[int, int]:
    """(pass, batches to leave out) at which ``iteration`` begins, in an iteration-based loop."""
    sampler = loader.batch_sampler.sampler
    if not hasattr(sampler, 'epoch'):
        return 0, iteration  # an endless sampler has one pass
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


class _Ahead:
    """An iterator that stands where MMEngine means to advance it to."""

    def __init__(self, iterator: Any, iteration: int) -> None:
        self._iterator, self._pending = iterator, iteration

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        if self._pending:
            # IterBasedTrainLoop.run loads and drops every batch that was trained on before
            self._pending -= 1
            return None
        return next(self._iterator)


def continue_iterations(loop: IterBasedTrainLoop, iteration: int) -> None:
    """Make MMEngine's "Advance dataloader N steps" a matter of N counts."""
    loop.dataloader_iterator._epoch = where(loop.dataloader, iteration)[0]
    loop.dataloader_iterator = _Ahead(loop.dataloader_iterator, iteration)
