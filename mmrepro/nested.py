"""Tensors in nested data: tuples, lists, dicts, MMEngine's data elements, MMDetection's boxes."""
from __future__ import annotations

from collections.abc import Iterable, Iterator
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
