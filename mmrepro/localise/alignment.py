"""Put two streams of records side by side and find the first thing that differs."""
from __future__ import annotations

from typing import Any, Dict, Hashable, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from ..fingerprint.records import SEPARATOR, Record

__all__ = ['Difference', 'Pair', 'align', 'first_difference', 'matches']

# edits after which two sequences count as unrelated; memory grows with its square
MAX_EDITS = 600


class Pair(NamedTuple):
    """A record of each side, or None where a side has nothing like it; with their numbers."""
    a: Optional[int]
    b: Optional[int]


class Difference(NamedTuple):
    """The first thing that differs.

    Attributes:
        kind: 'output' (same inputs, other result), 'argument' (another value that is no tensor),
            'input' (a tensor differs that no recorded operator made), 'generator' (same inputs,
            drawn from a generator in another state), 'extra' or 'missing' (operators that only
            side B, or only side A, ran), 'replaced' (A and B ran something else).
        a, b: number of the record on each side, None where there is none.
        which: numbers of the inputs or outputs that differ; of a state, their names.
        extra_a, extra_b: numbers of the records that the other side lacks, up to this place.
        moved: for 'generator': the pair in whose course the generator parted.
    """
    kind: str
    a: Optional[int]
    b: Optional[int]
    which: Tuple[Any, ...] = ()
    extra_a: Tuple[int, ...] = ()
    extra_b: Tuple[int, ...] = ()
    moved: Optional[Pair] = None


def matches(a: Sequence[Hashable], b: Sequence[Hashable]) -> List[Tuple[int, int]]:
    """Pairs of equal elements of a longest common subsequence, in order.

    E. W. Myers, "An O(ND) difference algorithm and its variations", 1986: the greedy variant.
    Sequences that need more than :data:`MAX_EDITS` edits are aligned as far as that reaches.
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    head = [(i, i) for i in range(start)]
    if start == min(len(a), len(b)):
        return head
    tail = [(start + i, start + j) for i, j in _middle(a[start:], b[start:])]
    return head + tail


def _middle(a: Sequence[Hashable], b: Sequence[Hashable]) -> List[Tuple[int, int]]:
    reached = {1: 0}  # diagonal -> furthest place in a
    history = []
    for edits in range(min(len(a) + len(b), MAX_EDITS) + 1):
        history.append(dict(reached))
        for k in range(-edits, edits + 1, 2):
            x = _start(reached, edits, k)
            while x < len(a) and x - k < len(b) and a[x] == b[x - k]:
                x += 1
            reached[k] = x
            if x >= len(a) and x - k >= len(b):
                return _back(history, x, k)
    inside = [k for k in range(-edits, edits + 1, 2)
              if reached[k] <= len(a) and 0 <= reached[k] - k <= len(b)]
    best = max(inside, key=lambda k: 2 * reached[k] - k)
    return _back(history, reached[best], best)


def _start(reached: Dict[int, int], edits: int, k: int) -> int:
    """Where the diagonal ``k`` is entered: from above (an element of b) or from the left."""
    if k == -edits or (k != edits and reached[k - 1] < reached[k + 1]):
        return reached[k + 1]
    return reached[k - 1] + 1


def _back(history: List[Dict[int, int]], x: int, k: int) -> List[Tuple[int, int]]:
    """The pairs of equal elements on the way to place ``x`` of diagonal ``k``."""
    pairs = []
    for edits in range(len(history) - 1, -1, -1):
        reached = history[edits]
        start = _start(reached, edits, k)
        pairs += [(i, i - k) for i in range(x - 1, start - 1, -1)]
        if edits:
            down = start == reached.get(k + 1, -1) and (
                k == -edits or (k != edits and reached[k - 1] < reached[k + 1]))
            x, k = (start, k + 1) if down else (start - 1, k - 1)
    return pairs[::-1]


def align(a: Sequence[Record], b: Sequence[Record]) -> Iterator[Pair]:
    """All records of both streams in order, side by side; what one side lacks comes alone."""
    i = j = 0
    for x, y in [*matches([r.key for r in a], [r.key for r in b]), (len(a), len(b))]:
        yield from (Pair(n, None) for n in range(i, x))
        yield from (Pair(None, n) for n in range(j, y))
        if x < len(a) or y < len(b):
            yield Pair(x, y)
        i, j = x + 1, y + 1


def first_difference(a: Sequence[Record], b: Sequence[Record]) -> Optional[Difference]:
    """The first record whose inputs agree and whose result differs, or what comes before it.

    Operators that one side alone runs are named when their result is what differs later, or when
    nothing else differs.
    """
    extra_a: List[int] = []
    extra_b: List[int] = []
    pairs: List[Pair] = []
    for pair in align(a, b):
        if pair.b is None:
            extra_a += [] if a[pair.a].is_state else [pair.a]
        elif pair.a is None:
            extra_b += [] if b[pair.b].is_state else [pair.b]
        else:
            kind, which = _compare(a[pair.a], b[pair.b])
            if kind:
                return _explained(a, b, pair, kind, which, tuple(extra_a), tuple(extra_b), pairs)
            pairs.append(pair)
    if not extra_a and not extra_b:
        return None
    return _structural(a, b, tuple(extra_a), tuple(extra_b), pairs)


def _compare(a: Record, b: Record) -> Tuple[str, Tuple[Any, ...]]:
    if a.is_state:
        return _compare_states(a, b)
    which = tuple(i for i, (x, y) in enumerate(zip(a.inputs, b.inputs)) if x != y and x and y)
    if which:
        return 'input', which
    if a.arguments != b.arguments:
        return 'argument', ()
    which = tuple(i for i, (x, y) in enumerate(zip(a.outputs, b.outputs)) if x != y and x and y)
    return ('output', which) if which else ('', ())


def _compare_states(a: Record, b: Record) -> Tuple[str, Tuple[Any, ...]]:
    """Names of tensors and numbers that differ, or that one side lacks."""
    tensors = _differing(dict(zip(a.labels, a.outputs)), dict(zip(b.labels, b.outputs)))
    numbers = _differing(*(dict.fromkeys(r.arguments.split(SEPARATOR)) for r in (a, b)))
    if tensors or numbers:
        # a number such as the learning rate is the reason of the tensor, never the other way round
        return ('argument', numbers) if numbers else ('output', tensors)
    return '', ()


def _differing(a: Dict[str, Any], b: Dict[str, Any]) -> Tuple[str, ...]:
    missing = object()
    return tuple(name for name in {**a, **b} if a.get(name, missing) != b.get(name, missing))


def _structural(a: Sequence[Record], b: Sequence[Record], extra_a: Tuple[int, ...],
                extra_b: Tuple[int, ...], pairs: Sequence[Pair]) -> Difference:
    """The first of the extra records; two of them only where one stands for the other."""
    first_a, first_b = (extra[0] if extra else None for extra in (extra_a, extra_b))
    if first_a is not None and first_b is not None:
        # how many pairs went before tells which came first
        before_a = sum(pair.a < first_a for pair in pairs)
        before_b = sum(pair.b < first_b for pair in pairs)
        # in one place: the other side does the same later, on other shapes
        later_a = before_a == before_b and _step(a[first_a]) in {_step(b[n]) for n in extra_b}
        later_b = before_a == before_b and _step(b[first_b]) in {_step(a[n]) for n in extra_a}
        if before_b < before_a or later_a and not later_b:
            first_a = None
        elif before_a < before_b or later_b and not later_a:
            first_b = None
    kind = 'extra' if first_a is None else 'missing' if first_b is None else 'replaced'
    return Difference(kind, first_a, first_b, extra_a=extra_a, extra_b=extra_b)


def _step(record: Record) -> Tuple[str, str, str]:
    return record.phase, record.path, record.name


def _explained(a: Sequence[Record], b: Sequence[Record], pair: Pair, kind: str,
               which: Tuple[int, ...], extra_a: Tuple[int, ...], extra_b: Tuple[int, ...],
               pairs: Sequence[Pair]) -> Difference:
    found = Difference(kind, pair.a, pair.b, which, extra_a, extra_b)
    made_a = _makers(a, _of_sample(a, extra_a, a[pair.a]),
                     _differing_digests(a[pair.a], kind, which))
    made_b = _makers(b, _of_sample(b, extra_b, b[pair.b]),
                     _differing_digests(b[pair.b], kind, which))
    if made_a or made_b:
        # the operators that one side lacks made what differs: they are what came first
        return _structural(a, b, made_a, made_b, pairs)
    drawn = a[pair.a].drew and kind == 'output'
    if drawn and _drawn_from(a[pair.a], a[pair.a]) != _drawn_from(b[pair.b], a[pair.a]):
        return found._replace(kind='generator', moved=_parting(a, b, pair))
    return found


def _differing_digests(record: Record, kind: str, which: Tuple[Any, ...]) -> Set[str]:
    """Digests of what came into a record, or is the state there, and differs."""
    if kind == 'input':
        return {record.inputs[i] for i in which}
    if record.is_state and kind == 'output':
        return {digest for name, digest in zip(record.labels, record.outputs) if name in which}
    return set()


def _of_sample(stream: Sequence[Record], extra: Tuple[int, ...],
               record: Record) -> Tuple[int, ...]:
    """Of the extra records those that can have made what a transform was given: of its sample.

    Samples have much in common, heights and file names among it; one does not make another.
    """
    sample = record.path.split('/')[0]
    if not sample.startswith('sample '):
        return extra
    return tuple(n for n in extra if stream[n].path.split('/')[0] == sample)


def _makers(stream: Sequence[Record], extra: Tuple[int, ...],
            wanted: Set[str]) -> Tuple[int, ...]:
    """Those of the extra records that made what is wanted, and those that made their inputs."""
    made = []
    for number in reversed(extra):
        if wanted & set(stream[number].outputs):
            made.append(number)
            wanted = wanted | set(filter(None, stream[number].inputs))
    return tuple(reversed(made))


def _parting(a: Sequence[Record], b: Sequence[Record], pair: Pair) -> Optional[Pair]:
    """The last pair before ``pair`` at whose start the generators still agreed."""
    last = None
    for earlier in align(a[:pair.a], b[:pair.b]):
        if earlier.a is None or earlier.b is None or not a[earlier.a].generators:
            continue
        if _drawn_from(a[earlier.a], a[pair.a]) == _drawn_from(b[earlier.b], a[pair.a]):
            last = earlier
    return last


def _drawn_from(record: Record, drawing: Record) -> Tuple[str, ...]:
    """States of the generators that ``drawing`` draws from: operators know torch's alone."""
    if drawing.phase == 'data':
        return record.generators
    return record.generators[:1] + record.generators[3:]
