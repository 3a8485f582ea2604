"""Align two streams of records, find the first record that differs, and what lies around it."""
from __future__ import annotations

import itertools
import os
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ..fingerprint import records
from ..fingerprint.divergence import differing_names
from ..fingerprint.generator_states import NAMES, is_in
from ..fingerprint.records import (
    ATTRIBUTE,
    GLOBAL,
    SEPARATOR,
    Frame,
    Phase,
    Record,
    useful_calls,
)

NO_EVIDENCE = ('resumed', 'validated')  # attributes that are not shown
# edits after which two sequences count as unrelated; memory grows with its square
MAX_EDITS = 600

Kind = Literal['output', 'argument', 'input', 'generator', 'extra', 'missing', 'replaced']
KINDS: dict[Kind, str] = {  # of a difference, in words
    'output': 'the inputs agree, the result differs',
    'argument': 'the tensors agree, an argument differs',
    'input': 'an input tensor differs, and no recorded operator computed it',
    'generator': 'the inputs agree, the state of the random generator differs',
    'extra': 'only run B executes this',
    'missing': 'only run A executes this',
    'replaced': 'runs A and B execute different operators here',
}


class Pair(NamedTuple):
    """Numbers of two records of the same step; None where a run has no such step."""
    a: Any
    b: Any


class StreamDifference(NamedTuple):
    """The first difference of two streams."""
    kind: Kind
    a: Any  # number of the record in run A; None without one
    b: Any
    which: tuple[Any, ...] = ()  # numbers of differing inputs or outputs; names for a state
    extra_a: tuple[int, ...] = ()  # records that run B lacks, up to the difference
    extra_b: tuple[int, ...] = ()
    moved: Pair | None = None  # 'generator': the last pair at whose start generators agreed


def matches(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    """Return the pairs of equal elements of a longest common subsequence, in order.

    E. W. Myers, "An O(ND) difference algorithm and its variations", 1986: the greedy variant.
    Sequences that need more than :data:`MAX_EDITS` edits are aligned as far as these reach.
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    rest = _greedy(a[start:], b[start:]) if start < min(len(a), len(b)) else []
    return [*((i, i) for i in range(start)), *((start + i, start + j) for i, j in rest)]


def _greedy(a: Sequence[Hashable], b: Sequence[Hashable]) -> list[tuple[int, int]]:
    # diagonal -> furthest position in a, and the equal stretches on the way there, last first
    reached: dict[int, tuple[int, Any]] = {1: (0, None)}
    for edits in range(min(len(a) + len(b), MAX_EDITS) + 1):
        for k in range(-edits, edits + 1, 2):
            if k == -edits or (k != edits and reached[k - 1][0] < reached[k + 1][0]):
                start, stretches = reached[k + 1]  # takes an element of b
            else:
                start, stretches = reached[k - 1]  # drops one of a
                start += 1
            x = start
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            reached[k] = x, (start, x, k, stretches)
            if x >= len(a) and x - k >= len(b):
                return _pairs(reached[k][1])
    inside = [k for k in range(-edits, edits + 1, 2)
              if reached[k][0] <= len(a) and 0 <= reached[k][0] - k <= len(b)]
    return _pairs(reached[max(inside, key=lambda k: 2 * reached[k][0] - k)][1])


def _pairs(stretches: Any) -> list[tuple[int, int]]:
    pairs = []
    while stretches:
        start, end, k, stretches = stretches
        pairs += [(i, i - k) for i in range(end - 1, start - 1, -1)]
    return pairs[::-1]


def align(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Pair]:
    """Yield all records of both streams in order; a step of one run only comes alone."""
    i = j = 0
    for x, y in [*matches([r.key for r in a], [r.key for r in b]), (len(a), len(b))]:
        yield from (Pair(n, None) for n in range(i, x))
        yield from (Pair(None, n) for n in range(j, y))
        if x < len(a) or y < len(b):
            yield Pair(x, y)
        i, j = x + 1, y + 1


def first_differing_record(a: Sequence[Record], b: Sequence[Record]) -> StreamDifference | None:
    """Return the first record whose inputs agree and whose result differs, or its cause.

    Operators that only one run executed are named when they computed a tensor that differs later,
    or when nothing else differs.
    """
    extra_a: list[int] = []
    extra_b: list[int] = []
    pairs: list[Pair] = []
    for pair in align(a, b):
        if pair.b is None:
            extra_a += [] if a[pair.a].is_state else [pair.a]
        elif pair.a is None:
            extra_b += [] if b[pair.b].is_state else [pair.b]
        else:
            found = _compare(a[pair.a], b[pair.b])
            if found is not None:
                break
            pairs.append(pair)
    else:
        return _structural(a, b, extra_a, extra_b, pairs) if extra_a or extra_b else None
    kind, which = found
    made_a = _makers(a, extra_a, a[pair.a], kind, which)
    made_b = _makers(b, extra_b, b[pair.b], kind, which)
    if made_a or made_b:
        return _structural(a, b, made_a, made_b, pairs)
    difference = StreamDifference(kind, *pair, which, tuple(extra_a), tuple(extra_b))
    drawing = a[pair.a]
    if kind == 'output' and drawing.drew and (
            _drawn_from(drawing, drawing) != _drawn_from(b[pair.b], drawing)):
        return difference._replace(kind='generator', moved=_last_agreeing(a, b, pair))
    return difference


def _compare(a: Record, b: Record) -> tuple[Kind, tuple[Any, ...]] | None:
    """Return kind and ``which`` of the difference of two records; None when they agree."""
    if a.is_state:
        # a number such as the learning rate explains the tensors, never the other way round
        numbers = differing_names(*(dict.fromkeys(r.arguments.split(SEPARATOR), 'has')
                                    for r in (a, b)))
        tensors = differing_names(*(dict(zip(r.labels, r.outputs)) for r in (a, b)))
        if numbers:
            return 'argument', numbers
        return ('output', tensors) if tensors else None
    which = _differing_numbers(a.inputs, b.inputs)
    if which:
        return 'input', which
    if a.arguments != b.arguments:
        return 'argument', ()
    which = _differing_numbers(a.outputs, b.outputs)
    return ('output', which) if which else None


def _differing_numbers(a: Sequence[str], b: Sequence[str]) -> tuple[int, ...]:
    return tuple(i for i, (x, y) in enumerate(zip(a, b)) if x != y and x and y)


def _structural(a: Sequence[Record], b: Sequence[Record], extra_a: Sequence[int],
                extra_b: Sequence[int], pairs: Sequence[Pair]) -> StreamDifference:
    """Return the first extra record; of both runs where one replaces the other."""
    first_a, first_b = (extra[0] if extra else None for extra in (extra_a, extra_b))
    if first_a is not None and first_b is not None:
        # the number of pairs before each tells which came first
        before_a = sum(pair.a < first_a for pair in pairs)
        before_b = sum(pair.b < first_b for pair in pairs)
        # at the same point: the other run executes the same later, on other shapes
        later_a = before_a == before_b and a[first_a].site in {b[n].site for n in extra_b}
        later_b = before_a == before_b and b[first_b].site in {a[n].site for n in extra_a}
        if before_b < before_a or later_a and not later_b:
            first_a = None
        elif before_a < before_b or later_b and not later_a:
            first_b = None
    kind: Kind = 'replaced'
    if first_a is None:
        kind = 'extra'
    elif first_b is None:
        kind = 'missing'
    return StreamDifference(kind, first_a, first_b, (), tuple(extra_a), tuple(extra_b))


def _makers(stream: Sequence[Record], extra: Sequence[int], record: Record, kind: Kind,
            which: tuple[Any, ...]) -> list[int]:
    """Return the extra records that computed what differs in ``record``, directly or not."""
    if kind == 'input':
        wanted = {record.inputs[i] for i in which}
    elif record.is_state and kind == 'output':
        wanted = {digest for name, digest in zip(record.labels, record.outputs) if name in which}
    else:
        return []
    # samples have heights, file names and more in common: one sample does not make another
    made = []
    for number in reversed(extra):
        if wanted & set(stream[number].outputs) and (
                record.sample is None or record.sample == stream[number].sample):
            made.append(number)
            wanted = wanted | set(filter(None, stream[number].inputs))
    return made[::-1]


def _last_agreeing(a: Sequence[Record], b: Sequence[Record], pair: Pair) -> Pair | None:
    """Return the last pair before ``pair`` at whose start the generators still agreed."""
    last = None
    for earlier in align(a[:pair.a], b[:pair.b]):
        if earlier.a is None or earlier.b is None or not a[earlier.a].generators:
            continue
        if _drawn_from(a[earlier.a], a[pair.a]) == _drawn_from(b[earlier.b], a[pair.a]):
            last = earlier
    return last


def _drawn_from(record: Record, drawing: Record) -> tuple[str, ...]:
    """Return states of the generators that ``drawing`` may draw from; operators use torch's."""
    if drawing.phase == 'data':
        return record.generators
    return record.generators[:1] + record.generators[3:]


class Difference:
    """A difference, with everything that was recorded around it."""

    def __init__(self, found: StreamDifference, stream_a: Sequence[Record],
                 stream_b: Sequence[Record]) -> None:
        self.found, self.kind = found, found.kind
        self.streams = stream_a, stream_b
        # its records in run A and run B; None where a run has none
        self.a: Any = None if found.a is None else stream_a[found.a]
        self.b: Any = None if found.b is None else stream_b[found.b]
        self.record: Record = next(record for record in (self.a, self.b) if record is not None)
        self.phase: Phase = self.record.phase
        self._attributes = [_named(text for record in stream
                                   if record.name == records.ATTRIBUTES and self._concerns(record)
                                   for text in record.labels) for stream in self.streams]
        self._own = [_named(record.own if record else ()) for record in (self.a, self.b)]

    def _concerns(self, owner: Record) -> bool:
        """Whether attributes and globals may reach this difference.

        Those of the process and of the model always, of optimizer and sampler where they differ,
        others where their file is on the stack.
        """
        kind = owner.path.partition(':')[0]
        return kind in ('', 'model') or kind == ('sampler' if self.in_order else self.phase) or (
            owner.stack[0][0] in {call[0] for call in self.record.stack})

    def named(self, name: str) -> list[Record]:
        """Return the records of both runs that have this name."""
        return [record for stream in self.streams for record in stream if record.name == name]

    @property
    def in_order(self) -> bool:
        """Whether the sampler returned another index."""
        return self.record.moment == 'begin'

    @property
    def origin(self) -> Frame | None:
        """The code that makes what differs; None for that of the record.

        A data list differs in the first transform that sees it, an order in the dataset.
        """
        if self.in_order:
            return next((record.stack[0] for record in self.named(records.SAMPLER)), None)
        begin = self.record.path.rpartition('/')[0] + '/begin'
        return next((record.stack[0] for stream in self.streams for record in stream
                     if self.in_data_list and record.path == begin), None)

    def while_building(self, source: str) -> list[str]:
        """Return calls of ``source`` by code of the user when the dataset was built."""
        return [call for record in self.named(records.DATASET) for call in record.calls
                if call.startswith(source)]

    @property
    def from_outside(self) -> bool:
        """Whether the difference is a value that no operator computed."""
        return self.kind in ('input', 'argument')

    @property
    def different_steps(self) -> bool:
        """Whether the runs executed different operators."""
        return self.kind in ('extra', 'missing', 'replaced')

    @property
    def in_transform(self) -> bool:
        return self.record.moment.isdecimal()

    @property
    def in_data_list(self) -> bool:
        """Whether the input of the first transform, an entry of the data list, differs."""
        return self.kind == 'input' and self.record.moment == '0'

    def calls(self, source: str) -> list[str]:
        """Return calls of ``source`` right before the record or, for a transform, during it."""
        return [call for record in (self.a, self.b) if record is not None
                for call in record.calls if call.startswith(source)]

    def calls_anywhere(self, source: str) -> list[str]:
        """Return calls of ``source`` at any time of the recording."""
        records = itertools.chain.from_iterable(self.streams)
        return list(dict.fromkeys(call for record in records for call in record.calls
                                  if call.startswith(source)))

    @property
    def reordered(self) -> bool:
        """Whether both runs use the same tensors here, in another order."""
        if self.kind != 'input':
            return False
        if sorted(self.a.inputs) == sorted(self.b.inputs):
            return True
        differing = [{record.inputs[i] for i in self.found.which} for record in (self.a, self.b)]
        # each run uses all of them one after the other, in the same line
        later = [{digest for other in stream[number:] if other.site == record.site
                  and useful_calls(other.stack)[:1] == useful_calls(record.stack)[:1]
                  for digest in other.inputs}
                 for stream, number, record in zip(
                     self.streams, (self.found.a, self.found.b), (self.a, self.b))]
        return differing[0] <= later[1] and differing[1] <= later[0]

    def earlier_calls(self, source: str) -> list[str]:
        """Return calls of ``source`` earlier in the function that passes the value on.

        The function is found by its file and name, among the records of the same module and phase.
        """
        calls = []
        for stream, number in zip(self.streams, (self.found.a, self.found.b)):
            record = stream[number]
            for file, _, function in useful_calls(record.stack)[:1]:
                calls += [call for earlier in stream[:number + 1]
                          if (earlier.phase, earlier.path) == (record.phase, record.path)
                          for call in earlier.calls
                          if call.startswith(source) and is_in(call, file, function)]
        return list(dict.fromkeys(calls))

    def differs(self, attribute: str) -> bool:
        a, b = self._attributes
        return a.get(attribute) != b.get(attribute)

    def attributes(self) -> list[str]:
        """Return differing settings and attributes: ``name: value in A / value in B``.

        Those of the module that the record belongs to come first.
        """
        rows = sorted(_differing(*self._attributes), key=lambda row: -len(
            os.path.commonprefix([row[0], self.record.path])))
        return [f'{name}: {a} / {b}' for name, a, b in rows
                if name not in NO_EVIDENCE]

    def module_generators(self) -> list[str]:
        """Return generators of the module itself that differ, as in :meth:`attributes`."""
        return [text for text in self.attributes()
                if text.startswith(f'{self.record.path}.') and ': generator ' in text]

    def transform_generators(self) -> list[str]:
        """Return generators of the transform whose states differ."""
        return [f'{name}: state {a} / {b}' for name, a, b in _differing(*self._own)
                if not name.startswith((ATTRIBUTE, GLOBAL))]

    def transform_values(self) -> list[str]:
        """Return plain values that the transform keeps and that differ."""
        return [f'{name}: {a} / {b}' for name, a, b in _differing(*self._own)
                if name.startswith((ATTRIBUTE, GLOBAL))]

    def generators(self) -> list[str]:
        """Return names of global generators whose state differs at this record."""
        if self.a is None or self.b is None:
            return []
        return [name for name, x, y in zip(NAMES, self.a.generators, self.b.generators) if x != y]

    def arguments(self) -> list[str]:
        """Return differing arguments: ``name=value in A / value in B``."""
        if self.a is None or self.b is None:
            return []
        a, b = (record.arguments.split(SEPARATOR) for record in (self.a, self.b))
        if self.record.is_state:
            return [f'{name}={x} / {y}' for name, x, y in _differing(_named(a), _named(b))]
        return [f'{x} / {y.split("=", 1)[-1]}' for x, y in zip(a, b) if x != y]

    def state_names(self) -> list[str]:
        """Return the names of the differing tensors of a state."""
        return [name for name in self.found.which if isinstance(name, str)]

    def labels(self) -> list[str]:
        """Return names of the inputs that differ."""
        return [self.record.labels[i] for i in self.found.which
                if isinstance(i, int) and i < len(self.record.labels) and self.record.labels[i]]

    def outside_sources(self) -> list[str]:
        """Return sources outside of torch that may have brought in a different value."""
        sources = [*self.arguments(), *(f'attribute {text}' for text in self.attributes()),
                   *self.calls('')]
        if self.generators():
            sources.append('global generators in different states: '
                           f'{", ".join(self.generators())}')
        return sources

    def mover(self) -> str:
        """Return the record that advanced a generator in one run only, or ''."""
        moved = self.found.moved
        if moved is None:
            return ''
        last, mover = self.streams[0][moved.a], self.streams[0][moved.a + 1]
        if last.phase == 'data' and last.name != 'batch':
            mover = last  # a transform is recorded when it ends, with the states before it began
        for stream, start, extra in ((self.streams[1], moved.b, self.found.extra_b),
                                     (self.streams[0], moved.a, self.found.extra_a)):
            mover = next((stream[n] for n in extra if n >= start and stream[n].drew), mover)
        return ' '.join(filter(None, mover.site))


def _named(texts: Iterable[str]) -> dict[str, str]:
    return dict(text.split('=', 1) for text in texts if '=' in text)


def _differing(a: dict[str, str], b: dict[str, str]) -> list[tuple[Any, ...]]:
    """Return name, value in A and value in B of what differs."""
    return [(name, a.get(name), b.get(name)) for name in differing_names(a, b)]
