"""SHA-256 of nested state: equal only for equal bytes."""
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

__all__ = ['state_digest']


def state_digest(state: Any) -> str:
    """SHA-256 over the bytes of everything in nested dicts, lists and tuples, keys sorted.

    Tensors and arrays count with dtype and shape; other values with their ``repr``.
    """
    digest = hashlib.sha256()
    _update(digest, state)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        digest.update(f'tensor {tensor.dtype} {tuple(tensor.shape)}'.encode())
        # as bytes, because numpy has no bfloat16
        digest.update(memoryview(tensor.reshape(-1).view(torch.uint8).numpy()))
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        # the repr of a long array leaves most of it out
        digest.update(f'array {value.dtype} {value.shape}'.encode())
        digest.update(value.tobytes())
    elif isinstance(value, dict):
        digest.update(f'dict {len(value)}'.encode())
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _update(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f'list {len(value)}'.encode())
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())
