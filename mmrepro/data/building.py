"""Data loaders as a runner gets them: dicts that it builds, and objects that a user made."""
from __future__ import annotations

from types import MethodType
from typing import Any, Callable

from torch.utils.data import DataLoader, Subset

from .. import seeds
from ..config import RandomnessConfig
from ..errors import RandomnessError
from . import dataset_tree


class StaticOnClass:
    """A method of runners that stays what it was, a static method, when it is called on a class."""

    def __init__(self, method: Callable) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, cls: type) -> Callable:
        if instance is None:
            return getattr(super(self._owner, cls), self._name)
        return MethodType(self._method, instance)


def build_loader(build: Callable, dataloader: Any, root: int, stream: str) -> DataLoader:
    """Build a loader of a dict with MMEngine's ``build``, whatever was drawn until now."""
    # For samplers that mmrepro does not know. The same on all ranks, also with
    # diff_rank_seed: ranks that shuffle differently would share samples.
    sampler_seed = seeds.derive(root, 'sampler', 'build').torch >> 33
    with seeds.isolate_rng():
        seeds.seed_all(root, 'dataset', 'build', stream)  # datasets may draw
        return build(dataloader, sampler_seed, False)


def one_by_one(loader: Any, stream: str, config: RandomnessConfig) -> Any:
    """A loader, or the dict of one; for independent predictions, with batches of one image.

    Args:
        stream: of the loop that takes the batches.

    Raises:
        RandomnessError: the batches are not the loader's to choose, or it is built already.
    """
    if not config.independent_predictions or stream not in ('val', 'test'):
        return loader
    sampler = loader.get('batch_sampler') if isinstance(loader, dict) else None
    if sampler:
        given = f'batch_sampler={sampler!r}; remove it'
    elif isinstance(loader, dict):
        return {**loader, 'batch_size': 1}
    elif getattr(loader, 'batch_size', None) == 1:
        return loader
    else:
        given = (f'a {type(loader).__name__} with batch_size='
                 f'{getattr(loader, "batch_size", None)!r}; allowed is 1')
    raise RandomnessError('randomness.independent_predictions=True tests one image at a time, and '
                          f'the loader of stream {stream!r} has {given}')


def check_loader_object(loader: Any, stream: str, training: Any) -> None:
    """Refuse what a loop would take as it is, and what has no streams then.

    Args:
        stream: of the loop.
        training: the loader of the training loop.

    Raises:
        RandomnessError: for something else than a ``DataLoader``, or the loader of training.
    """
    if not isinstance(loader, DataLoader):
        raise RandomnessError(
            f'{type(loader).__module__}.{type(loader).__qualname__} is no torch DataLoader: what '
            'its samples draw depends on what was drawn before. Give a DataLoader or a dict; or '
            "set randomness.worker_seed='mmengine' to train with MMEngine's own streams")
    if stream != 'sample' and loader is training:
        raise RandomnessError(
            f'one DataLoader object serves training and another loop (stream {stream!r}), and '
            'has one position in its data; make two of the same dataset')


def shuffled_subset(dataset: Any) -> str | None:
    """A warning for a split of the data that looks as if it was drawn, or None."""
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
