"""Draw the order of data again from what it was drawn from: weights that hooks change meanwhile.

A hook may change the weights of a sampler, or of the dataset that it reads, within a pass. A run
that resumes in the pass draws its order again, as do workers that start again; so a pass notes the
kept attributes (:mod:`mmrepro.checkpoint.adapters`) at each draw. An order is drawn in blocks.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..objects.digests import exact_digest


class OrderHistory:
    """The kept attributes at each draw of a pass.

    Args:
        kept: reads them, and replaces them for a while.
        again: :meth:`as_dict` of the pass, if this pass continues it.
    """

    def __init__(self, kept: Any, again: Mapping[str, Any]) -> None:
        self._kept = kept
        self._states: list[Any] = list(again.get('states', ()))
        # name of what draws, number of the draw -> index of the state
        self._draws: dict[str, list[int]] = {
            name: list(draws) for name, draws in again.get('draws', {}).items()}
        self._last = exact_digest(self._states[-1]) if self._states else None

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return dict(states=list(self._states),
                    draws={name: list(draws) for name, draws in self._draws.items()})

    @contextmanager
    def drawing(self, name: str, number: int) -> Iterator[None]:
        """Draw in this block: a draw of before from the state of then."""
        draws = self._draws.setdefault(name, [])
        if number < len(draws):
            with self._kept.replaced(self._states[draws[number]]):
                yield
            return
        state = self._kept.read()
        digest = exact_digest(state)
        if digest != self._last:
            self._states.append(state)
            self._last = digest
        draws.append(len(self._states) - 1)
        yield


def drawing(sampler: Any, name: str, number: int) -> AbstractContextManager[None]:
    """Return the context in which an adopted sampler makes a draw of its order."""
    history = sampler._mmrepro_loader_position.history
    return nullcontext() if history is None else history.drawing(name, number)
