"""Differences between what two runs were made of, by severity."""
from __future__ import annotations

from typing import Any, Dict, List

from ..facts.compatibility import Difference, differences
from ..fingerprint.manifest import CHANGES, HARMLESS, Manifest, compare_manifests
from .run_view import RunView

__all__ = ['CHANGES', 'HARMLESS', 'is_known', 'manifest_differences']

# all that MMEngine alone writes down
SETTINGS = ('config.', 'randomness.')
# of a manifest, what is said of the moment at which a process begins
OF_THE_START = ('initial_weights', 'weights', 'iteration', 'resumed_from')
BEGINNINGS = ('initial_weights', 'weights')


def is_known(run: RunView) -> bool:
    """Whether anything was recorded of what the run was made of."""
    return bool(run.manifest or run.facts)


def manifest_differences(a: RunView, b: RunView) -> List[Difference]:
    """What differs, that which changes bits first: manifests if both runs have one, else settings.

    Of a run that was started several times, the manifest of the last start, with the weights that
    the first began from: those that a resumed one loads are the same training's, later.
    """
    if not (is_known(a) and is_known(b)):
        return []
    if a.manifest and b.manifest:
        found = compare_manifests(*(Manifest(run.path, {
            **run.manifest, **{key: run.began[key] for key in OF_THE_START if key in run.began}})
            for run in (a, b)))
        if a.began.get('iteration') == b.began.get('iteration'):
            return found
        # one was resumed from a run elsewhere: weights of other iterations are no difference
        return [row for row in found if not row.name.startswith(BEGINNINGS)]
    return differences(_settings(a), _settings(b))


def _settings(run: RunView) -> Dict[str, Any]:
    facts = Manifest(run.path, run.manifest).facts if run.manifest else run.facts
    return {name: value for name, value in facts.items() if name.startswith(SETTINGS)}
