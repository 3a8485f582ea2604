"""What two recordings of one iteration tell: the first difference, in words."""
from __future__ import annotations

import os
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..fingerprint.records import Record, useful_calls
from .alignment import Difference, first_difference
from .causes import explain
from .divergence import Case
from .recording import read_stream

__all__ = ['Finding', 'find', 'find_on_ranks']

# where two ranks differ first at different places, the earlier phase is where it began
PHASES = ('start', 'data', 'forward', 'loss', 'backward', 'optimizer', 'hook')
# names of records of a state -> where that is
STATES = {
    'state before the iteration': 'before its first hook',
    'state after the iteration': 'after its last hook',
    'state before the hook': 'before {}',
    'state after the hook': 'in {}',
}
CALLS_SHOWN = 8

KINDS = {
    'output': 'inputs agree, the result differs',
    'argument': 'tensors agree, another number was given',
    'input': 'a tensor that was given differs, and no recorded operator made it',
    'generator': 'inputs agree, drawn from a generator in another state',
    'extra': 'only side B does this',
    'missing': 'only side A does this',
    'replaced': 'side A and side B do something else here',
}


class Finding(NamedTuple):
    """The first difference of two runs.

    Attributes:
        iteration: counted from 0.
        rank: of the process in which it began.
        kind: see :class:`mmrepro.localise.alignment.Difference`.
        phase, path, operator, shapes: of the record.
        differs: digests or names: what differs.
        stack: Python calls of side A or, where it has none, B; innermost first.
        cause, sentence, cure: name of the row of the catalogue, why, what to do.
        evidence: what was recorded that speaks for it.
        sample: index and place, when it began in the data pipeline.
        mover: phase, path and name of what moved a generator, for 'generator'.
        extra: operators that one side alone runs, at most 20, as 'A: ...' or 'B: ...'.
        record_a, record_b: numbers in the recordings of the iteration; None for samples.
    """
    iteration: int
    rank: int
    kind: str
    phase: str
    path: str
    operator: str
    shapes: str
    differs: Tuple[str, ...]
    stack: Tuple[Tuple[str, int, str], ...]
    cause: str
    sentence: str
    cure: str
    evidence: Tuple[str, ...]
    sample: str
    mover: str
    extra: Tuple[str, ...]
    record_a: Optional[int]
    record_b: Optional[int]

    def as_dict(self) -> Dict[str, Any]:
        return self._asdict()

    def _place(self) -> str:
        if self.operator in STATES:
            return STATES[self.operator].format(self.path)
        return ', '.join(filter(None, (self.phase, self.sample or self.path, self.operator)))

    def text(self) -> str:
        """Some twenty lines for a terminal."""
        rank = f' (rank {self.rank})' if self.rank else ''
        rows = [('where', f'iteration {self.iteration}, {self._place()}{rank}')]
        rows.append(('what', KINDS[self.kind]))
        if self.shapes and self.phase != 'data':
            rows.append(('shapes', self.shapes))
        rows += _several('differs', self.differs[:6])
        rows += _several('calls', [f'{_short(file)}:{line} in {name}' if line else name
                                   for file, line, name in useful_calls(self.stack)[:CALLS_SHOWN]])
        rows += _several('one side', self.extra[:6])
        rows += [('cause', f'{self.cause}: {self.sentence}')]
        rows += _several('evidence', self.evidence[:8])
        rows.append(('cure', self.cure))
        return '\n'.join(f'  {name:<9} {value}' for name, value in rows)


def _several(name: str, values: Sequence[str]) -> List[Tuple[str, str]]:
    return [(name if i == 0 else '', value) for i, value in enumerate(values)]


def _short(file: str) -> str:
    """The path from the package on, or relative to here."""
    for marker in ('/site-packages/', '/dist-packages/'):
        if marker in file:
            return file.split(marker, 1)[1]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith('..') else relative


def find(iteration: int, rank: int, a: Sequence[Record],
         b: Sequence[Record]) -> Optional[Finding]:
    """The first difference of two streams; None when they agree."""
    difference = first_difference(a, b)
    if difference is None:
        return None
    case = Case(difference, a, b)
    row, evidence = explain(case)
    record, mover = case.record, case.mover()
    return Finding(
        iteration, rank, difference.kind, record.phase, record.path, record.name, record.shapes,
        _differing(case), record.stack, row.name, row.cause, row.cure, tuple(evidence),
        _sample(case), ' '.join(filter(None, (mover.phase, mover.path, mover.name)))
        if mover else '', _one_sided(difference, a, b), _number(difference.a, a),
        _number(difference.b, b))


def find_on_ranks(iteration: int, folder_a: str, folder_b: str,
                  ranks: Sequence[int]) -> Optional[Finding]:
    """The first difference on any rank: the one in the earliest phase."""
    found = [find(iteration, rank, read_stream(folder_a, rank, folder_b),
                  read_stream(folder_b, rank, folder_a))
             for rank in ranks]
    present = [one for one in found if one is not None]
    return min(present, key=lambda one: (PHASES.index(one.phase), one.rank), default=None)


def _number(place: Optional[int], stream: Sequence[Record]) -> Optional[int]:
    """Of a record among those of its iteration, which come after the samples."""
    samples = sum(record.path.startswith('sample ') for record in stream)
    return None if place is None or place < samples else place - samples


def _differing(case: Case) -> Tuple[str, ...]:
    a, b, found = case.a, case.b, case.found
    if a is None or b is None:
        return ()
    if found.kind == 'argument' or a.is_state and not case.state_names():
        return tuple(case.arguments())
    if case.state_names():
        return tuple(case.state_names())
    if found.kind == 'input':
        texts = zip(a.inputs, b.inputs, [*a.labels, *[''] * len(a.inputs)])
        return tuple(f'input {i}{" " + name if name else ""}: {x} / {y}'
                     for i, (x, y, name) in enumerate(texts) if i in found.which)
    names = a.shapes.split('-> ')[-1].split() if a.phase == 'data' else []
    if a.name == 'batch':
        names = list(a.labels)
    names += [''] * (len(a.outputs) - len(names))
    return tuple(f'result {i}{" " + name if name else ""}: {x} / {y}'
                 for i, (x, y, name) in enumerate(zip(a.outputs, b.outputs, names))
                 if i in found.which)


def _sample(case: Case) -> str:
    """The sample with its index, and the number of the transform."""
    path = case.record.path
    if not path.startswith('sample '):
        return ''
    name, _, place = path.partition('/')
    stream = case.streams[0] if case.a is not None else case.streams[1]
    begin = next((r for r in stream if r.path == f'{name}/begin'), None)
    epoch, position = name.split()[1].split('.')
    index = f'{begin.arguments}, ' if begin else ''
    return f'sample ({index}epoch {epoch}, place {position}), transform {place}'


def _one_sided(found: Difference, a: Sequence[Record],
               b: Sequence[Record]) -> Tuple[str, ...]:
    return tuple(f'{side}: {r.phase} {r.path or "(model)"} {r.name} {r.shapes}'
                 for side, stream, numbers in (('A', a, found.extra_a), ('B', b, found.extra_b))
                 for r in (stream[n] for n in numbers[:10]))
