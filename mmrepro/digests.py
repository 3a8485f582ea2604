"""SHA-256 of nested values: equal only for equal bytes."""
from __future__ import annotations

import hashlib
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Tuple

import numpy as np
import torch

__all__ = ['state_digest']

# what they hold is code
CODE = (type, BuiltinFunctionType, FunctionType, MethodType, ModuleType)


def state_digest(state: Any) -> str:
    """SHA-256 over the bytes of everything in nested dicts, lists and tuples, keys sorted.

    Tensors and arrays count with dtype and shape; objects with their class and attributes, never
    with their address; sets with the sorted ``repr`` of their items; other values with their
    ``repr``.
    """
    digest = hashlib.sha256()
    _update(digest, state, ())
    return digest.hexdigest()


def _update(digest: Any, value: Any, above: Tuple[int, ...]) -> None:
    """``above``: ids of the objects that hold this one, because objects may refer to each other."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        if tensor.numel() < 2:  # counts as contiguous with any stride, bytes need a stride of 1
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        digest.update(f'tensor {tensor.dtype} {tuple(tensor.shape)}'.encode())
        # as bytes, because numpy has no bfloat16
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        # the repr of a long array leaves most of it out
        digest.update(f'array {value.dtype} {value.shape}'.encode())
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        digest.update(f'dict {len(value)}'.encode())
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _update(digest, value[key], above)
    elif isinstance(value, np.ndarray):
        _update(digest, value.tolist(), above)
    elif isinstance(value, (list, tuple)):
        digest.update(f'list {len(value)}'.encode())
        for item in value:
            _update(digest, item, above)
    elif isinstance(value, (set, frozenset)):
        _update(digest, sorted(map(repr, value)), above)
    elif hasattr(value, '__dict__') and not isinstance(value, CODE) and id(value) not in above:
        digest.update(type(value).__qualname__.encode())
        # the properties of MMEngine's data elements are elsewhere than in their attributes
        items = dict(value.all_items()) if hasattr(value, 'all_items') else vars(value)
        _update(digest, items, (*above, id(value)))
    else:
        text = repr(value)
        if ' at 0x' in text:
            text = getattr(value, '__qualname__', type(value).__qualname__)
        digest.update(text.encode())
