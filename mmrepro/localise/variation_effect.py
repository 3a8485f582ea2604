"""What two runs were made of: which settings differ, and whether a varied one took effect."""
from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..facts.compatibility import CHANGES, WEIGHTS
from ..fingerprint.manifest import Manifest, compare_manifests
from ..fingerprint.reader import RecordedRun
from ..text import listed, shorten
from .compared_runs import RunSpec

THREADS = 'torch.num_threads'  # a fact of the manifest: the number that operators used
THREAD_VARIABLES = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')
# these settings count by the number of threads that torch used
THREAD_SETTINGS = (*THREAD_VARIABLES, 'randomness.numerics.num_threads')


def different_by_design(runs: Sequence[RecordedRun]) -> list[str]:
    """What to say before two runs are repeated: that they were not made of the same.

    None where nothing that changes bits differs, or a run has no manifest.
    """
    if not all(run.manifests for run in runs):
        return []
    found = compare_manifests(*(Manifest(run.work_dir, run.manifests[0]) for run in runs))
    rows = [f'{row.name}: {shorten(row.then, 40)} / {shorten(row.now, 40)} ({row.consequence})'
            for row in found if row.severity == CHANGES and row.about != WEIGHTS]
    return [f'the runs were not made of the same, so they have to differ: {listed(rows)}'] \
        if rows else []


def settings_without_effect(specs: Sequence[RunSpec], runs: Sequence[RecordedRun]) -> list[str]:
    """A line for each varied setting or variable for which both runs had the same value.

    Of runs without manifests, nothing is reported.
    """
    if not all(run.manifests for run in runs):
        return []
    facts = [Manifest(run.work_dir, run.manifests[-1]).facts for run in runs]
    lines = []
    for name, value in {**specs[0].asked, **specs[1].asked}.items():
        if name in THREAD_SETTINGS:
            a, b = (one.get(THREADS) for one in facts)
            if a is not None and a == b:
                lines.append(f'both runs used {a} thread{"" if a == 1 else "s"}: {name}={value} '
                             f'had no effect{_overruled_by(name, specs)}')
        elif _is_common(name, specs, facts):
            lines.append(f'both runs used {name}={value}: varying it had no effect')
    return lines


def _overruled_by(name: str, specs: Sequence[RunSpec]) -> str:
    """Other variables for the number of threads that both runs have with one value."""
    values = [(other, *(_variable(other, spec) for spec in specs))
              for other in THREAD_VARIABLES if other != name]
    common = [f'{other}={a}' for other, a, b in values if a is not None and a == b]
    return f' (both had {", ".join(common)})' if common else ''


def _is_common(name: str, specs: Sequence[RunSpec], facts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a variable or setting had the same value in both runs, as far as is known."""
    if any(name in spec.env for spec in specs):
        return _variable(name, specs[0]) == _variable(name, specs[1])
    # `randomness` is recorded as it is in effect, beside the text of the config
    full = name if name.startswith('randomness.') else f'config.{name}'
    a, b = ({key: value for key, value in one.items()
             if key == full or key.startswith((f'{full}.', f'{full}['))} for one in facts)
    return bool(a) and a == b


def _variable(name: str, spec: RunSpec) -> str | None:
    return spec.env.get(name, os.environ.get(name))
