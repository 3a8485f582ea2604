"""Mosaics and mix-ups with a cache as pure functions of the sample's position.

MMDetection and MMYOLO keep the last 40 (20) results of a *worker* and mix in some of them: the
outcome depends on the number of workers, on their lifetime, and on a resume. Here a sample mixes in
samples before it in its batch, and, at the start of a batch, a few samples chosen at random for
that batch. Nothing is kept from batch to batch, and at most five extra images are loaded a batch.

The code of the transforms runs unchanged, with a list that looks like its cache.
"""
from __future__ import annotations

import copy
from typing import Any, Callable

from ..data.batch_context import EXTRA_SAMPLES, BatchContext, current_batch
from ..util.scoped import replaced
from .replacements import around

# class -> extra samples that the first sample of a batch can choose from: stock mixes as soon as
# its cache holds five results (mosaic; both in MMYOLO) or two (mixup), the current one included
PARTNERS = {'CachedMosaic': 5, 'CachedMixUp': 1, 'BaseMixImageTransform': 5}


class _Partners:
    """Replaces ``results_cache``: the partners of the sample, then its own results."""

    def __init__(self, transform: Any, batch: BatchContext) -> None:
        self._transform, self._batch = transform, batch
        kind = next(cls.__name__ for cls in type(transform).__mro__ if cls.__name__ in PARTNERS)
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


@around
def pure(stock: Callable[..., Any], self: Any, results: dict[str, Any]) -> Any:
    """Transform with partners from the batch instead of the cache.

    Outside of keyed data loading (a script that asks for ``dataset[0]``), stock's cache is used.
    """
    batch = current_batch()
    if batch is None:
        return stock(self, results)
    with replaced(self, results_cache=_Partners(self, batch)):
        return stock(self, results)


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
    batch.reached(self, copy.deepcopy({k: v for k, v in results.items() if k != 'dataset'}))
    with replaced(self, results_cache=_Partners(self, batch)):
        return stock(self, results)
