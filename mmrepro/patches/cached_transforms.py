"""Mosaics and mix-ups with a cache as pure functions of the sample's position.

MMDetection and MMYOLO keep the last 40 (20) results of a *worker* and mix in some of them: the
outcome depends on the number of workers, on their lifetime, and on a resume. Here a sample mixes in
samples before it in its batch, and, at the start of a batch, a few samples chosen at random for
that batch. Nothing is kept from batch to batch, and at most five extra images are loaded a batch.

The code of the transforms runs unchanged, with a list that looks like its cache. It copies every
sample that it mixes two to four times, with all numbers of all polygons; here in less time.
"""
from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any, Callable

from ..data.batch_context import EXTRA_SAMPLES, BatchContext, current_batch
from ..util.scoped import replaced
from .replacements import around

# class -> extra samples that the first sample of a batch can choose from: stock mixes as soon as
# its cache holds five results (mosaic; both in MMYOLO) or two (mixup), the current one included
PARTNERS = {'CachedMosaic': 5, 'CachedMixUp': 1, 'BaseMixImageTransform': 5}


def _stock_class(transform: Any) -> type:
    return next(cls for cls in type(transform).__mro__ if cls.__name__ in PARTNERS)


class _Partners:
    """Replaces ``results_cache``: the partners of the sample, then its own results."""

    def __init__(self, transform: Any, batch: BatchContext) -> None:
        self._transform, self._batch = transform, batch
        kind = _stock_class(transform).__name__
        subtree = batch.subtree(transform)
        self._handles = [subtree.handle(offset) for offset in partners(
            kind, subtree.current(), transform.max_cached_images)]
        self._own: list[Any] = []

    def append(self, results: Any) -> None:
        self._batch.reached(self._transform, results)
        self._own.append(results)

    def __len__(self) -> int:
        return len(self._handles) + len(self._own)

    def __getitem__(self, index: int) -> Any:
        if index < len(self._handles):
            return self._batch.state(self._transform, self._handles[index])
        return self._own[index - len(self._handles)]


def partners(kind: str, current: int, max_cached_images: int) -> list[int]:
    """Return offsets in the subtree of the samples that sample ``current`` may mix in."""
    first = max(EXTRA_SAMPLES - PARTNERS[kind], current - (max_cached_images - 1))
    last = max(current, EXTRA_SAMPLES)
    # `- 1`: stock drops a result when its cache, the current one included, is over-full
    return [offset for offset in range(first, last) if offset != current][-max_cached_images + 1:]


_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})  # copies are the objects


def _copied_part(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is not list and kind is not dict:
        return copy.deepcopy(value, memo)
    if id(value) in memo:
        return memo[id(value)]
    if kind is list:
        made = memo[id(value)] = value.copy()
        if not _ATOMS.issuperset(map(type, value)):
            made[:] = [_copied_part(item, memo) for item in value]
        return made
    entries: dict[Any, Any] = {}
    memo[id(value)] = entries
    for key, item in value.items():
        entries[_copied_part(key, memo)] = _copied_part(item, memo)
    return entries


def copied(value: Any) -> Any:
    """Return ``copy.deepcopy(value)``, without a call for each number of a list.

    >>> part = [1.5, 2.5]
    >>> first, second = copied([part, part])
    >>> first is second, first is part
    (True, False)
    """
    return _copied_part(value, {})


def _mixed(stock: Callable[..., Any], self: Any, results: dict[str, Any],
           batch: BatchContext) -> Any:
    """Transform with partners from the batch instead of the cache."""
    module = sys.modules[_stock_class(self).__module__]
    copying = SimpleNamespace(**{**vars(copy), 'deepcopy': copied})
    with replaced(self, results_cache=_Partners(self, batch)), replaced(module, copy=copying):
        return stock(self, results)


@around
def pure(stock: Callable[..., Any], self: Any, results: dict[str, Any]) -> Any:
    """Transform with partners from the batch instead of the cache.

    Outside of keyed data loading (a script that asks for ``dataset[0]``), stock's cache is used.
    """
    batch = current_batch()
    return stock(self, results) if batch is None else _mixed(stock, self, results, batch)


@around
def pure_by_chance(stock: Callable[..., Any], self: Any, results: dict[str, Any]) -> Any:
    """Transform with MMYOLO's classes, which have a cache if ``use_cached`` says so.

    Stock draws whether to mix before it caches. Here all samples can be partners, also those that
    are not mixed themselves.
    """
    batch = current_batch()
    if batch is None or not self.use_cached:
        return stock(self, results)
    # `dataset`: MMYOLO hands the dataset itself through the pipeline
    batch.reached(self, copied({k: v for k, v in results.items() if k != 'dataset'}))
    return _mixed(stock, self, results, batch)
