"""Differences between what two runs were made of, by severity."""
from __future__ import annotations

from typing import Any, Dict, List

from ..state.facts import flatten
from ..state.strict import CHANGES, HARMLESS, Difference, differences
from .runs import RunView

__all__ = ['CHANGES', 'HARMLESS', 'SEVERITIES', 'manifest_differences']

SEVERITIES = (CHANGES, 'may change bits', HARMLESS)


def manifest_differences(a: RunView, b: RunView) -> List[Difference]:
    """Facts that differ, those that change bits first.

    Runs without manifest are compared by the settings that MMEngine wrote down, and only if both
    have something.
    """
    if not (a.manifest or a.facts) or not (b.manifest or b.facts):
        return []
    return differences(_facts(a), _facts(b))


def _facts(run: RunView) -> Dict[str, Any]:
    return run.facts if not run.manifest else flatten(run.manifest)
