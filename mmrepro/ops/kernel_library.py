"""Kernels that replace torch's own at its dispatcher."""
from __future__ import annotations

import inspect
import warnings
from typing import Any, Callable

import torch

# Newer releases require permission to override a kernel.
_OVERRIDE = {'allow_override': True} if 'allow_override' in inspect.signature(
    torch.library.Library.impl).parameters else {}


def overloads(name: str) -> list[str]:
    """Return the names of an operator of ``aten`` with its overloads; [] if there is none.

    >>> overloads('topk')
    ['topk', 'topk.values']
    """
    packet = getattr(torch.ops.aten, name, None)
    return [name if overload == 'default' else f'{name}.{overload}'
            for overload in (packet.overloads() if packet is not None else ())]


class KernelLibrary:
    """Kernels of operators of ``aten``, in force until :meth:`close`."""

    def __init__(self) -> None:
        self._library: Any = torch.library.Library('aten', 'IMPL')

    def put(self, operator: str, kernel: Callable[..., Any], key: str) -> None:
        """Make ``kernel`` the one of an operator for a dispatch key."""
        with warnings.catch_warnings():
            # torch warns once that a kernel is overridden, which is intended
            warnings.simplefilter('ignore', UserWarning)
            self._library.impl(operator, kernel, key, **_OVERRIDE)

    def close(self) -> None:
        """Put torch's own kernels back."""
        if hasattr(self._library, '_destroy'):
            self._library._destroy()
        self._library = None  # torch 2.0 has no _destroy: the last reference removes it
