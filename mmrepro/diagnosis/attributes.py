"""Record attributes and globals, which may explain a difference and are not compared."""
from __future__ import annotations

from typing import Any

from ..checkpoint.lost_state import code_state, snapshot
from ..fingerprint import run_state
from ..fingerprint.operator_recorder import OperatorRecorder
from ..fingerprint.records import ATTRIBUTES


def record_attributes(recorder: OperatorRecorder, runner: Any) -> None:
    """Record facts of the process, attributes, and globals of the user's modules."""
    recorder.explanation('', ATTRIBUTES, labels=tuple(run_state.attributes(runner)))
    for owner, content in {**snapshot(runner), **code_state(runner)}.items():
        kind, _, name = owner.partition(':')
        cls = content.pop('<class>')
        prefix = {'model': f'{name}.', 'global': f'global {name}:'}.get(kind, f'{cls}.')
        recorder.explanation(
            owner, ATTRIBUTES, stack=((content.pop('<file>'), 0, cls), ),
            labels=tuple(f'{prefix}{attribute}={value}' for attribute, value in content.items()))
