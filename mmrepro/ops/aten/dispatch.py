"""Puts our kernels in front of torch's at the dispatcher, and takes them away again.

A row of the table names an operator of ``aten`` and a function; ``Library('aten', 'IMPL')`` makes
the function its kernel for a device. Forward passes stay torch's: autograd calls the operator's
backward through the dispatcher, and finds ours. Some deterministic paths of torch are chosen in
Python before the dispatcher is reached (``F.interpolate``, ``F.pad``); these rows name a module and
an attribute instead.
"""
from __future__ import annotations

import contextlib
import importlib
import inspect
import re
import warnings
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import torch

from .kernel_table import TABLE, Row

__all__ = ['active', 'install', 'installed', 'installing', 'release', 'uninstall']

# Dispatch keys of devices.
_KEYS = {'cpu': 'CPU', 'cuda': 'CUDA', 'meta': 'Meta'}

# Releases that replace operators from Python themselves ask whether that may be replaced.
_OVERRIDE = {'allow_override': True} if 'allow_override' in inspect.signature(
    torch.library.Library.impl).parameters else {}

# What is in force: the library that owns the kernels, and the attributes with what they were.
_library: Any = None
_attributes: List[Tuple[Any, str, Any]] = []
_names: Dict[str, Tuple[str, ...]] = {}


def release(version: str = torch.__version__) -> Tuple[int, int]:
    """(major, minor) of a torch version.

    >>> release('2.13.0+cu128')
    (2, 13)
    """
    major, minor = re.match(r'(\d+)\.(\d+)', version).groups()
    return int(major), int(minor)


def _exists(operator: str) -> bool:
    """Whether this torch knows the operator; rows name some that came or went."""
    name, _, overload = operator.partition('.')
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and (overload or 'default') in packet.overloads()


def active(device: str, version: str = torch.__version__) -> List[Row]:
    """Rows that replace something for ``device`` ('cpu' or 'cuda') on that release."""
    now = release(version)
    return [row for row in TABLE
            if row.target and device in row.devices and row.since <= now < row.until]


def _impl(library: Any, row: Row, key: str) -> None:
    with warnings.catch_warnings():
        # torch says once that a kernel is overridden, which is what we are here for
        warnings.simplefilter('ignore', UserWarning)
        library.impl(row.operator, row.load(), key, **_OVERRIDE)


def _seam(name: str) -> Tuple[bool, Any, str]:
    """Whether ``module.attribute`` exists, the module, and the attribute's name."""
    module_name, _, attribute = name.rpartition('.')
    module = importlib.import_module(module_name)
    return hasattr(module, attribute), module, attribute


def _put(row: Row) -> None:
    exists, module, attribute = _seam(row.operator)
    if exists:
        _attributes.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, row.load())


def install(devices: Optional[Iterable[str]] = None) -> None:
    """Replace what the table says, for these devices. Again with others: they replace the former.

    Args:
        devices: of 'cpu' and 'cuda'; None: 'cpu', and 'cuda' if this torch was built with it. A
            device need not be present.
    """
    global _library
    if devices is None:
        devices = ('cpu', 'cuda') if torch.backends.cuda.is_built() else ('cpu',)
    wanted = {device: tuple(row.operator for row in active(device)) for device in devices}
    if wanted == _names:
        return
    uninstall()
    _library = torch.library.Library('aten', 'IMPL')
    try:
        for device in devices:
            for row in active(device):
                if row.seam:
                    _put(row)
                elif _exists(row.operator):
                    _impl(_library, row, _KEYS[device])
    except BaseException:
        uninstall()
        raise
    _names.update(wanted)


def uninstall() -> None:
    """Undo :func:`install`; torch's own kernels answer again."""
    global _library
    while _attributes:
        module, attribute, before = _attributes.pop()
        setattr(module, attribute, before)
    if hasattr(_library, '_destroy'):
        _library._destroy()
    # torch 2.0 has no _destroy: its library lets go when the last reference does
    _library = None
    _names.clear()


def installed() -> Tuple[str, ...]:
    """Devices for which our kernels answer."""
    return tuple(_names)


@contextlib.contextmanager
def installing(devices: Optional[Iterable[str]] = None) -> Iterator[None]:
    """:func:`install` for the length of a block; what was before comes back."""
    before = installed()
    install(devices)
    try:
        yield
    finally:
        install(before) if before else uninstall()
