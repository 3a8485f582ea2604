"""Differences between what two runs were made of, by severity."""
from __future__ import annotations

from typing import Any, Dict, List

from ..state.strict import Difference, differences
from ..trace.manifest import CHANGES, HARMLESS, Manifest, compare_manifests
from .runs import RunView

__all__ = ['CHANGES', 'HARMLESS', 'is_known', 'manifest_differences']

# all that MMEngine alone writes down
SETTINGS = ('config.', 'randomness.')


def is_known(run: RunView) -> bool:
    """Whether anything was recorded of what the run was made of."""
    return bool(run.manifest or run.facts)


def manifest_differences(a: RunView, b: RunView) -> List[Difference]:
    """What differs, that which changes bits first: manifests if both runs have one, else settings.

    Of a run that was started several times, the manifest of the last start.
    """
    if not (is_known(a) and is_known(b)):
        return []
    if a.manifest and b.manifest:
        return compare_manifests(Manifest(a.path, a.manifest), Manifest(b.path, b.manifest))
    return differences(_settings(a), _settings(b))


def _settings(run: RunView) -> Dict[str, Any]:
    facts = Manifest(run.path, run.manifest).facts if run.manifest else run.facts
    return {name: value for name, value in facts.items() if name.startswith(SETTINGS)}
