"""Seeding of every sample, in the worker, right before the data set is asked for it.

PyTorch's fetcher looks up ``__getitems__`` on the data set *instance*, so that no wrapper stands
between MMEngine's hooks and the data set they poke at.
"""
from __future__ import annotations

import bisect
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch.utils.data import get_worker_info

from .. import seeds
from . import dataset_tree, generators
from .generators import Generators
from .positions import PlacedInt, PlacedTuple, plain
from .worker_signals import shield

__all__ = ['BatchContext', 'BatchPart', 'KeyedCollate', 'KeyedFetch', 'WorkerInit', 'current_batch',
           'keyed_collate']

# Samples beside the batch's own, chosen at random, that cached transforms may mix in; a mosaic
# takes three partners and stock's condition for a mosaic is five cached results.
EXTRA_SAMPLES = 5

_current: Optional[BatchContext] = None


def current_batch() -> Optional[BatchContext]:
    """The batch that is being loaded in this process, or None."""
    return _current


class _Captured(BaseException):
    """Ends the loading of a sample at the transform that asked for its state.

    Derived from BaseException: transforms that catch Exception must not stop it.
    """


# Which sample of a batch: its number behind EXTRA_SAMPLES, or the number of an extra sample of all
# data sets, or (path of a part, number) for one of a part's own
Handle = Union[int, Tuple[dataset_tree.Path, int]]


class BatchPart:
    """The samples of a batch that reach one transform: those of the data sets that hold it.

    Attributes:
        path: to the part of the data that holds the transform, see
            :mod:`mmrepro.data.dataset_tree`.
    """

    def __init__(self, batch: BatchContext, path: dataset_tree.Path) -> None:
        self.path, self._batch = path, batch
        self._members = [EXTRA_SAMPLES + i for i, one in enumerate(batch.paths())
                         if one[:len(path)] == path]

    def handle(self, offset: int) -> Handle:
        """Extra samples of the part first, then its samples of the batch."""
        if offset >= EXTRA_SAMPLES:
            return self._members[offset - EXTRA_SAMPLES]
        return (self.path, offset) if self.path else offset

    def current(self) -> int:
        """The offset of the sample that is being loaded, or would be if it were one of these."""
        current = self._batch.current
        if isinstance(current, tuple) and current[0] == self.path:
            return current[1]
        if not isinstance(current, int):
            return EXTRA_SAMPLES
        if current < EXTRA_SAMPLES:
            return EXTRA_SAMPLES if self.path else current
        return EXTRA_SAMPLES + bisect.bisect_left(self._members, current)


class BatchContext:
    """The samples of one batch, each addressable up to any transform of its pipeline.

    Entries ``0 .. EXTRA_SAMPLES - 1`` are samples chosen at random for this batch, which are loaded
    only when something asks for them; then come the samples of the batch. All of it is a
    function of the places of the batch's samples, so that any worker gives the same result.
    Where data sets are joined, a transform mixes samples of the data set that it belongs to, and
    the extra samples are of that data set.
    """

    def __init__(self, dataset: Any, root: int, stream: str, batch: Sequence[Any],
                 own: Optional[Generators] = None) -> None:
        self.dataset = dataset
        self._own = own or {}
        self._root, self._stream = root, stream
        self._entries: List[Tuple[Any, tuple]] = [
            (plain(index), (index.epoch, index.position)) for index in batch]
        self._extra: Dict[dataset_tree.Path, List[Tuple[Any, tuple]]] = {}
        self._datasets: Dict[dataset_tree.Path, Any] = {(): dataset}
        self._parts: Dict[int, BatchPart] = {}
        self._paths: Optional[List[dataset_tree.Path]] = None
        self.current: Handle = 0
        self._wanted: Optional[object] = None
        self._states: Dict[Tuple[int, Handle], Any] = {}

    def paths(self) -> List[dataset_tree.Path]:
        """Which part of the data each sample of the batch comes from."""
        if self._paths is None:
            self._paths = [dataset_tree.path_of(self.dataset, index) for index, _ in self._entries]
        return self._paths

    def part(self, transform: object) -> BatchPart:
        """The samples that reach ``transform``."""
        if id(transform) not in self._parts:
            path, self._datasets[path] = dataset_tree.holder(self.dataset, transform)
            self._parts[id(transform)] = BatchPart(self, path)
        return self._parts[id(transform)]

    def _entry(self, handle: Handle) -> Tuple[Any, tuple]:
        if isinstance(handle, int) and handle >= EXTRA_SAMPLES:
            return self._entries[handle - EXTRA_SAMPLES]
        path, number = handle if isinstance(handle, tuple) else ((), handle)
        if path not in self._extra:
            size = len(self._datasets[path])
            _, first = self._entries[0]
            key = (*first, 'extra', *path)
            draw = seeds.python_generator(self._root, self._stream, *key)
            self._extra[path] = [(draw.randrange(size), (*key, k)) for k in range(EXTRA_SAMPLES)]
        return self._extra[path][number]

    def load(self, handle: Handle) -> Any:
        """A sample, from the start of its own stream."""
        index, key = self._entry(handle)
        dataset = self._datasets[handle[0]] if isinstance(handle, tuple) else self.dataset
        self.current = handle
        seeds.seed_all(self._root, self._stream, *key)
        generators.reseed(self._own, self._root, self._stream, *key)
        return dataset[index]

    def reached(self, transform: object, results: Any) -> None:
        """Called by a transform with the state of the current sample; the first call counts."""
        self._states.setdefault((id(transform), self.current), results)
        if self._wanted is transform:
            raise _Captured

    def state(self, transform: object, handle: Handle) -> Any:
        """What ``transform`` was given, or would be, for a sample.

        Raises:
            RuntimeError: when that sample's pipeline does not reach the transform.
        """
        key = (id(transform), handle)
        if key not in self._states:
            before = self.current, self._wanted
            self._wanted = transform
            with seeds.isolate_rng(accelerators=False), generators.isolated(self._own):
                try:
                    self.load(handle)
                except _Captured:
                    pass
                finally:
                    self.current, self._wanted = before
        if key not in self._states:
            raise RuntimeError(
                f'{type(transform).__name__} mixes samples, but the pipeline of sample '
                f'{self._entry(handle)[0]} does not reach it; put it into the pipeline itself, '
                'not into a choice or a chance, and join data sets by ConcatDataset')
        return self._states[key]


@contextmanager
def _as_in_a_worker(own: Generators) -> Iterator[None]:
    """For loading in the main process.

    What that draws elsewhere does not depend on whether it loads samples itself; and torch gives
    a worker one thread, where sums are other sums than those of several.
    """
    threads = torch.get_num_threads()
    with seeds.isolate_rng(), generators.isolated(own):
        if threads == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


class _Fetched(list):
    """The samples of a batch, on their way to the collate function."""
    fetch: KeyedFetch
    place: Tuple[int, int]  # epoch and position of the first


class KeyedFetch:
    """``dataset.__getitems__``: loads the samples of a batch, each from its own stream.

    Args:
        dataset: a map-style data set.
        root: root seed.
        stream: 'sample', 'val' or 'test'.
        per_sample: start a stream for each sample; otherwise a stream belongs to the worker and
            the epoch (``worker_seed='worker'``).
        rank: of this process.
        marked: say which batch it is, for :class:`KeyedCollate`.
    """

    def __init__(self, dataset: Any, root: int, stream: str, per_sample: bool, rank: int,
                 marked: bool = False) -> None:
        self.dataset, self._marked = dataset, marked
        self.root, self.stream, self.per_sample, self.rank = root, stream, per_sample, rank
        self._epoch: Optional[int] = None
        self._main_state: Optional[tuple] = None
        self._own: Generators = {}
        self._pipelines: Optional[list] = None

    def __getstate__(self) -> Dict[str, Any]:
        # a process finds the generators of its own data set
        return {**self.__dict__, '_own': {}, '_pipelines': None}

    def own_generators(self) -> Generators:
        """Generators that the data set and its transforms keep; hooks may switch pipelines.

        Raises:
            RandomnessError: for one that cannot be seeded.
        """
        now = dataset_tree.pipelines(self.dataset)
        before = self._pipelines
        if before is None or len(now) != len(before) or any(
                a is not b for one, other in zip(now, before) for a, b in zip(one, other)):
            self._own = generators.find(self.dataset, 'dataset', (KeyedFetch, ))
            self._pipelines = now
        return self._own

    def __call__(self, batch: Sequence[Any]) -> List[Any]:
        for index in batch:
            if not isinstance(index, (PlacedInt, PlacedTuple)):
                raise TypeError(
                    f'the batch sampler passed {index!r} of type {type(index).__name__} without '
                    'its place; it must pass on what the sampler yields. Use '
                    "randomness.worker_seed='mmengine' for this data loader")
        items = self._samples(batch)
        if not self._marked:
            return items
        items = _Fetched(items)
        items.fetch, items.place = self, (batch[0].epoch, batch[0].position)
        return items

    def _samples(self, batch: Sequence[Any]) -> List[Any]:
        own = self.own_generators()
        if get_worker_info():
            return self._keyed(batch) if self.per_sample else self._sequential(batch)
        with _as_in_a_worker(own if self.per_sample else {}):
            return self._keyed(batch) if self.per_sample else self._as_worker_zero(
                self._sequential, batch)

    def _keyed(self, batch: Sequence[Any]) -> List[Any]:
        global _current
        outer, _current = _current, BatchContext(self.dataset, self.root, self.stream, batch,
                                                 self._own)
        try:
            return [_current.load(EXTRA_SAMPLES + i) for i in range(len(batch))]
        finally:
            _current = outer

    def _sequential(self, batch: Sequence[Any]) -> List[Any]:
        epoch = batch[0].epoch
        if epoch != self._epoch:
            # also with persistent workers, every epoch draws anew
            info = get_worker_info()
            key = ('worker', self.rank, info.id if info else 0, epoch)
            seeds.seed_all(self.root, *key)
            generators.reseed(self._own, self.root, *key)
            self._epoch = epoch
        return [self.dataset[plain(index)] for index in batch]

    def _as_worker_zero(self, function: Callable, items: Any) -> Any:
        if self._main_state is not None:
            seeds.restore_rng(self._main_state)
        result = function(items)
        self._main_state = seeds.capture_rng(accelerators=False)
        return result

    def collate(self, function: Callable, own: Generators, place: Tuple[int, int],
                items: List[Any]) -> Any:
        """Call a collate function that may draw, in the stream of its batch or worker."""
        if self.per_sample:
            function = partial(self._keyed_collate, function, own, place)
        if get_worker_info():
            return function(items)
        with _as_in_a_worker(own if self.per_sample else {}):
            return function(items) if self.per_sample else self._as_worker_zero(function, items)

    def _keyed_collate(self, function: Callable, own: Generators, place: Tuple[int, int],
                       items: List[Any]) -> Any:
        key = (self.stream, *place, 'collate')
        seeds.seed_all(self.root, *key)
        generators.reseed(own, self.root, *key)
        return function(items)


# collate functions that draw nothing
_DRAW_NOTHING = (
    'mmengine.dataset.utils.pseudo_collate',
    'mmengine.dataset.utils.default_collate',
    'torch.utils.data._utils.collate.default_collate',
    'torch.utils.data._utils.collate.default_convert',
)


def keyed_collate(function: Callable) -> Callable:
    """``function``, or what calls it in a stream of its own when it may draw."""
    inner = function
    while isinstance(inner, partial):  # MMEngine makes one of a config
        inner = inner.func
    name = f'{getattr(inner, "__module__", "")}.{getattr(inner, "__qualname__", "")}'
    return function if isinstance(function, KeyedCollate) or name in _DRAW_NOTHING \
        else KeyedCollate(function)


class KeyedCollate:
    """A loader's ``collate_fn`` around the user's own.

    Raises:
        RandomnessError: the function keeps a generator that cannot be seeded.
    """

    def __init__(self, function: Callable) -> None:
        self.function = function
        self._own = self._find()

    def _find(self) -> Generators:
        return generators.find(self.function, 'collate_fn', (KeyedFetch, ))

    def __getstate__(self) -> Dict[str, Any]:
        return {'function': self.function}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        self.function = state['function']
        self._own = self._find()

    def __call__(self, items: List[Any]) -> Any:
        if not isinstance(items, _Fetched):
            return self.function(items)  # called by hand
        return items.fetch.collate(self.function, self._own, items.place, list(items))


class WorkerInit:
    """``worker_init_fn``: makes a worker what the main process is, then calls the user's own.

    The streams of a worker outside of any sample depend on rank, worker and epoch.
    """

    def __init__(self, placement: Any, rank: int, user_init: Any = None) -> None:
        self._placement, self._rank, self._user_init = placement, rank, user_init

    def __getstate__(self) -> Dict[str, Any]:
        # a spawned worker gets the values of this moment; generators do not travel
        return {'root': self._placement.root, 'epoch': self._placement.epoch, 'rank': self._rank,
                'user_init': self._user_init}

    def __setstate__(self, state: Dict[str, Any]) -> None:
        from .samplers import Placement
        self._placement = Placement(state['root'], epoch=state['epoch'])
        self._rank, self._user_init = state['rank'], state['user_init']

    def __call__(self, worker_id: int) -> None:
        from ..patches import apply
        if get_worker_info() is not None:
            shield()
        apply(worker=True)
        seeds.set_root(self._placement.root)
        seeds.seed_all(self._placement.root, 'worker', self._rank, worker_id,
                       self._placement.epoch, 'start')
        if self._user_init is not None:
            self._user_init(worker_id)
