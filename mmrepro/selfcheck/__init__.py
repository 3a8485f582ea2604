"""A run with ``deterministic=True`` is checked by doing: steps and validations, a witness.

Steps that differ are diagnosed by the room ``localise``, which lies above this one: self-checks
cannot import it, so the package hands its function down when it is imported.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Diagnosis(Protocol):
    """The first difference of two recordings, as :class:`mmrepro.localise.diagnosis.Diagnosis`."""

    @property
    def phase(self) -> Any:
        """The phase of the step in which it is, one of ``PHASES``."""

    def text(self) -> str:
        """Return lines for a terminal."""

    def _asdict(self) -> dict[str, Any]:
        """Return plain data."""


Diagnose = Callable[[int, int, Sequence[Any], Sequence[Any]], 'Diagnosis | None']
_given: list[Diagnose] = []


def diagnose_with(function: Diagnose) -> None:
    """Let ``function`` diagnose from now on."""
    _given[:] = [function]


def diagnose(iteration: int, rank: int, a: Sequence[Any], b: Sequence[Any]) -> Diagnosis | None:
    """Return the first difference of two streams of records; None when they agree."""
    function, = _given
    return function(iteration, rank, a, b)
