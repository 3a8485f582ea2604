"""Make a built ``DataLoader`` a pure function of (root seed, epoch, position)."""
from __future__ import annotations

from typing import Any, Callable

from torch.utils.data import DataLoader, IterableDataset

from ..config import RandomnessConfig
from ..errors import RandomnessError
from .fetch import KeyedCollate, KeyedFetch, WorkerInit, keyed_collate
from .passes import key_passes
from .sample_check import Explain, sample_check
from .samplers import FixedOrder, Placement, adopt_batch_sampler, adopt_sampler
from .start_methods import use_own_start_method

_LEGACY = "set randomness.worker_seed='mmengine' to train with MMEngine's own streams"


def placement_of(loader: DataLoader) -> Placement | None:
    """The placement of an adopted loader, or None."""
    return getattr(getattr(loader, 'batch_sampler', None), '_placement', None)


def use_stream(loader: DataLoader, stream: str) -> None:
    """Let the next pass of an adopted loader use ``stream``: validation and test may share one."""
    fetch = getattr(loader, '_fetch', None)
    if fetch is not None and fetch.stream != stream:
        fetch.stream = stream
        loader._iterator = None  # workers that stay have the other one


def without_positions(dataset: type, batched: bool = True) -> str:
    """Why the samples of a loader have no position that could key their randomness, or ''.

    Args:
        dataset: class of the loader's dataset.
        batched: False for ``batch_size=None``.
    """
    if issubclass(dataset, IterableDataset):
        return (f'{dataset.__name__} is an iterable dataset: its samples have no position that '
                'could key their randomness')
    if not batched:
        return ('batch_size=None loads samples one by one, without a batch sampler to carry their '
                'position')
    return ''


def adopt_loader(loader: DataLoader, config: RandomnessConfig, stream: str, rank: int,
                 user_init: Callable[[int], Any] | None = None,
                 prepare_worker: Callable[[], Any] | None = None,
                 explain: Explain | None = None) -> DataLoader:
    """Key a loader's samplers, samples and workers, in place.

    Args:
        loader: a loader with a map-style dataset, not iterated yet.
        config: with the seed in effect.
        stream: 'sample' for training, 'val' or 'test'.
        rank: of this process.
        user_init: the user's own ``worker_init_fn``, called after ours.
        prepare_worker: called at the start of each worker; spawned workers unpickle it.
        explain: says where two results of a sample differ; see :mod:`mmrepro.data.sample_check`.

    Raises:
        RandomnessError: for a loader that has no positions (iterable datasets, no batching, a
            batch sampler without a sampler), whose batches arrive in any order, or that holds a
            generator that cannot be seeded.
    """
    dataset = loader.dataset
    refusal = without_positions(type(dataset), loader.batch_sampler is not None)
    if refusal:
        raise RandomnessError(f'{refusal}; {_LEGACY}')
    if loader.num_workers and not getattr(loader, 'in_order', True):
        raise RandomnessError(
            f'in_order=False, with num_workers={loader.num_workers}: batches arrive in the order '
            'in which workers finish; remove it, or set in_order=True')
    if not hasattr(loader.batch_sampler, 'sampler'):
        name = type(loader.batch_sampler).__name__
        raise RandomnessError(
            f'the batch sampler {name} has no attribute `sampler`: MMEngine sets the epoch on it, '
            f'and the positions of samples come from it. Let {name} take a sampler, keep it as '
            f'`self.sampler`, and make its batches of what it yields; or {_LEGACY}')
    placement = Placement(config.root)
    sampler = loader.batch_sampler.sampler
    if isinstance(sampler, (list, tuple, range)):
        sampler = loader.batch_sampler.sampler = FixedOrder(sampler)
    adopt_sampler(sampler, placement)
    adopt_batch_sampler(loader.batch_sampler, placement)
    loader.collate_fn = keyed_collate(loader.collate_fn)
    check = loader.batch_sampler._sample_check = sample_check(loader, config, explain)
    fetch = KeyedFetch(dataset, config.root, stream, config.worker_seed == 'sample', rank,
                       isinstance(loader.collate_fn, KeyedCollate), check)
    fetch.own_generators()  # one that cannot be seeded is an error now, not in a worker
    key_passes(loader, fetch)
    if isinstance(user_init, WorkerInit):  # a loader object that was adopted before
        user_init = user_init.user_init
    loader.worker_init_fn = WorkerInit(placement, rank, prepare_worker, user_init)
    # the loader draws its base seed from here instead of from the main process's stream
    loader.generator = placement.generator
    use_own_start_method(loader)
    return loader
