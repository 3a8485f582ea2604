"""The first difference of two recordings of an iteration, its cause and its fix."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..fingerprint.records import (
    BEFORE_ITERATION,
    PHASES,
    STATES,
    Frame,
    Phase,
    Record,
    useful_calls,
)
from .alignment import KINDS, Difference, Kind, StreamDifference, first_differing_record
from .causes import find_cause

BEGINS = re.compile(r'\._?before_(train_)?(epoch|iter)$')  # hooks that open an iteration
# lines shown
DIFFERS_SHOWN, CALLS_SHOWN, EXTRA_SHOWN, EVIDENCE_SHOWN = 6, 8, 6, 8


class Diagnosis(NamedTuple):
    """The first difference of two runs."""
    iteration: int  # counted from 0
    rank: int  # of the process in which it began
    kind: Kind
    phase: Phase  # of the record, as the next three
    path: str
    operator: str
    shapes: str
    differs: tuple[str, ...]  # digests or names
    stack: tuple[Frame, ...]  # of run A or, where it has none, B; innermost first
    cause: str  # name of the row in .causes
    sentence: str  # why the bits differ
    fix: str  # how to make them equal
    evidence: tuple[str, ...]  # records that support the cause
    sample: str  # index and position, when it began in the data pipeline
    mover: str  # for 'generator': phase, path and name of the record that advanced it
    extra: tuple[str, ...]  # operators of one run only, at most 20, as 'A: ...' or 'B: ...'
    record_a: int | None  # number in the recording of the iteration; None for samples
    record_b: int | None

    def order(self) -> tuple[int, float, int]:
        """Return a key that sorts the first differences of several ranks by time."""
        phase = PHASES.index(self.phase) if not (
            self.phase == 'hook' and BEGINS.search(self.path)) else PHASES.index('forward') - .5
        return self.iteration, phase, self.rank

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values; a further value of a name has the name ''."""
        if self.operator in STATES:
            where = STATES[self.operator].format(self.path)
        else:
            where = ', '.join(filter(None, (self.phase, self.sample or self.path, self.operator)))
        rank = f' (rank {self.rank})' if self.rank else ''
        calls = [f'{short_path(file)}:{line} in {name}' if line else name
                 for file, line, name in useful_calls(self.stack)[:CALLS_SHOWN]]
        rows = {
            'where': [f'iteration {self.iteration}, {where}{rank}'],
            'what': [KINDS[self.kind]],
            'shapes': [self.shapes] if self.shapes and self.phase != 'data' else [],
            'differs': self.differs[:DIFFERS_SHOWN],
            'calls': calls,
            'only in': self.extra[:EXTRA_SHOWN],
            'cause': [f'{self.cause}: {self.sentence}'],
            'evidence': self.evidence[:EVIDENCE_SHOWN],
            'fix': [self.fix],
        }
        return [('' if i else name, value) for name, values in rows.items()
                for i, value in enumerate(values)]

    def text(self) -> str:
        """Return the rows as lines for a terminal."""
        return '\n'.join(f'  {name:<9} {value}' for name, value in self.rows())


def short_path(file: str) -> str:
    """Shorten a path to the part from the package on, or relative to the current directory."""
    for marker in ('/site-packages/', '/dist-packages/'):
        if marker in file:
            return file.split(marker, 1)[1]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith('..') else relative


def diagnose(iteration: int, rank: int, a: Sequence[Record],
             b: Sequence[Record]) -> Diagnosis | None:
    """Return the first difference of two streams; None when they agree."""
    difference = first_differing_record(a, b)
    if difference is None:
        return None
    context = Difference(difference, a, b)
    cause, evidence = find_cause(context)
    record = context.record
    operator, stack = record.name, record.stack
    if context.origin:
        operator, stack = context.origin[2].split('.')[0], (context.origin, )
    extra = tuple(f'{run}: {r.phase} {r.path or "(model)"} {r.name} {r.shapes}'
                  for run, stream, numbers in (('A', a, difference.extra_a),
                                               ('B', b, difference.extra_b))
                  for r in (stream[n] for n in numbers[:10]))
    return Diagnosis(
        iteration - _before_the_iteration(difference, a, b), rank, difference.kind, record.phase,
        record.path, operator, record.shapes, _differing(context), stack, cause.name,
        cause.why, cause.fix, tuple(evidence), _sample(context), context.mover(), extra,
        _number(difference.a, a), _number(difference.b, b))


def _before_the_iteration(difference: StreamDifference, a: Sequence[Record],
                          b: Sequence[Record]) -> bool:
    """Whether the difference is in a hook at the end of the iteration before."""
    number, stream = (difference.a, a) if difference.a is not None else (difference.b, b)
    return stream[number].phase == 'hook' and not BEGINS.search(stream[number].path) and any(
        record.phase == 'start' and record.name == BEFORE_ITERATION for record in stream[number:])


def _number(number: int | None, stream: Sequence[Record]) -> int | None:
    """Convert to a number among the records of the iteration, which follow those of samples."""
    samples = sum(record.sample is not None for record in stream)
    return None if number is None or number < samples else number - samples


def _differing(context: Difference) -> tuple[str, ...]:
    a, b, which = context.a, context.b, context.found.which
    if a is None or b is None:
        return ()
    if context.kind == 'argument' or a.is_state and not context.state_names():
        return tuple(context.arguments())
    if context.state_names():
        return tuple(context.state_names())
    if context.kind == 'input':
        what, pairs, names = 'input', zip(a.inputs, b.inputs), a.labels
    else:
        what, pairs, names = 'result', zip(a.outputs, b.outputs), ()
        if a.name == 'batch':
            names = a.labels
        elif a.phase == 'data':
            names = tuple(a.shapes.split('-> ')[-1].split())
    return tuple(f'{" ".join(filter(None, [what, str(i), *names[i:i + 1]]))}: {x} / {y}'
                 for i, (x, y) in enumerate(pairs) if i in which)


def _sample(context: Difference) -> str:
    """Describe the sample, with its index, and the number of the transform."""
    sample = context.record.sample
    if sample is None:
        return ''
    stream_a, stream_b = context.streams
    stream = stream_b if context.a is None else stream_a
    begin = next((r for r in stream if r.sample == sample and r.moment == 'begin'), None)
    (epoch, position), transform = sample, context.record.path.partition('/')[2]
    index = f'{begin.arguments}, ' if begin else ''
    return f'sample ({index}epoch {epoch}, position {position}), transform {transform}'
