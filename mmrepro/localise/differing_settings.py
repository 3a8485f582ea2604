"""Which settings of two runs differ, and whether a varied setting took effect in both."""
from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..facts.compatibility import CHANGES, MAY, WEIGHTS
from ..facts.own_code import MMREPRO, NOT_RECORDED, PREFIX
from ..fingerprint.manifest import Manifest, compare_manifests
from ..fingerprint.reader import RecordedRun
from ..util.text import listed, shorten
from .diagnosis import short_path
from .recording import RunSpec

THREADS = 'torch.num_threads'  # the fact in the manifest: number of threads of operators
THREAD_VARIABLES = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')
# settings that are compared by the number of threads that torch used
THREAD_SETTINGS = (*THREAD_VARIABLES, 'randomness.numerics.num_threads')


def different_by_design(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a line that names the differing settings which change bits; [] without any."""
    rows = known_differences(runs, CHANGES)
    return [f'the runs differ by design: {listed(rows)}'] if rows else []


def not_known_equal(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the differences of the runs, and possible ones that were not recorded."""
    lacking = [run.work_dir for run in runs if not run.manifests]
    if lacking:
        return [f'settings, code, environment, versions, variables and data: {lacking[0]} has no '
                'manifest']
    known = [text for at in _starts(runs) for text in known_differences(at, CHANGES, MAY)]
    return [*dict.fromkeys(known)] + [
        f'{what}: not recorded in {run.work_dir}' for run in runs
        for what in not_recorded(run.manifests[0])]


def _starts(runs: Sequence[RecordedRun]) -> Iterator[list[RecordedRun]]:
    """Yield the runs as they were at each start of either: a resume may have edited code."""
    for iteration in sorted({_began(manifest) for run in runs for manifest in run.manifests}):
        yield [run._replace(manifests=[
            manifest for manifest in run.manifests if _began(manifest) <= iteration][-1:]
            or run.manifests[:1]) for run in runs]


def _began(manifest: Mapping[str, Any]) -> int:
    return int(manifest.get('iteration') or 0)


def not_recorded(manifest: Mapping[str, Any]) -> list[str]:
    """Return the facts that bits depend on and that a manifest lacks."""
    facts, data = manifest.get('facts') or {}, manifest.get('data') or {}
    lacking = {
        'the code that was imported': MMREPRO not in facts,
        'code that was typed into a prompt or notebook': NOT_RECORDED in [
            value for name, value in facts.items() if name.startswith(PREFIX)],
        'the environment': manifest.get('environment') is None,
        'environment variables that the code reads': manifest.get('variables') is None,
        'versions': 'version.torch' not in facts,
        'what the dataset holds': not (data.get('annotations') or data.get('images')),
    }
    return [what for what, lacks in lacking.items() if lacks]


def known_differences(runs: Sequence[RecordedRun], *severities: str) -> list[str]:
    """Return texts on what differs, with these severities, between the manifests of two runs."""
    if not all(run.manifests for run in runs):
        return []
    a, b = map(_manifest, runs)
    return [f'{row.name}: {shorten(row.then, 40)} / {shorten(row.now, 40)} ({row.consequence})'
            for row in compare_manifests(a, b) if row.severity in severities
            and row.about != WEIGHTS and not row.name.startswith('variables.')] + [
        variable.text() for variable in differing_variables(runs) if MAY in severities]


def _manifest(run: RecordedRun) -> Manifest:
    return Manifest(run.work_dir, run.manifests[0])


class Variable(NamedTuple):
    """An environment variable that code outside of libraries reads, and that differs."""
    name: str
    a: str | None  # None: it was not set
    b: str | None
    read: str  # file and line

    def text(self) -> str:
        a, b = ('not set' if value is None else value for value in (self.a, self.b))
        file, _, line = self.read.rpartition(':')
        return f'{self.name} is {a} in A, {b} in B; read at {short_path(file)}:{line}'


def differing_variables(runs: Sequence[RecordedRun]) -> list[Variable]:
    """Return the variables that both runs have read, with different values."""
    if not all(run.manifests for run in runs):
        return []
    a, b = (_manifest(run).variables for run in runs)
    return [Variable(name, a[name]['value'], b[name]['value'], b[name]['read'])
            for name in a if name in b and a[name]['value'] != b[name]['value']]


def settings_without_effect(specs: Sequence[RunSpec], runs: Sequence[RecordedRun]) -> list[str]:
    """Return a line for each varied setting or variable whose value was the same in both runs.

    Nothing is reported on runs without manifests.
    """
    if not all(run.manifests for run in runs):
        return []
    facts = [Manifest(run.work_dir, run.manifests[-1]).facts for run in runs]
    lines = []
    for name, value in {**specs[0].asked, **specs[1].asked}.items():
        a, b = (_effective(name, specs, spec, of_run) for spec, of_run in zip(specs, facts))
        if a != b or a is None:
            continue
        if name in THREAD_SETTINGS:
            # other variables for the number of threads with the same value in both runs
            common = [f'{variable}={value}' for variable, value in _common(THREAD_VARIABLES, specs)
                      if variable != name]
            overruled = f' (both had {", ".join(common)})' if common else ''
            lines.append(f'both runs used {a} thread{"" if a == 1 else "s"}: {name}={value} had no '
                         f'effect{overruled}')
        else:
            lines.append(f'both runs used {name}={value}: varying it had no effect')
    return lines


def _common(variables: Sequence[str], specs: Sequence[RunSpec]) -> Iterator[tuple[str, str]]:
    """Yield the variables that are set to one value in both runs, and the value."""
    for variable in variables:
        a, b = (_variable(variable, spec) for spec in specs)
        if a is not None and a == b:
            yield variable, a


def _effective(name: str, specs: Sequence[RunSpec], spec: RunSpec,
               facts: Mapping[str, Any]) -> Any:
    """Return the value of a setting or variable in a run; None if it is not known."""
    if name in THREAD_SETTINGS:
        return facts.get(THREADS)
    if any(name in each.env for each in specs):
        return _variable(name, spec) or ''
    # `randomness` is recorded as it is in effect, beside the text of the config
    full = name if name.startswith('randomness.') else f'config.{name}'
    return {key: value for key, value in facts.items()
            if key == full or key.startswith((f'{full}.', f'{full}['))} or None


def _variable(name: str, spec: RunSpec) -> str | None:
    return spec.env.get(name, os.environ.get(name))
