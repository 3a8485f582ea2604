"""Whether what was varied between two sides came into force: what both really ran with."""
from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence

from ..fingerprint.manifest import Manifest
from ..fingerprint.reader import RecordedRun
from .compared_runs import Side

__all__ = ['effects']

THREADS = 'torch.num_threads'  # of the facts: what an operator was cut into
THREAD_VARIABLES = ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')
# names that ask for threads -> they are judged by the number of threads
ASK_FOR_THREADS = (*THREAD_VARIABLES, 'randomness.num_threads')


def effects(sides: Sequence[Side], runs: Sequence[RecordedRun]) -> List[str]:
    """A line for each varied setting or variable that made no difference to what was run.

    Args:
        sides: with what was asked for.
        runs: of the sides, with their manifests; without them nothing is said.
    """
    if not all(run.manifests for run in runs):
        return []
    facts = [Manifest(run.work_dir, run.manifests[-1]).facts for run in runs]
    asked = {name: value for side in sides for name, value in side.asked.items()}
    lines = []
    for name, value in asked.items():
        threads = name in ASK_FOR_THREADS
        if threads and _threads(facts):
            lines.append(f'both sides ran with {_threads(facts)}: {name}={value} changed nothing'
                         + _winner(name, sides))
        elif not threads and _common(name, sides, facts):
            lines.append(f'both sides ran with {name}={value}: the variation changed nothing')
    return lines


def _threads(facts: Sequence[Mapping[str, Any]]) -> str:
    """How many both sides had; '' if it differed or nobody knows."""
    numbers = {one.get(THREADS) for one in facts}
    if len(numbers) > 1 or None in numbers:
        return ''
    number = numbers.pop()
    return f'{number} thread{"" if number == 1 else "s"}'


def _winner(name: str, sides: Sequence[Side]) -> str:
    """Another variable that says how many threads there are, alike on both sides."""
    others = {f'{other}={value}' for other in THREAD_VARIABLES if other != name
              for value in [_variable(other, sides[0])]
              if value is not None and value == _variable(other, sides[1])}
    return f' ({", ".join(sorted(others))} was set on both)' if others else ''


def _common(name: str, sides: Sequence[Side], facts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a variable or setting was the same on both sides, as far as is known."""
    if any(name in side.env for side in sides):
        return _variable(name, sides[0]) == _variable(name, sides[1])
    first, second = (_part(name, one) for one in facts)
    return bool(first) and first == second


def _variable(name: str, side: Side) -> Optional[str]:
    return side.env.get(name, os.environ.get(name))


def _part(name: str, facts: Mapping[str, Any]) -> Dict[str, Any]:
    """Facts of a setting and of all below it; `randomness` is among them as it is in force."""
    full = name if name.startswith('randomness.') else f'config.{name}'
    return {key: value for key, value in facts.items()
            if key == full or key.startswith((f'{full}.', f'{full}['))}
