"""What the collective operations of a pass gave to a virtual rank, for a second pass."""
from __future__ import annotations

from typing import Any, List, Tuple

from ...digests import exact_digest

__all__ = ['PassesDiffer', 'Tape']


class PassesDiffer(RuntimeError):
    """The second of two equal passes has come to another collective operation."""


class Tape:
    """Of one rank: records operations, then answers the same ones without the other ranks."""

    def __init__(self) -> None:
        self._entries: List[Tuple[str, str, Any]] = []  # name, digest of the value, result
        self._next = -1  # entry of the second pass

    @property
    def answers(self) -> bool:
        """Whether this is the second pass."""
        return self._next >= 0

    def rewind(self) -> None:
        """The second pass begins."""
        self._next = 0

    def record(self, name: str, digest: str, result: Any) -> None:
        self._entries.append((name, digest, result))

    def answer(self, name: str, value: Any) -> Any:
        """The result of the same operation in the first pass.

        Raises:
            PassesDiffer: it was another one, or with other values; says which.
        """
        if self._next == len(self._entries):
            raise PassesDiffer(f'the first pass did not come to {name}')
        before, digest, result = self._entries[self._next]
        if before != name:
            raise PassesDiffer(f'the first pass came to {before}, the second to {name}')
        if digest != exact_digest(value):
            raise PassesDiffer(f'{name} has other values in the second pass')
        self._next += 1
        return result

    def end(self) -> None:
        """The second pass has ended.

        Raises:
            PassesDiffer: the first one came to more operations.
        """
        if self._next < len(self._entries):
            raise PassesDiffer(f'the second pass did not come to {self._entries[self._next][0]}')
