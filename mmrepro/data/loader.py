"""Make a ``DataLoader`` a pure function of (root seed, epoch, position); checks of loaders."""
from __future__ import annotations

from types import MethodType
from typing import Any, Callable

from torch.utils.data import DataLoader, IterableDataset, Subset

from .. import seeds
from ..config import RandomnessConfig
from ..errors import ConfigError, RandomnessError
from ..util.text import qualified_name
from . import dataset_tree
from .fetch import KeyedCollate, KeyedFetch, WorkerInit, keyed_collate
from .passes import key_passes
from .sample_check import Explain, SampleCheck
from .samplers import FixedOrder, LoaderPosition, adopt_sampler
from .worker_processes import use_own_start_method

_LEGACY = "set randomness.worker_seed='mmengine' to train with MMEngine's own streams"


def use_stream(loader: Any, stream: str) -> None:
    """Let the next pass of an adopted loader use ``stream``: validation and test may share one."""
    fetch = getattr(loader, '_mmrepro_fetch', None)
    if fetch is not None and fetch.stream != stream:
        fetch.stream = stream
        loader._iterator = None  # persistent workers use the stream of before


def without_positions(dataset: type, batched: bool = True) -> str:
    """Return why the samples of a loader have no position that could key their randomness, or ''.

    ``dataset`` is a class, and ``batched`` is False for ``batch_size=None``.
    """
    if issubclass(dataset, IterableDataset):
        return (f'{dataset.__name__} is an iterable dataset: its samples have no position that '
                'could key their randomness')
    if not batched:
        return ('batch_size=None loads samples one by one, without a batch sampler to carry their '
                'position')
    return ''


def adopt_loader(loader: Any, config: RandomnessConfig, stream: str, rank: int,
                 user_init: Callable[[int], Any] | None = None,
                 prepare_worker: Callable[[], Any] | None = None,
                 explain: Explain | None = None) -> Any:
    """Key a loader's samplers, samples and workers, in place.

    Args:
        loader: a ``DataLoader`` with a map-style dataset, not iterated yet.
        config: with the seed in effect.
        stream: 'sample' for training, 'val' or 'test'.
        user_init: the user's ``worker_init_fn``, called after ours.
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
    checked = config.deterministic is True and config.worker_seed == 'sample' and (
        config.self_checks.samples)
    check = SampleCheck(loader, config.self_checks, explain) if checked else None
    loader_position = LoaderPosition(config.root)
    sampler = loader.batch_sampler.sampler
    if isinstance(sampler, (list, tuple, range)):
        sampler = loader.batch_sampler.sampler = FixedOrder(sampler)
    adopt_sampler(sampler, loader_position)
    adopt_sampler(loader.batch_sampler, loader_position, batches=True)
    loader.collate_fn = keyed_collate(loader.collate_fn, check is not None)
    fetch = KeyedFetch(dataset, config.root, stream, config.worker_seed == 'sample', rank,
                       isinstance(loader.collate_fn, KeyedCollate), check)
    fetch.kept_generators()  # raises now, not in a worker
    key_passes(loader, fetch)
    if isinstance(user_init, WorkerInit):  # a loader object that was adopted before
        user_init = user_init.user_init
    loader.worker_init_fn = WorkerInit(loader_position, rank, prepare_worker, user_init)
    # the loader draws its base seed from here instead of from the main process's stream
    loader.generator = loader_position.generator
    use_own_start_method(loader)
    return loader


class StaticOnClass:
    """A bound method on instances of runners; the static method of the base on classes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, cls: type) -> Any:
        if instance is None:
            return getattr(super(self._owner, cls), self._name)
        return MethodType(self._method, instance)


def build_loader(build: Callable[..., Any], dataloader: Any, root: seeds.Root, stream: str) -> Any:
    """Build a loader from its config with MMEngine's ``build``, independent of earlier draws.

    Raises:
        ConfigError: ``num_workers`` is no number of workers.
    """
    workers = dataloader.get('num_workers', 0)
    if not isinstance(workers, int) or workers < 0:
        raise ConfigError(f'num_workers={workers!r} of the loader of stream {stream!r}: allowed '
                          'are 0, 1, 2, ...')
    # For samplers that mmrepro does not know. The same on all ranks, also with
    # diff_rank_seed: ranks that shuffle differently would share samples.
    sampler_seed = seeds.derive(root, 'sampler', 'build').torch >> 33
    with seeds.isolate_rng():
        seeds.seed_all(root, 'dataset', 'build', stream)  # datasets may draw
        return build(dataloader, sampler_seed, False)


def one_by_one(loader: Any, stream: str, config: RandomnessConfig) -> Any:
    """Return a loader or its config; for independent predictions, with batches of one image.

    Raises:
        RandomnessError: a batch sampler makes the batches, or the loader is built with other ones.
    """
    if not config.independent_predictions or stream not in ('val', 'test'):
        return loader
    if isinstance(loader, dict):
        if not loader.get('batch_sampler'):
            return {**loader, 'batch_size': 1}
        given = f'batch_sampler={loader["batch_sampler"]!r}; remove it'
    else:
        size = getattr(loader, 'batch_size', None)
        if size == 1:
            return loader
        given = f'a {type(loader).__name__} with batch_size={size!r}; allowed is 1'
    raise RandomnessError('randomness.independent_predictions=True tests one image at a time, and '
                          f'the loader of stream {stream!r} has {given}')


def check_loader_object(loader: Any, stream: str, training: Any) -> None:
    """Refuse an object that a loop would take as its loader, without keyed streams.

    Raises:
        RandomnessError: it is no ``DataLoader``, or also ``training``, the loader of training.
    """
    if not isinstance(loader, DataLoader):
        raise RandomnessError(
            f'{qualified_name(type(loader))} of the stream {stream!r} is no torch DataLoader: what '
            'its samples draw depends on what was drawn before. Give a DataLoader or a dict; or '
            f'{_LEGACY}')
    if stream != 'sample' and loader is training:
        raise RandomnessError(
            f'one DataLoader object serves training and another loop (stream {stream!r}), and '
            'has one position in its data; make two of the same dataset')


def shuffled_subset(dataset: Any) -> str | None:
    """Return a warning if a ``Subset`` in the dataset has indices that look drawn, or None."""
    for node in dataset_tree.nodes(dataset):
        if isinstance(node.dataset, Subset):
            indices = list(node.dataset.indices)
            if any(a >= b for a, b in zip(indices, indices[1:])):
                return (f'the dataset has a Subset of {len(indices)} samples in shuffled order. If '
                        'random_split drew it before the runner set its seed, then the split does '
                        'not follow from randomness.seed: give random_split a generator of its '
                        'own, torch.Generator().manual_seed(0). Sorted indices are taken to be '
                        'fixed')
    return None
