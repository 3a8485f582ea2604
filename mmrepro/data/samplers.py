"""Keyed orders for samplers and batch samplers that exist: same objects, same attributes.

A sampler is *adopted*: its class becomes a subclass of its own class whose ``__iter__`` is the
keyed order of :mod:`mmrepro.data.sampling_orders`. Attributes, ``isinstance`` and ``set_epoch``
work as before, so that MMDetection's batch samplers, which look into their sampler, see no
difference. The indices carry their global position; batch samplers pass them through untouched, and
the worker that receives an index knows which stream of random numbers belongs to it.
"""
from __future__ import annotations

import copy
import itertools
import operator
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch.utils.data import BatchSampler, Sampler

from .. import seeds
from ..errors import RandomnessError
from ..util.scoped import extend, replaced
from ..util.text import qualified_name
from .sampling_orders import OrderHistory, drawing, is_endless, isolated_order, sampling_order_of

MAX_DRAWN = 4096  # batches; loaders draw some ahead, and a run without fingerprints reads none


class _Positioned:
    """An index with ``epoch`` and global ``position``; equal to the plain index."""
    epoch: int
    position: int

    def __new__(cls, index: Any, epoch: int, position: int) -> Any:
        self = super().__new__(cls, index)  # type: ignore[call-arg]
        self.epoch, self.position = epoch, position
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (plain(self), self.epoch, self.position)


class PositionedInt(_Positioned, int):
    """A dataset index that carries its position."""


class PositionedTuple(_Positioned, tuple):  # type: ignore[type-arg]
    """As :class:`PositionedInt`, for samplers whose index is a tuple (video, frame)."""


def with_position(index: Any, epoch: int, position: int) -> Any:
    """Attach a position to the index that a sampler yields.

    Raises:
        RandomnessError: the sampler yields neither an integer nor a tuple.
    """
    if isinstance(index, tuple):
        return PositionedTuple(index, epoch, position)
    try:
        return PositionedInt(operator.index(index), epoch, position)
    except TypeError:
        raise RandomnessError(
            f'the sampler yields {index!r} of type {type(index).__name__}; sample streams need an '
            "int or a tuple. Use randomness.worker_seed='mmengine' for this data loader") from None


def positioned(index: Any) -> Any:
    """Return an index of a batch with the position that the sampler has given it.

    A batch sampler may add more to it: a tuple has the position of the one index within.

    Raises:
        RandomnessError: it has no position.
    """
    if isinstance(index, _Positioned):
        return index
    within = [part for part in index if isinstance(part, _Positioned)] if isinstance(
        index, tuple) else []
    if len(within) != 1:
        raise RandomnessError(
            f'the batch sampler passed {index!r} of type {type(index).__name__} without its '
            'position: pass on what the sampler yields, alone or in a tuple. Use '
            "randomness.worker_seed='mmengine' for this data loader")
    return PositionedTuple(index, within[0].epoch, within[0].position)


def plain(index: Any) -> int | tuple[Any, ...]:
    """Return the index as the dataset knows it."""
    if isinstance(index, tuple):
        return tuple(plain(part) if isinstance(part, _Positioned) else part for part in index)
    return int(index)


@dataclass
class LoaderPosition:
    """The position of a data loader, shared by its sampler, batch sampler and workers."""
    root: seeds.Root
    skip: int = 0  # batches that the next pass leaves out at its beginning (already trained on)
    resumed: int = 0  # batches of this epoch that were trained on before the run resumed
    start: int = 0  # samples that the sampler leaves out at its beginning
    epoch: int = 0  # pass over the data; kept here, because few samplers know theirs
    # the loader's own generator, put in place at the start of each pass
    generator: torch.Generator = field(default_factory=torch.Generator)
    # batches of indices drawn in this pass, oldest first; :meth:`begin_iteration` removes them
    drawn: deque[tuple[Any, ...]] = field(default_factory=lambda: deque(maxlen=MAX_DRAWN))
    current: tuple[Any, ...] | None = None  # indices in the batch of this iteration, if known
    # attributes that checkpoints keep, from which orders may be drawn; None: there are none
    kept: Any = None
    again: dict[str, Any] = field(default_factory=dict)  # history of a pass that goes on
    begun: OrderHistory | None = None  # of the pass that has begun
    history: OrderHistory | None = None  # of the pass that draws right now

    def begin_iteration(self) -> None:
        """Take the indices of the batch that the loop has read."""
        self.current = self.drawn.popleft() if self.drawn else None

    def __reduce__(self) -> tuple[Any, ...]:
        # to a spawned worker: generators do not travel
        return LoaderPosition, (self.root, 0, 0, 0, self.epoch)


def position_of_loader(loader: Any) -> LoaderPosition | None:
    """Return the loader_position of an adopted loader, or None."""
    return getattr(getattr(loader, 'batch_sampler', None), '_mmrepro_loader_position', None)


class FixedOrder(Sampler[Any]):
    """A list or range that a user gave in place of a sampler."""

    def __init__(self, indices: Sequence[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def adopt(obj: Any, methods: Mapping[str, Any], **state: Any) -> None:
    """Extend an object by methods, and attach state to it.

    The only place where data loading writes to objects of the user. Adopting an object again
    changes only its state.

    Args:
        methods: as for :func:`mmrepro.util.scoped.extend`; ``type(self)._mmrepro_stock`` is the
            class of before.
        state: attributes, as ``_mmrepro_<name>``.

    Raises:
        TypeError: the class of the object cannot be extended.
    """
    extend(obj, methods, prefix='Keyed')
    for name, value in state.items():
        setattr(obj, f'_mmrepro_{name}', value)


# ---- methods of adopted samplers


def _sampler_iter(self: Any) -> Iterator[Any]:
    """Yield indices with their position, in keyed order."""
    loader_position, stock = self._mmrepro_loader_position, self._mmrepro_stock
    order = sampling_order_of(stock)(self, loader_position.root, loader_position.start)
    with drawing(self, 'order', 0):  # most orders are drawn as a whole
        first = list(itertools.islice(order, 1))
    for index, epoch, position in itertools.chain(first, order):
        yield with_position(index, epoch, position)


def _sampler_set_epoch(self: Any, epoch: int) -> None:
    loader_position, stock = self._mmrepro_loader_position, self._mmrepro_stock
    if hasattr(stock, 'set_epoch'):
        stock.set_epoch(self, epoch)
    if is_endless(self):
        return
    if epoch != loader_position.epoch:
        # samples that a resumed run leaves out belong to the epoch in which it was interrupted
        loader_position.skip = loader_position.resumed = 0
        loader_position.again = {}
    loader_position.epoch = epoch


# ---- methods of adopted batch samplers

# attributes in which batch samplers keep samples between batches -> an empty one
_LEFTOVERS: dict[str, Callable[[Any], Any]] = {
    '_aspect_ratio_buckets': lambda sampler: [[] for _ in range(2)],
    '_buckets': lambda sampler: [[] for _ in range(2 * sampler.num_datasets)],
}
_DRAW_NOTHING = (
    'torch.utils.data.sampler.BatchSampler',
    'mmdet.datasets.samplers.batch_sampler.AspectRatioBatchSampler',
    'mmdet.datasets.samplers.batch_sampler.TrackAspectRatioBatchSampler',
    'mmdet.datasets.samplers.batch_sampler.MultiDataAspectRatioBatchSampler',
)


def _stock_batches(self: Any) -> Any:
    """Return the batches of the stock class; if it may draw, with isolated generators."""
    loader_position, stock = self._mmrepro_loader_position, self._mmrepro_stock
    if qualified_name(stock) in _DRAW_NOTHING:
        return stock.__iter__(self)
    return isolated_order(self, lambda: iter(stock.__iter__(self)), 1, loader_position.root,
                          'sampler', stock.__name__, loader_position.epoch)


def _batches(self: Any) -> Iterator[list[Any]]:
    """Yield batches from number ``skip`` on, without leftovers of an abandoned pass."""
    loader_position = self._mmrepro_loader_position
    leftovers = {name: empty(self) for name, empty in _LEFTOVERS.items() if hasattr(self, name)}
    if leftovers:  # each pass keeps its own: a hook may make one in the middle of another
        self = copy.copy(self)
        vars(self).update(leftovers)
    # only one pass begins in the middle: a hook may look at the data before or after it
    skip, loader_position.skip, loader_position.start = loader_position.skip, 0, 0
    if self._mmrepro_stock is BatchSampler and hasattr(self.sampler, '_mmrepro_loader_position'):
        # consecutive samples make a batch: the sampler can jump
        loader_position.start, skip = skip * self.batch_size, 0
    drawn = loader_position.drawn = deque(maxlen=MAX_DRAWN)
    history = loader_position.begun = OrderHistory(loader_position.kept, loader_position.again) \
        if loader_position.kept else None
    loader_position.again = {}
    batches = itertools.islice(_stock_batches(self), skip, None)
    while True:
        with replaced(loader_position, history=history):
            batch = next(batches, None)
        if batch is None:
            return
        drawn.append(tuple(batch))
        yield batch


def _batch_sampler_iter(self: Any) -> Iterator[list[Any]]:
    # not a generator: the data loader draws its base seed right after it has called iter()
    loader_position = self._mmrepro_loader_position
    loader_position.generator.manual_seed(
        seeds.derive(loader_position.root, 'worker', 'base', loader_position.epoch).torch)
    # DataLoader calls iter() twice and uses the last: nothing may be reset before the first next()
    return _batches(self)


def _batch_sampler_len(self: Any) -> Any:
    # some batch samplers count by iterating, which must begin at the beginning
    loader_position = self._mmrepro_loader_position
    with replaced(loader_position, start=0, skip=0, drawn=loader_position.drawn, history=None):
        return self._mmrepro_stock.__len__(self)


_SAMPLER: dict[str, Any] = {'__iter__': _sampler_iter, 'set_epoch': _sampler_set_epoch}
_BATCH_SAMPLER: dict[str, Any] = {'__iter__': _batch_sampler_iter, '__len__': _batch_sampler_len}


def adopt_sampler(sampler: Any, loader_position: LoaderPosition, batches: bool = False) -> Any:
    """Give a built sampler or batch sampler (``batches``) its keyed order, in place; return it.

    Raises:
        RandomnessError: its class cannot be extended.
    """
    try:
        adopt(sampler, _BATCH_SAMPLER if batches else _SAMPLER, loader_position=loader_position)
    except TypeError as error:
        raise RandomnessError(
            f'the sampler {sampler!r} of type {type(sampler).__name__} cannot be given a keyed '
            f'order ({error}); it must be an object of a Python class with __iter__ and __len__, '
            'without __slots__') from None
    return sampler
