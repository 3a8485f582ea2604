"""Metrics and files of predictions that follow from the predictions alone."""
from __future__ import annotations

import functools
import io
import pickle
from typing import Any

import numpy as np
import torch
from mmengine.fileio import put

from .replacements import around


class _StableNumPy:
    """NumPy, whose ``argsort`` leaves ties in their order, on every CPU."""

    argsort = staticmethod(functools.partial(np.argsort, kind='stable'))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def stable_numpy(stock: Any) -> Any:
    """Return the replacement for the name ``np`` in a module."""
    return _StableNumPy()


class _ByContent(pickle.Pickler):
    """Writes equal bytes for equal values, whichever parts are one object."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)  # that of MMEngine
        self.fast = True  # a memo would tell one object from two equal ones

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = io.BytesIO()
        # torch's way to pickle a tensor has addresses in it, the format of its files has none
        torch.save(value.detach().cpu().clone(), content)
        return torch.storage._load_from_bytes, (content.getvalue(), )


@around
def dump_by_content(stock: Any, results: Any, path: str) -> None:
    """Write predictions into a pickle file of equal bytes for equal predictions."""
    content = io.BytesIO()
    _ByContent(content).dump(results)
    put(content.getvalue(), path)
