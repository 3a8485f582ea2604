"""Notice flags that somebody else has changed during a run."""
from __future__ import annotations

from typing import Any

from .. import determinism


class FlagWatch:
    """Checks the flags of this process before steps 1, 2, 4, 8, ...: late changes are found too."""

    def __init__(self) -> None:
        self._steps = 0
        self._told: set[str] = set()

    def step(self, strict: bool, logger: Any) -> None:
        """Call this before a training step.

        Raises:
            DeterminismError: ``strict``, and a flag has changed; otherwise it is a warning, once.
        """
        self._steps += 1
        found = [] if self._steps & (self._steps - 1) else determinism.drifted()
        if not found:
            return
        text = '\n'.join(
            f'{flag.name} is {flag.after!r}; this run has set {flag.before!r} and needs it '
            f'({flag.why}). A hook, a module or a dataset has changed it; it must put it back'
            for flag in found)
        if strict:
            raise determinism.DeterminismError(text)
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)
