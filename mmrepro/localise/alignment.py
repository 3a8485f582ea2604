"""Align two streams of records and find the first record that differs."""
from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ..fingerprint.divergence import differing_names
from ..fingerprint.records import SEPARATOR, Record

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
