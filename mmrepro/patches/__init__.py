"""Replacements for the code inside MMDetection that breaks reproducibility.

The table is :data:`~mmrepro.patches.replacements.CAUSES`; :func:`apply` and :func:`revert` put the
rows in force and take them out. A row is in force from the import of its module on. Nothing is
imported here. A worker started with *spawn* calls :func:`apply` for itself.
"""
from __future__ import annotations

import builtins
import pkgutil
import warnings
from types import ModuleType
from typing import Any, NamedTuple

from ..util.imports import after_import, forget
from .replacements import CAUSES, PATCHES, Patch, StockCause

_ABSENT = object()


class _Replaced(NamedTuple):
    owner: Any
    name: str
    before: Any  # the owner's entry; _ABSENT where the name was inherited or a builtin
    after: Any


_changes: dict[Patch, _Replaced] = {}
_left_out: set[Patch] = set()  # by the last `apply`


def applied() -> tuple[Patch, ...]:
    """Return the rows that are in force in this process."""
    return tuple(patch for patch in PATCHES if patch in _changes)


def apply(stock_streams: bool = False) -> tuple[Patch, ...]:
    """Put the rows in force, now or when their modules are imported; return those in force.

    A row whose class this version of the library does not have is left out.

    Args:
        stock_streams: the run has MMEngine's own streams: leave out, or take out again, the rows
            that change data streams.

    Warns:
        RuntimeWarning: the class of a row exists, its method does not: the cause is not covered.
    """
    _left_out.clear()
    _left_out.update(patch for patch in PATCHES if stock_streams and patch.cause.affects_data)
    for module in dict.fromkeys(patch.module for patch in PATCHES):
        after_import(module, _patch)
    return applied()


def _patch(module: ModuleType) -> None:
    """Put the rows of a module in force, without those that the last :func:`apply` left out."""
    for patch in PATCHES:
        if patch.module != module.__name__:
            continue
        if patch in _changes and _changes[patch].owner is not _locate(patch, module)[0]:
            del _changes[patch]  # the module was imported again
        if patch in _left_out:
            _undo(patch)
        elif patch not in _changes:
            _do(patch, module)


def revert() -> None:
    """Take all rows out: each attribute is again the object that it was before."""
    for module in dict.fromkeys(patch.module for patch in PATCHES):
        forget(module, _patch)
    for patch in reversed(list(_changes)):
        _undo(patch)


def _do(patch: Patch, module: ModuleType) -> None:
    owner, name = _locate(patch, module)
    if owner is None:
        return
    stock = getattr(owner, name, _ABSENT)
    if stock is _ABSENT and isinstance(owner, ModuleType):
        stock = getattr(builtins, name, _ABSENT)
    if stock is _ABSENT:
        warnings.warn(
            f'{patch.target} does not exist in this version, so cause {patch.cause.id} is not '
            f'covered ({patch.cause.why})', RuntimeWarning, stacklevel=3)
        return
    after = pkgutil.resolve_name(patch.replacement)(stock)
    _changes[patch] = _Replaced(owner, name, vars(owner).get(name, _ABSENT), after)
    setattr(owner, name, after)


def _undo(patch: Patch) -> None:
    change = _changes.pop(patch, None)
    if change is None:
        return
    if vars(change.owner).get(change.name) is not change.after:
        warnings.warn(f'{patch.target} was replaced again by other code; it is left as it is',
                      RuntimeWarning, stacklevel=3)
    elif change.before is _ABSENT:
        delattr(change.owner, change.name)
    else:
        setattr(change.owner, change.name, change.before)


def _locate(patch: Patch, module: ModuleType) -> tuple[Any | None, str]:
    """Return the owner of the target, None if it is missing, and the name of the attribute."""
    *parents, name = patch.target.partition(':')[2].split('.')
    owner: Any = module
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name
