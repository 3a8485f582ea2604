"""Walks over nested data: tensors in tuples, lists, dicts, MMEngine's data elements, MMDetection's
boxes; dicts in configs.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch


def named_tensors(value: Any, name: str = '') -> Iterator[tuple[str, torch.Tensor]]:
    """Yield path and tensor, in the order of the data; other leaves are left out.

    >>> [path for path, _ in named_tensors({'a': [torch.ones(1), 2], 'b': torch.ones(1)})]
    ['a.0', 'b']
    """
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(getattr(value, 'tensor', None), torch.Tensor):  # MMDetection's boxes
        yield name, value.tensor
    else:
        items: Iterable[tuple[Any, Any]]
        if isinstance(value, dict):
            items = value.items()
        elif hasattr(value, 'all_items'):  # mmengine.structures.BaseDataElement
            items = sorted(value.all_items())  # the names are in a set
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            return
        for key, item in items:
            yield from named_tensors(item, f'{name}.{key}' if name else str(key))


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in ``value``, in order."""
    return [tensor for _, tensor in named_tensors(value)]


def named_dicts(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the path and the dict of every dict in ``value``, outermost first.

    >>> [path for path, _ in named_dicts({'a': [{}, {'b': {}}]})]
    ['', 'a[0]', 'a[1]', 'a[1].b']
    """
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        yield name, value  # may be changed before the walk goes on
        items = [(f'{name}.{key}' if name else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f'{name}[{index}]', item) for index, item in enumerate(value)]
    for path, item in items:
        yield from named_dicts(item, path)


def dicts(value: Any) -> Iterator[Any]:
    """Yield the dicts in ``value``, as :func:`named_dicts` does."""
    return (content for _, content in named_dicts(value))
