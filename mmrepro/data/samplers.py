"""Give samplers and batch samplers their places: same objects, same attributes, keyed order.

A built sampler is *adopted*: its class becomes a subclass of its own class whose ``__iter__`` is
the keyed order of :mod:`mmrepro.data.orders`. Attributes, ``isinstance`` and ``set_epoch`` work as
before, so that MMDetection's batch samplers, which look into their sampler, see no difference.
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Iterator, List

import torch
from torch.utils.data import BatchSampler, Sampler

from .. import seeds
from .index import place
from .orders import order_of

__all__ = ['Placement', 'adopt_batch_sampler', 'adopt_sampler']


@dataclass
class Placement:
    """Where a data loader is; shared by its sampler, its batch sampler and its workers.

    Attributes:
        root: root seed.
        skip: batches that the next pass leaves out at its beginning (already trained on).
        start: samples that the sampler leaves out at its beginning.
        generator: the loader's own generator, put in place at the start of each pass.
    """
    root: int
    skip: int = 0
    start: int = 0
    epoch: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)


class PlacedSampler:
    """Mixin: keyed order, and indices that carry their place."""
    _placement: Placement

    def __iter__(self) -> Iterator[Any]:
        placement = self._placement
        stock = type(self).__mro__[2]
        for index, epoch, position in order_of(stock)(self, placement.root, placement.start):
            yield place(index, epoch, position)

    def set_epoch(self, epoch: int) -> None:
        parent = getattr(super(), 'set_epoch', None)
        if parent is not None:
            parent(epoch)
        if not hasattr(self, 'epoch'):
            return  # endless samplers know no epoch
        if epoch != self._placement.epoch:
            # what a resumed run leaves out belongs to the epoch in which it was interrupted
            self._placement.skip = 0
        self._placement.epoch = epoch


# attributes in which batch samplers keep samples between batches, and what they look like empty
_LEFTOVERS = {
    '_aspect_ratio_buckets': lambda sampler: [[] for _ in range(2)],
    '_buckets': lambda sampler: [[] for _ in range(2 * sampler.num_datasets)],
}


class PlacedBatchSampler:
    """Mixin: begins at batch ``skip``, and forgets what an abandoned pass left over."""
    _placement: Placement

    def __iter__(self) -> Iterator[List[Any]]:
        # not a generator: the data loader draws its base seed right after it has called iter()
        placement = self._placement
        placement.generator.manual_seed(
            seeds.derive(placement.root, 'worker', 'base', placement.epoch).torch)
        return self._batches()

    def _batches(self) -> Iterator[List[Any]]:
        placement = self._placement
        for name, empty in _LEFTOVERS.items():
            if hasattr(self, name):
                setattr(self, name, empty(self))
        skip = placement.skip
        if type(self).__mro__[2] is BatchSampler and isinstance(self.sampler, PlacedSampler):
            # consecutive samples make a batch: the sampler can jump
            placement.start, skip = skip * self.batch_size, 0
        else:
            placement.start = 0
        return itertools.islice(super().__iter__(), skip, None)

    def __len__(self) -> int:
        # some batch samplers count by iterating; that must neither jump nor lose leftovers
        start, self._placement.start = self._placement.start, 0
        try:
            return super().__len__()
        finally:
            self._placement.start = start


@lru_cache(maxsize=None)
def _placed(mixin: type, cls: type) -> type:
    return type(f'Placed{cls.__name__}', (mixin, cls), {'__module__': cls.__module__})


def adopt_sampler(sampler: Sampler, placement: Placement) -> Sampler:
    """Give a built sampler its keyed order, in place. Adopting twice changes nothing but the root.

    Raises:
        TypeError: for an object whose class cannot be extended.
    """
    return _adopt(sampler, PlacedSampler, placement)


def adopt_batch_sampler(batch_sampler: Any, placement: Placement) -> Any:
    """As :func:`adopt_sampler`, for a batch sampler."""
    return _adopt(batch_sampler, PlacedBatchSampler, placement)


def _adopt(obj: Any, mixin: type, placement: Placement) -> Any:
    if not isinstance(obj, mixin):
        obj.__class__ = _placed(mixin, type(obj))
    obj._placement = placement
    return obj
