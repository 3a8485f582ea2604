"""Install mmrepro's kernels at torch's dispatcher, and remove them.

A row of the table names an operator of ``aten`` and a function; ``Library('aten', 'IMPL')`` makes
the function its kernel for a device. Forward passes remain torch's; autograd calls the operator's
backward through the dispatcher. torch chooses some deterministic paths in Python, before the
dispatcher (``F.interpolate``, ``F.pad``); those rows name a module and an attribute instead.
"""
from __future__ import annotations

import contextlib
import functools
import importlib
import re
from collections.abc import Iterable
from typing import Any, Callable

import torch

from ..kernel_library import KernelLibrary, overloads
from .kernel_table import TABLE, KernelRow

# Dispatch keys of devices.
_KEYS = {'cpu': 'CPU', 'cuda': 'CUDA', 'meta': 'Meta'}

_installed = contextlib.ExitStack()  # closing it puts back what is replaced now
_devices: tuple[str, ...] = ()


def release(version: str = torch.__version__) -> tuple[int, int]:
    """Return (major, minor) of a torch version.

    >>> release('2.13.0+cu128')
    (2, 13)
    """
    major, minor = re.findall(r'\d+', version)[:2]
    return int(major), int(minor)


def active(device: str, version: str = torch.__version__) -> list[KernelRow]:
    """Return the rows to install for ``device`` ('cpu' or 'cuda') on a release."""
    now = release(version)
    return [row for row in TABLE
            if row.target and device in row.devices and row.since <= now < row.until]


def install(devices: Iterable[str] | None = None) -> None:
    """Install the rows of the table for ``devices``, instead of those installed before.

    ``devices`` are of 'cpu' and 'cuda', which need not be present; None stands for 'cpu', and
    'cuda' if this torch was built with it.
    """
    global _devices
    if devices is None:
        devices = ('cpu', 'cuda') if torch.backends.cuda.is_built() else ('cpu',)
    devices = tuple(devices)
    if devices == _devices:
        return
    uninstall()
    library = _installed.enter_context(contextlib.closing(KernelLibrary()))
    try:
        for device in devices:
            for row in active(device):
                _install(row, device, library)
    except BaseException:
        uninstall()
        raise
    _devices = devices


def _override(function: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` of ``stock`` and its arguments; torch.compile takes no partial here."""
    @functools.wraps(stock)
    def override(*args: Any, **kwargs: Any) -> Any:
        return function(stock, *args, **kwargs)

    return override


def _install(row: KernelRow, device: str, library: KernelLibrary) -> None:
    if row.overrides_python:
        path, _, attribute = row.operator.rpartition('.')
        module = importlib.import_module(path)
        if hasattr(module, attribute):
            stock = getattr(module, attribute)
            _installed.callback(setattr, module, attribute, stock)
            setattr(module, attribute, _override(row.load(), stock))
    elif row.operator in overloads(row.operator.partition('.')[0]):  # torch of this release
        library.put(row.operator, row.load(), row.key or _KEYS[device])


def uninstall() -> None:
    """Undo :func:`install`."""
    global _devices
    _installed.close()
    _devices = ()


def installed() -> tuple[str, ...]:
    """Return the devices for which kernels are installed."""
    return _devices


def refuse(operator: str, *args: Any, **kwargs: Any) -> None:
    """Raise RuntimeError, which names ``operator``."""
    raise RuntimeError(
        f'aten::{operator} is refused on CUDA by deterministic mode: torch adds there in the order '
        'in which threads arrive, and mmrepro does not replace it. Call it on a CPU, as in '
        'x.cpu(), or set deterministic=False.')
