"""The tree of datasets of a loader: which dataset an index leads to, which holds a transform."""
from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import Subset

from ..objects.walks import Named, attributes, items

Path = tuple[int, ...]  # the child taken at each ConcatDataset, from the outermost on

# wrapper -> attribute with a dataset that has the same indices
SAME_INDEX = {'MultiImageMixDataset': 'dataset', '_SlicedDataset': '_dataset'}


class Node(NamedTuple):
    """A dataset in the tree."""
    path: Path  # of the subtree that it belongs to
    top: Any  # the outermost dataset with this path
    dataset: Any


def _wrapped(dataset: Any) -> Any | None:
    """Return the dataset inside a wrapper, if indices can be followed into it."""
    for cls in type(dataset).__mro__:
        if cls.__name__ in SAME_INDEX:
            return getattr(dataset, SAME_INDEX[cls.__name__])
    if hasattr(dataset, '_get_ori_dataset_idx') or isinstance(dataset, Subset):
        return dataset.dataset
    return None


def _is_concat(dataset: Any) -> bool:
    return hasattr(dataset, 'datasets') and hasattr(dataset, 'cumulative_sizes')


def nodes(dataset: Any, path: Path = (), top: Any = None) -> Iterator[Node]:
    """Yield the datasets of the tree, the outermost first."""
    top = dataset if top is None else top
    yield Node(path, top, dataset)
    if _is_concat(dataset):
        for number, inner in enumerate(dataset.datasets):
            yield from nodes(inner, (*path, number))
    elif _wrapped(dataset) is not None:
        yield from nodes(_wrapped(dataset), path, top)


def datasets(dataset: Any) -> Iterator[Any]:
    """Yield a dataset and those inside wrappers of any kind, the outermost first.

    Indices cannot always be followed through these wrappers, as they can in :func:`nodes`.
    """
    yield dataset
    inner = getattr(dataset, 'datasets', None)
    if inner is None:  # MMEngine's ConcatDataset looks like a wrapper of a single dataset
        wrapped = _wrapped(dataset)
        inner = [getattr(dataset, 'dataset', None) if wrapped is None else wrapped]
    for part in inner.values() if isinstance(inner, dict) else inner:
        if hasattr(part, '__getitem__') and not isinstance(part, str):
            yield from datasets(part)


def _descend(dataset: Any, index: Any) -> Iterator[tuple[Any, int | None]]:
    """Yield the datasets that ``dataset[index]`` asks, each with the number of its child."""
    while dataset is not None:
        if _is_concat(dataset) and not isinstance(index, tuple):
            sizes = dataset.cumulative_sizes
            number = bisect.bisect_right(sizes, index)
            index -= sizes[number - 1] if number else 0
            yield dataset, number
            dataset = dataset.datasets[number]
            continue
        yield dataset, None
        if hasattr(dataset, '_get_ori_dataset_idx'):
            index = dataset._get_ori_dataset_idx(index)
        elif isinstance(dataset, Subset):
            index = dataset.indices[index]
        dataset = _wrapped(dataset)


def path_of(dataset: Any, index: Any) -> Path:
    """Return the path that ``dataset[index]`` takes."""
    return tuple(number for _, number in _descend(dataset, index) if number is not None)


def branch(dataset: Any, index: Any) -> list[Any]:
    """Return the datasets that ``dataset[index]`` asks, the outermost first."""
    return [asked for asked, _ in _descend(dataset, index)]


def loads_batches(dataset: Any) -> bool:
    """Whether a dataset has code of its own that loads a whole batch.

    torch's ``Subset`` and ``StackDataset`` only pass a batch on.
    """
    cls = type(dataset)
    if cls.__module__ == 'torch.utils.data.dataset':
        if cls.__name__ == 'Subset':
            return loads_batches(dataset.dataset)
        if cls.__name__ == 'StackDataset':
            inner = dataset.datasets
            return any(map(loads_batches, inner.values() if isinstance(inner, dict) else inner))
    return callable(getattr(dataset, '__getitems__', None))


# attributes in which transforms keep the transforms that they call
INNER_TRANSFORMS = ('transforms', 'branch_pipelines')


def _inside(thing: Any, path: str) -> list[Named]:
    if isinstance(thing, (list, tuple, dict)):
        return items(thing, path)
    return [(f'{path}.{name}', getattr(thing, name)) for name in INNER_TRANSFORMS
            if hasattr(thing, name)]


def transforms(pipeline: Any, path: str = 'pipeline', depth: int = 10) -> Iterator[tuple[str, Any]]:
    """Yield path and transform of a pipeline's transforms, inner transforms before outer ones."""
    for inner, transform in _inside(pipeline, path):
        if depth:
            yield from transforms(transform, inner, depth - 1)
        if callable(transform) and not isinstance(transform, type):
            yield inner, transform


def pipelines(dataset: Any) -> list[Any]:
    """Return the pipelines of all datasets in the tree and their transforms; hooks change them."""
    result = []
    for node in nodes(dataset):
        pipeline = getattr(node.dataset, 'pipeline', None)
        result += [pipeline, *(transform for _, transform in transforms(pipeline))]
    return result


def _holds(thing: Any, transform: object, depth: int = 8) -> bool:
    """Whether a transform is ``transform``, or contains it."""
    if thing is transform:
        return True
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif not isinstance(thing, (list, tuple)):
        thing = [value for value in attributes(thing).values()
                 if callable(value) or isinstance(value, (list, tuple, dict))]
    return depth > 0 and any(_holds(part, transform, depth - 1) for part in thing)


def holder(dataset: Any, transform: object) -> tuple[Path, Any]:
    """Return path and top of the smallest subtree with all datasets that share ``transform``.

    The whole tree, if no dataset has it.
    """
    tree = list(nodes(dataset))
    paths = [node.path for node in tree
             if _holds(getattr(node.dataset, 'pipeline', None), transform)]
    path: Path = ()
    if paths:
        path = paths[0]
        while any(longer[:len(path)] != path for longer in paths):
            path = path[:-1]
    return path, next(node.top for node in tree if node.path == path)
