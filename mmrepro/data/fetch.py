"""Seed each sample, in the worker, right before the dataset is asked for it.

PyTorch's iterators are given the fetch of their loader as their dataset, and ask it for the samples
of a batch. The loader keeps the real dataset, whose attributes MMEngine's hooks change, and the
dataset does not know who loads from it.
"""
from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, NamedTuple

import torch
from torch.utils.data import get_worker_info

from .. import seeds
from ..errors import MMReproError, SampleDiffersError
from ..util.text import qualified_name
from . import dataset_tree, generators
from .batch_context import BatchContext, loading
from .data_errors import batch_error, sample_error
from .generators import Generators
from .sample_check import Difference, Disputed, SampleCheck
from .samplers import plain, positioned
from .worker_processes import end_with_trainer, own_file_positions, shield


class _Fetched(NamedTuple):
    """The samples of a batch, on their way to the collate function."""
    items: Any
    fetch: KeyedFetch
    start: tuple[int, int]  # epoch and position of the first sample
    indices: list[Any]
    difference: Difference | None  # of samples that were loaded again


class KeyedFetch:
    """Loads the samples of a batch, each from its own stream; PyTorch takes it for the dataset.

    A dataset with ``__getitems__`` of its own is asked for the whole batch, from one stream.

    Args:
        dataset: a map-style dataset.
        stream: 'sample', 'val' or 'test'.
        per_sample: start a stream for each sample; otherwise a stream belongs to the worker and
            the epoch (``worker_seed='worker'``).
        marked: return a :class:`_Fetched`, for :class:`KeyedCollate`.
        check: loads some samples twice.
    """

    def __init__(self, dataset: Any, root: seeds.Root, stream: str, per_sample: bool,
                 rank: int, marked: bool = False, check: SampleCheck | None = None) -> None:
        self.dataset, self._marked, self.check = dataset, marked, check
        self.root, self.stream, self.per_sample, self.rank = root, stream, per_sample, rank
        self._epoch: int | None = None
        self._main_state: tuple[Any, ...] | None = None
        self._kept: Generators = {}
        self._pipelines: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        # each process looks for the generators of its copy of the dataset
        return {**self.__dict__, '_kept': {}, '_pipelines': None}

    def kept_generators(self) -> Generators:
        """Return the generators of the dataset and its transforms, which hooks may exchange.

        Raises:
            RandomnessError: a generator cannot be seeded.
        """
        now, before = dataset_tree.pipelines(self.dataset), self._pipelines
        if before is None or len(now) != len(before) or any(map(operator.is_not, now, before)):
            self._kept = generators.find(self.dataset, 'dataset')
            self._pipelines = now
            if self.check is not None:
                self.check.forget()
        return self._kept

    def __getitems__(self, batch: Sequence[Any]) -> Any:
        """Load the samples at the positioned indices of a batch.

        Raises:
            RandomnessError: for an index without its position, or called in a thread of the main
                process that does not train.
        """
        batch = [*map(positioned, batch)]
        kept = self.kept_generators()
        with self._isolated(kept):
            items, difference = self._keyed(batch) if self.per_sample else (
                self._sequential(batch), None)
        start = batch[0].epoch, batch[0].position
        if not self._marked:
            return items
        return _Fetched(items, self, start, [*map(plain, batch)], difference)

    def _keyed(self, batch: Sequence[Any]) -> tuple[Any, Difference | None]:
        difference = None
        with loading(BatchContext(self.dataset, self.root, self.stream, batch,
                                  self._kept)) as context:
            if self.check is None:
                items = [context.load(handle) for handle in context.handles()]
            else:
                items, difference = self.check.load(context)
            if not context.loads_batches:
                return items, difference
            return items[0], difference and difference._replace(items=difference.items[0])

    def _sequential(self, batch: Sequence[Any]) -> Any:
        epoch = batch[0].epoch
        if epoch != self._epoch:
            # every epoch draws new numbers, also with persistent workers
            info = get_worker_info()
            generators.begin_stream(self._kept, self.root, 'worker', self.rank,
                                    info.id if info else 0, epoch)
            self._epoch = epoch
        return self._load(batch)

    def _load(self, batch: Sequence[Any]) -> Any:
        indices = [plain(index) for index in batch]
        if dataset_tree.loads_batches(self.dataset):
            return self.dataset.__getitems__(indices)
        items = []
        for index in indices:
            try:
                items.append(self.dataset[index])
            except MMReproError:
                raise
            except Exception as error:
                raise sample_error(self.dataset, index, error) from error
        return items

    @contextmanager
    def _isolated(self, kept: Generators) -> Iterator[None]:
        """Restore the random state at the end; in the main process, which acts as worker 0.

        Otherwise the numbers that the main process draws elsewhere would depend on whether it loads
        samples itself. And torch gives a worker one thread, where sums have different bits than
        with several.
        """
        if get_worker_info():
            yield
            return
        generators.check_thread('loads samples')
        threads = torch.get_num_threads()
        with seeds.isolate_rng(), generators.isolated(kept if self.per_sample else {}):
            if self._main_state is not None:
                seeds.restore_rng(self._main_state)
            if threads > 1:
                torch.set_num_threads(1)
            try:
                yield
            finally:
                if threads > 1:
                    torch.set_num_threads(threads)
            if not self.per_sample:
                self._main_state = seeds.capture_rng(accelerators=False)

    def collate(self, function: Callable[..., Any], kept: Generators | None,
                fetched: _Fetched) -> Any:
        """Call a collate function in the stream of its batch or worker.

        ``kept`` are its generators; None: it draws nothing.

        Raises:
            SampleDiffersError: of a validation or test, samples differ in more than numbers and
                text.
        """
        difference = fetched.difference
        if kept is None and difference is None:
            return function(fetched.items)
        seeded = kept or {}

        def keyed(samples: Any) -> Any:
            generators.begin_stream(seeded, self.root, self.stream, *fetched.start, 'collate')
            return function(samples)

        with self._isolated(seeded):
            if not self.per_sample:
                return function(fetched.items)
            if self.check is None:
                return keyed(fetched.items)
            batch = self.check.collate(keyed, _name_of(function), fetched.start, fetched.items)
            if difference is None:
                return batch
            if self.stream != 'sample' and not difference.plain:
                raise SampleDiffersError(difference.message)
            alternative = keyed(difference.items) if self.stream == 'sample' else None
            return Disputed(batch, alternative, difference.message, difference.fields)


# collate functions that draw nothing
_DRAW_NOTHING = (
    'mmengine.dataset.utils.pseudo_collate',
    'mmengine.dataset.utils.default_collate',
    'torch.utils.data._utils.collate.default_collate',
    'torch.utils.data._utils.collate.default_convert',
)


def keyed_collate(function: Callable[..., Any], checked: bool = False) -> Callable[..., Any]:
    """Return ``function``, in a :class:`KeyedCollate` if it may draw or if samples are checked."""
    if isinstance(function, KeyedCollate):
        return function
    return KeyedCollate(function) if checked or _draws(function) else function


def _draws(function: Callable[..., Any]) -> bool:
    return _name_of(function) not in _DRAW_NOTHING


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):  # MMEngine makes one of a config
        function = function.func
    return qualified_name(function if hasattr(function, '__qualname__') else type(function))


class KeyedCollate:
    """A loader's ``collate_fn`` around the user's own.

    Raises:
        RandomnessError: the function keeps a generator that cannot be seeded.
        SampleError: the function has raised; names the samples.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self._kept = generators.find(function, 'collate_fn') if _draws(function) else None

    def __reduce__(self) -> tuple[Any, ...]:
        # each process looks for the generators of its copy of the function
        return KeyedCollate, (self.function, )

    def __call__(self, fetched: Any) -> Any:
        if not isinstance(fetched, _Fetched):
            return self.function(fetched)  # called by hand
        try:
            return fetched.fetch.collate(self.function, self._kept, fetched)
        except MMReproError:
            raise
        except Exception as error:
            raise batch_error(fetched.fetch.dataset, fetched.indices, _name_of(self.function),
                              error) from error


class WorkerInit:
    """The ``worker_init_fn`` of an adopted loader.

    The streams of a worker outside of any sample depend on rank, worker and epoch.

    Args:
        loader_position: of the loader; a spawned worker gets its values at the moment of the start.
        prepare: called first, for example to patch libraries as in the main process.
        user_init: the user's ``worker_init_fn``, called last.
    """

    def __init__(self, loader_position: Any, rank: int, prepare: Callable[[], Any] | None = None,
                 user_init: Callable[[int], Any] | None = None) -> None:
        self._loader_position, self._rank = loader_position, rank
        self._prepare, self.user_init = prepare, user_init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None:
            shield()
            end_with_trainer()
            own_file_positions()
            if isinstance(info.dataset, KeyedFetch):  # the user's function expects its dataset
                object.__setattr__(info, 'dataset', info.dataset.dataset)
        if self._prepare is not None:
            self._prepare()
        root = self._loader_position.root
        seeds.set_root(root)
        seeds.seed_all(root, 'worker', self._rank, worker_id, self._loader_position.epoch, 'start')
        if self.user_init is not None:
            self.user_init(worker_id)
