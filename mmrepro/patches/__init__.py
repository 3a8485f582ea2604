"""Replacements for the code inside MMDetection that breaks reproducibility.

The table is :data:`~mmrepro.patches.replacements.CAUSES`; :func:`apply` and :func:`revert` put the
rows in force and take them out. Nothing is imported from MMDetection before :func:`apply` is
called.

A worker started with *spawn* imports MMDetection afresh, without any row in force. :func:`apply` is
a plain function, so it pickles by name: :data:`apply_in_worker` is called in ``worker_init_fn``.
"""
from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import pkgutil
import sys
import warnings
from types import ModuleType
from typing import Any, Dict, NamedTuple, Optional, Tuple

from .replacements import CAUSES, PATCHES, Patch, StockCause

__all__ = ['CAUSES', 'PATCHES', 'Patch', 'StockCause', 'apply', 'apply_in_worker', 'applied',
           'revert']

_ABSENT = object()
_IMPORTED = ('mmdet', 'mmengine')  # other targets are looked up only where MMDetection loaded them


class _Replaced(NamedTuple):
    owner: Any
    name: str
    before: Any  # the owner's own entry, _ABSENT where the name was inherited or a builtin
    after: Any


_changes: Dict[Patch, _Replaced] = {}


def applied() -> Tuple[Patch, ...]:
    """The rows that are in force in this process."""
    return tuple(patch for patch in PATCHES if patch in _changes)


def apply(legacy: bool = False, worker: bool = False) -> Tuple[Patch, ...]:
    """Put the rows in force; a second call changes nothing.

    A row whose module or class this version of MMDetection does not have is left out. So is every
    row when MMDetection is not installed.

    Args:
        legacy: leave out, or take out again, the rows that change data streams.
        worker: consider only what runs inside ``dataset[i]``, which spares a spawned worker the
            import of models, hooks and visualisers. Its dataset has been unpickled by then, so a
            worker that has not imported MMDetection does not use it.

    Returns:
        The rows in force in this process afterwards.

    Warns:
        RuntimeWarning: the class of a row exists, its method does not: the cause is not covered.
    """
    if importlib.util.find_spec('mmdet') is None or (worker and 'mmdet' not in sys.modules):
        return applied()
    for patch in PATCHES:
        if worker and not patch.in_worker:
            continue
        if legacy and patch.cause.affects_data:
            _undo(patch)
        elif patch not in _changes:
            _do(patch)
    return applied()


apply_in_worker = functools.partial(apply, worker=True)


def revert() -> None:
    """Take all rows out: every attribute is again the object that it was before."""
    for patch in reversed(list(_changes)):
        _undo(patch)


def _do(patch: Patch) -> None:
    owner, name = _locate(patch)
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


def _locate(patch: Patch) -> Tuple[Optional[Any], str]:
    """The object that holds the target and the attribute's name; (None, name) without a holder."""
    path, _, attributes = patch.target.partition(':')
    *parents, name = attributes.split('.')
    owner: Any = sys.modules.get(path)
    if path.partition('.')[0] in _IMPORTED:
        try:
            owner = importlib.import_module(path)
        except ModuleNotFoundError as error:
            # `path` itself or a parent of it is missing, as opposed to something that it imports
            if error.name is None or not f'{path}.'.startswith(f'{error.name}.'):
                raise
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name
