"""Key the order of samplers and batch samplers: same objects, same attributes.

A built sampler is *adopted*: its class becomes a subclass of its own class whose ``__iter__`` is
the keyed order of :mod:`mmrepro.data.sampling_orders`. Attributes, ``isinstance`` and
``set_epoch`` work as before, so that MMDetection's batch samplers, which look into their sampler,
see no difference.
"""
from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils.data import BatchSampler, Sampler

from .. import seeds
from .positions import with_position
from .sampling_orders import is_endless, isolated_order, sampling_order_of

MAX_DRAWN = 4096  # batches; loaders draw some ahead, and a run without fingerprints reads none


@dataclass
class Placement:
    """Where a data loader is; shared by its sampler, its batch sampler and its workers.

    Attributes:
        root: root seed.
        skip: batches that the next pass leaves out at its beginning (already trained on).
        resumed: batches of this epoch that were trained on before the run resumed.
        start: samples that the sampler leaves out at its beginning.
        epoch: pass over the data. Kept here, because few samplers know theirs.
        generator: the loader's own generator, put in place at the start of each pass.
        drawn: batches of indices drawn in this pass, oldest first; reading removes them.
    """
    root: int
    skip: int = 0
    resumed: int = 0
    start: int = 0
    epoch: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)
    drawn: deque[tuple] = field(default_factory=lambda: deque(maxlen=MAX_DRAWN))

    def __reduce__(self) -> tuple:
        # to a spawned worker: generators do not travel
        return Placement, (self.root, 0, 0, 0, self.epoch)


class FixedOrder(Sampler):
    """A list or range that a user gave in place of a sampler."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


# Methods of the adopted classes. Plain functions, because an object can only move to a subclass
# that has its own class as single base; `stock` is that base.


def _sampler_iter(self: Any) -> Iterator[Any]:
    """Keyed order; indices carry their position."""
    placement, stock = self._placement, type(self).__base__
    for index, epoch, position in sampling_order_of(stock)(self, placement.root, placement.start):
        yield with_position(index, epoch, position)


def _sampler_set_epoch(self: Any, epoch: int) -> None:
    stock = type(self).__base__
    if hasattr(stock, 'set_epoch'):
        stock.set_epoch(self, epoch)
    if is_endless(self):
        return
    if epoch != self._placement.epoch:
        # what a resumed run leaves out belongs to the epoch in which it was interrupted
        self._placement.skip = self._placement.resumed = 0
    self._placement.epoch = epoch


# attributes in which batch samplers keep samples between batches, and what they look like empty
_LEFTOVERS = {
    '_aspect_ratio_buckets': lambda sampler: [[] for _ in range(2)],
    '_buckets': lambda sampler: [[] for _ in range(2 * sampler.num_datasets)],
}


# batch samplers that draw nothing
_DRAW_NOTHING = (
    'torch.utils.data.sampler.BatchSampler',
    'mmdet.datasets.samplers.batch_sampler.AspectRatioBatchSampler',
    'mmdet.datasets.samplers.batch_sampler.TrackAspectRatioBatchSampler',
    'mmdet.datasets.samplers.batch_sampler.MultiDataAspectRatioBatchSampler',
)


def _stock_batches(self: Any) -> Iterator[list[Any]]:
    """Batches of the class's own making, from generators of their own where they may draw."""
    placement, stock = self._placement, type(self).__base__
    if f'{stock.__module__}.{stock.__qualname__}' in _DRAW_NOTHING:
        return stock.__iter__(self)
    return isolated_order(self, lambda: iter(stock.__iter__(self)), 1, placement.root, 'sampler',
                          stock.__name__, placement.epoch)


def _batches(self: Any) -> Iterator[list[Any]]:
    """Begins at batch ``skip``, and forgets what an abandoned pass left over."""
    placement, stock = self._placement, type(self).__base__
    leftovers = {name: empty(self) for name, empty in _LEFTOVERS.items() if hasattr(self, name)}
    if leftovers:  # each pass keeps its own: a hook may make one in the middle of another
        self = copy.copy(self)
        vars(self).update(leftovers)
    # only one pass begins in the middle: a hook may look at the data before or after it
    skip, placement.skip, placement.start = placement.skip, 0, 0
    if stock is BatchSampler and hasattr(self.sampler, '_placement'):
        # consecutive samples make a batch: the sampler can jump
        placement.start, skip = skip * self.batch_size, 0
    drawn = placement.drawn = deque(maxlen=MAX_DRAWN)
    for batch in itertools.islice(_stock_batches(self), skip, None):
        drawn.append(tuple(batch))
        yield batch


def _batch_sampler_iter(self: Any) -> Iterator[list[Any]]:
    # not a generator: the data loader draws its base seed right after it has called iter()
    placement = self._placement
    placement.generator.manual_seed(
        seeds.derive(placement.root, 'worker', 'base', placement.epoch).torch)
    # it calls iter() twice and uses the last: nothing may be reset before the first next()
    return _batches(self)


def _batch_sampler_len(self: Any) -> int:
    # some batch samplers count by iterating, which must begin at the beginning
    placement = self._placement
    before = placement.start, placement.skip, placement.drawn
    placement.start = placement.skip = 0
    try:
        return type(self).__base__.__len__(self)
    finally:
        placement.start, placement.skip, placement.drawn = before


_SAMPLER = {'__iter__': _sampler_iter, 'set_epoch': _sampler_set_epoch}
_BATCH_SAMPLER = {'__iter__': _batch_sampler_iter, '__len__': _batch_sampler_len}


@cache
def _keyed(cls: type, batches: bool) -> type:
    methods = _BATCH_SAMPLER if batches else _SAMPLER
    return type(f'Keyed{cls.__name__}', (cls,), {**methods, '__module__': cls.__module__})


def _adopt(obj: Any, batches: bool, placement: Placement) -> Any:
    if not hasattr(obj, '_placement'):
        try:
            obj.__class__ = _keyed(type(obj), batches)
        except TypeError as error:
            raise TypeError(
                f'the sampler {obj!r} of type {type(obj).__name__} cannot be given a keyed order '
                f'({error}); it must be an object of a Python class with __iter__ and __len__, '
                'without __slots__') from None
    obj._placement = placement
    return obj


def adopt_sampler(sampler: Sampler, placement: Placement) -> Sampler:
    """Give a built sampler its keyed order, in place. Adopting twice changes only the placement.

    Raises:
        TypeError: for an object whose class cannot be extended.
    """
    return _adopt(sampler, False, placement)


def adopt_batch_sampler(batch_sampler: Any, placement: Placement) -> Any:
    """As :func:`adopt_sampler`, for a batch sampler."""
    return _adopt(batch_sampler, True, placement)
