"""The order of each sampler as a pure function of (root seed, epoch, local start).

One function per class of samplers; :data:`SAMPLING_ORDERS` is the table. Each yields ``(index,
epoch, position)`` for this rank from its ``start``-th sample on, where ``position`` counts over all
ranks, so that the set of positions in a global batch does not depend on the number of ranks.
Samplers with an entry jump to ``start`` without visiting the samples before it.

Permutations come from ``numpy.random.RandomState``, whose streams NumPy has frozen (NEP 19).

A hook may change the weights of a sampler, or of the dataset that it reads, within a pass. A run
that resumes in the pass draws its order again, as do workers that start again; so a pass notes the
attributes that checkpoints keep (:mod:`mmrepro.checkpoint.kept_attributes`) at each draw, in an
:class:`OrderHistory`. An order is drawn in blocks.
"""
from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Callable

import numpy as np
from mmengine import dist

from .. import seeds
from ..errors import RandomnessError
from ..objects.digests import exact_digest
from ..util.text import qualified_name
from . import generators


class OrderHistory:
    """The kept attributes at each draw of a pass.

    Args:
        kept: reads them, and replaces them for a while.
        again: :meth:`as_dict` of the pass, if this pass continues it.
    """

    def __init__(self, kept: Any, again: Mapping[str, Any]) -> None:
        self._kept = kept
        self._states: list[Any] = list(again.get('states', ()))
        # name of what draws, number of the draw -> index of the state
        self._draws: dict[str, list[int]] = {
            name: list(draws) for name, draws in again.get('draws', {}).items()}
        self._last = exact_digest(self._states[-1]) if self._states else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return dict(states=list(self._states),
                    draws={name: list(draws) for name, draws in self._draws.items()})

    @contextmanager
    def drawing(self, name: str, number: int) -> Iterator[None]:
        """Make a draw in this block; repeat an earlier draw from the state that it had."""
        draws = self._draws.setdefault(name, [])
        if number < len(draws):
            with self._kept.replaced(self._states[draws[number]]):
                yield
            return
        state = self._kept.read()
        digest = exact_digest(state)
        if digest != self._last:
            self._states.append(state)
            self._last = digest
        draws.append(len(self._states) - 1)
        yield


def drawing(sampler: Any, name: str, number: int) -> AbstractContextManager[None]:
    """Return the context in which an adopted sampler makes a draw of its order."""
    history = sampler._mmrepro_loader_position.history
    return nullcontext() if history is None else history.drawing(name, number)


Position = tuple[Any, int, int]  # index, epoch, global position
SamplingOrder = Callable[[Any, Any, int], Iterator[Position]]


def _permutation(root: seeds.Root, size: int, *key: seeds.Key) -> Any:
    return seeds.random_state(root, 'sampler', *key).permutation(size).tolist()


def _strided(indices: list[Any], sampler: Any, start: int) -> Iterator[Position]:
    """Yield every ``world_size``-th of an epoch's global indices, from the rank's first on."""
    first, epoch = sampler.rank + start * sampler.world_size, sampler.epoch
    if sampler.round_up and indices:
        indices = (indices * (sampler.total_size // len(indices) + 1))[:sampler.total_size]
    for position in range(first, len(indices), sampler.world_size):
        yield indices[position], epoch, position


def _epoch(sampler: Any) -> Any:
    return sampler._mmrepro_loader_position.epoch


def default(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmengine ``DefaultSampler``: one permutation an epoch, strided over the ranks."""
    size = len(sampler.dataset)
    indices = _permutation(root, size, 'DefaultSampler', sampler.epoch) if sampler.shuffle \
        else list(range(size))
    return _strided(indices, sampler, start)


def _endless(root: seeds.Root, size: int, shuffle: bool, first: int, step: int,
             *key: seeds.Key) -> Iterator[tuple[int, int]]:
    """Yield (index, position) of endless passes over ``size`` items."""
    if size == 0:
        raise RandomnessError(f'cannot draw from an empty source ({", ".join(map(str, key))})')
    current = -1
    indices: Sequence[int] = range(size)
    for position in itertools.count(first, step):
        number, offset = divmod(position, size)
        if shuffle and number != current:
            current, indices = number, _permutation(root, size, *key, number)
        yield indices[offset], position


def infinite(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmengine ``InfiniteSampler``: endless passes, each with its own permutation."""
    first = sampler.rank + start * sampler.world_size
    for index, position in _endless(root, len(sampler.dataset), sampler.shuffle, first,
                                    sampler.world_size, 'InfiniteSampler'):
        yield index, 0, position


def _from_sources(sampler: Any, batches: Iterable[Sequence[Iterator[int]]],
                  start: int) -> Iterator[Position]:
    """Yield the samples of batches, given the stream of each source for every batch.

    The first batch is that in which ``start`` lies.
    """
    def indices() -> Iterator[int]:
        for streams in batches:
            for offset, stream, number in zip(sampler.cumulative_sizes, streams,
                                              sampler.num_per_source):
                for index in itertools.islice(stream, number):
                    yield offset + index

    for local, index in enumerate(indices(), start - start % sampler.batch_size):
        if local >= start:
            yield index, 0, local * sampler.world_size + sampler.rank


def _streams(sampler: Any, root: seeds.Root, members: Sequence[Sequence[int]], drawn: int,
             *key: seeds.Key) -> list[Iterator[int]]:
    """Return an endless stream of each source, from which ``drawn`` batches have been taken."""

    def stream(source: int, number: int) -> Iterator[int]:
        first = sampler.rank + drawn * number * sampler.world_size
        for index, _ in _endless(root, len(members[source]), sampler.shuffle, first,
                                 sampler.world_size, *key, source):
            yield members[source][index]

    return [stream(*share) for share in enumerate(sampler.num_per_source)]


def multi_source(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmdet ``MultiSourceSampler``: a fixed share of every source in each batch."""
    members = [range(len(dataset)) for dataset in sampler.dataset.datasets]
    streams = _streams(sampler, root, members, start // sampler.batch_size, 'MultiSourceSampler')
    return _from_sources(sampler, itertools.repeat(streams), start)


_BLOCK = 1024  # group choices drawn at a time


def _groups(sampler: Any, root: seeds.Root) -> Iterator[int]:
    """Yield the group of each batch: the same on all ranks."""
    for block in itertools.count():
        state = seeds.random_state(root, 'sampler', 'GroupMultiSourceSampler', 'group', block)
        yield from state.choice(len(sampler.group_ratio), size=_BLOCK,
                                p=sampler.group_ratio).tolist()


def group_multi_source(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmdet ``GroupMultiSourceSampler``: the same within one aspect-ratio group a batch."""
    groups = _groups(sampler, root)
    drawn = np.bincount(list(itertools.islice(groups, start // sampler.batch_size)),
                        minlength=len(sampler.group_ratio))

    @functools.cache
    def streams(group: int) -> list[Iterator[int]]:
        members = [by_group[group] for by_group in sampler.group2inds_per_source]
        return _streams(sampler, root, members, int(drawn[group]), 'GroupMultiSourceSampler', group)

    return _from_sources(sampler, map(streams, groups), start)


def custom_sample_size(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmdet ``CustomSampleSizeSampler``: a share of each dataset an epoch, cycling through it.

    MMDetection keeps the cycles in the sampler, so that a resumed run starts them again; here the
    share of an epoch follows those of the epochs before.
    """
    chosen: list[int] = []
    for source, (size, members) in enumerate(zip(sampler.dataset_size, sampler.dataset_index)):
        if size == -1:
            chosen += members
        else:
            stream = _endless(root, len(members), True, sampler.epoch * size, 1,
                              'CustomSampleSizeSampler', source)
            chosen += [members[index] for index, _ in itertools.islice(stream, size)]
    order = _permutation(root, len(chosen), 'CustomSampleSizeSampler', 'epoch', sampler.epoch)
    return _strided([chosen[i] for i in order], sampler, start)


_SEED_BITS = 30  # NumPy's seeds take 32 bits, and MMEngine's samplers add the epoch


def _stock(sampler: Any, root: seeds.Root) -> Iterator[Any]:
    """Return the order of the stock class, from the start of this epoch's stream.

    The class may draw from the global generators, from generators that it keeps, and from a
    generator that it makes of ``seed + epoch``.
    """
    epoch, stock = _epoch(sampler), sampler._mmrepro_stock
    key = ('sampler', stock.__name__, epoch)
    counted = getattr(sampler, 'epoch', 0)
    # the sampler counts its passes itself, and that of a resumed run begins at zero
    counts = isinstance(counted, int) and not hasattr(stock, 'set_epoch')
    counted = epoch if counts else counted
    seed = getattr(sampler, 'seed', None)
    if isinstance(seed, numbers.Integral) and not isinstance(seed, bool):
        seed = (1 << _SEED_BITS) + (seeds.derive(root, *key).torch >> (64 - _SEED_BITS))
        sampler.seed = seed - counted if isinstance(counted, int) else seed

    if counts and hasattr(sampler, 'epoch'):
        sampler.epoch = epoch
    return isolated_order(sampler, lambda: stock.__iter__(sampler), _BLOCK, root, *key)


def isolated_order(sampler: Any, order: Callable[[], Iterator[Any]], block: int,
                   root: seeds.Root, stream: str, *key: seeds.Key) -> Iterator[Any]:
    """Yield the items of ``order()``, drawn ``block`` at a time with generators of a stream.

    Raises:
        RandomnessError: called in a thread that does not train.
    """
    name = sampler._mmrepro_stock.__name__
    inside, kept = None, generators.find(sampler, name, data=False)
    items: Iterator[Any] = iter(())
    for number in itertools.count():
        generators.check_thread(f'asks {name} for its order')
        with seeds.isolate_rng(), drawing(sampler, name, number):
            if inside is None:
                generators.begin_stream(kept, root, stream, *key)
                items = order()
            else:
                seeds.restore_rng(inside)
            chunk = list(itertools.islice(items, block))
            inside = seeds.capture_rng()
        yield from chunk
        if len(chunk) < block:
            return


def contiguous(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
    """mmdet ``ClassAwareSampler``: each rank takes one contiguous part of the epoch."""
    first = sampler.num_samples * sampler.rank
    for local, index in enumerate(itertools.islice(_stock(sampler, root), start, None), start):
        yield index, sampler.epoch, first + local


def _on_each_rank(indices_of: Callable[[Any, seeds.Root], Iterable[Any]]) -> SamplingOrder:
    """Return the order of a sampler that yields all of an epoch's indices on each rank."""

    def order(sampler: Any, root: seeds.Root, start: int) -> Iterator[Position]:
        (rank, world_size), epoch = dist.get_dist_info(), _epoch(sampler)
        indices = itertools.islice(indices_of(sampler, root), start, None)
        for local, index in enumerate(indices, start):
            yield index, epoch, local * world_size + rank

    return order


def _random(sampler: Any, root: seeds.Root) -> list[int]:
    state = seeds.random_state(root, 'sampler', 'RandomSampler', _epoch(sampler))
    size, count = len(sampler.data_source), sampler.num_samples
    if sampler.replacement:
        drawn: list[int] = state.randint(0, size, count, np.int64).tolist()
        return drawn
    indices: list[int] = []
    while len(indices) < count:
        indices += state.permutation(size).tolist()
    return indices[:count]


def _weighted(sampler: Any, root: seeds.Root) -> list[int]:
    state = seeds.random_state(root, 'sampler', 'WeightedRandomSampler', _epoch(sampler))
    weights = sampler.weights.double().cpu().numpy()
    indices: list[int] = state.choice(len(weights), sampler.num_samples, sampler.replacement,
                                      weights / math.fsum(weights)).tolist()
    return indices


def _subset(sampler: Any, root: seeds.Root) -> list[Any]:
    order = _permutation(root, len(sampler.indices), 'SubsetRandomSampler', _epoch(sampler))
    return [sampler.indices[i] for i in order]


# unknown samplers: keep their order and assume that it is strided over the ranks
strided_stock = _on_each_rank(_stock)

# Samplers of one pass without end.
ENDLESS = ('mmengine.dataset.sampler.InfiniteSampler',
           'mmdet.datasets.samplers.multi_source_sampler.MultiSourceSampler')

# stock class (exactly, not a subclass: a subclass may order differently) -> order
SAMPLING_ORDERS: dict[str, SamplingOrder] = {
    'mmengine.dataset.sampler.DefaultSampler': default,
    'mmengine.dataset.sampler.InfiniteSampler': infinite,
    'mmdet.datasets.samplers.class_aware_sampler.ClassAwareSampler': contiguous,
    'mmdet.datasets.samplers.multi_source_sampler.MultiSourceSampler': multi_source,
    'mmdet.datasets.samplers.multi_source_sampler.GroupMultiSourceSampler': group_multi_source,
    'mmdet.datasets.samplers.custom_sample_size_sampler.CustomSampleSizeSampler':
        custom_sample_size,
    'torch.utils.data.sampler.SequentialSampler': _on_each_rank(
        lambda sampler, root: range(len(sampler.data_source))),
    # which DataLoader(shuffle=True) makes
    'torch.utils.data.sampler.RandomSampler': _on_each_rank(_random),
    'torch.utils.data.sampler.WeightedRandomSampler': _on_each_rank(_weighted),
    'torch.utils.data.sampler.SubsetRandomSampler': _on_each_rank(_subset),
}


# sampler -> (cause in docs/reference/causes.md, what its stock order does)
STOCK_FAULTS = {
    'GroupMultiSourceSampler': (
        'C3', "groups are drawn from the main process's global generator"),
    'CustomSampleSizeSampler': ('B13', 'its cycle starts again after a resume'),
}


def is_endless(sampler: Any) -> bool:
    """Whether a sampler is one of :data:`ENDLESS` or derived from it."""
    return any(qualified_name(cls) in ENDLESS for cls in type(sampler).__mro__)


def sampling_order_of(cls: type) -> SamplingOrder:
    """Return the order function for a stock sampler class."""
    return SAMPLING_ORDERS.get(qualified_name(cls), strided_stock)
