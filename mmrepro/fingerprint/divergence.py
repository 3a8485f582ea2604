"""The first difference of two runs: iteration, rank, field, and the call where calls are recorded.

An iteration's fields are ordered by cause, see :data:`~mmrepro.fingerprint.schema.FIELDS`. Calls of
modules and operators are ordered among them by the phase in which the first differing call ran: a
call of the forward pass before the losses, one of the backward pass before the gradients, one of
the optimizer before its state. Values that only one run recorded are not compared.
"""
from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from ..util.text import listed, shorten
from .reader import RankLog
from .schema import BY_NAME, FIELDS, MODULES, STREAMS, StreamCall, call_of, is_number, value_of

ORDER = {name: number for number, name in enumerate(FIELDS)}
# phase of the first differing call -> the field before which it ran; other phases: the losses
COMES_BEFORE = {'backward': 'gradients', 'optimizer': 'optimizer'}

Ranks = Mapping[int, RankLog]
Validation = Mapping[str, Any]  # a line of one


class ComparedField(NamedTuple):
    """A field of an iteration in both runs."""
    field: str  # a key of ``FIELDS`` or ``STREAMS``
    a: Any  # value in run A; of a stream, that of the differing call, or the number of calls
    b: Any
    same: bool = False  # whether they agree
    names: tuple[str, ...] = ()  # differing losses or parameters; () where parts are not recorded
    call: str = ''  # of a stream, the differing call: 'output of neck forward (call 0)'
    phase: str = ''  # phase of that call

    @property
    def order(self) -> tuple[int, bool]:
        """Sorts fields from cause to effect."""
        if self.field in STREAMS:
            return ORDER[COMES_BEFORE.get(self.phase, 'losses')], False
        return ORDER.get(self.field, len(ORDER)), True

    def first_part(self) -> tuple[str, Any, Any]:
        """Return name and both values of the first part that differs."""
        if self.call or not self.names:
            return self.call or self.field, self.a, self.b
        if isinstance(self.a, Mapping):
            return (f'{self.field}.{self.names[0]}', self.a.get(self.names[0]),
                    self.b.get(self.names[0]))
        return f'{self.field} of {listed(self.names)}', self.a, self.b


class Divergence(NamedTuple):
    """The first iteration that differs on any rank."""
    iteration: int  # counted from 0
    ranks: dict[int, tuple[ComparedField, ...]]  # from cause to effect; () for a rank that agrees

    @property
    def rank(self) -> int:
        """Rank whose first difference is the nearest to the cause."""
        return min((fields[0].order, rank) for rank, fields in self.ranks.items() if fields)[1]

    @property
    def field(self) -> ComparedField:
        """First field that differs on :attr:`rank`."""
        return self.ranks[self.rank][0]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data: ``iteration``, ``field``, and the values of both runs."""
        field, first, second = self.field.first_part()
        return dict(iteration=self.iteration, field=field, first=first, second=second)

    def text(self) -> str:
        field, a, b = self.field.first_part()
        rank = f', rank {self.rank}' if self.rank else ''
        return f'iteration {self.iteration}{rank}, {field}: {_shown(a)} and {_shown(b)}'


def _shown(value: Any) -> str:
    if value is None:
        return 'nothing'
    if isinstance(value, str) and value.lstrip('-').startswith('0x') and is_number(value):
        return f'{float.fromhex(value)!r} ({value})'
    return shorten(str(value), 80)


def compare_steps(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[ComparedField]:
    """Compare all fields that an iteration has in both runs; from cause to effect."""
    compared = []
    for field in (*STREAMS, *FIELDS):
        first, second = value_of(a, field), value_of(b, field)
        if first is None or second is None:
            continue
        if first == second:
            shown = len(first) if field in STREAMS else first
            compared.append(ComparedField(field, shown, shown, same=True))
        elif field in STREAMS:
            compared.append(_first_call(field, first, second))
        else:
            parts = (first, second) if isinstance(first, Mapping) else tuple(
                value_of(step, f'{BY_NAME}.{field}') for step in (a, b))
            compared.append(ComparedField(field, first, second,
                                          names=differing_names(*parts) if all(parts) else ()))
    return sorted(compared, key=lambda field: field.order)


def differing_names(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys whose values differ; a missing value counts as None."""
    return tuple(name for name in {**a, **b} if a.get(name) != b.get(name))


def _first_call(stream: str, first: list[list[Any]], second: list[list[Any]]) -> ComparedField:
    """Return the first call with the same inputs and different results, else the first difference.

    The call of a module contains those of its submodules: of several calls with the same inputs and
    different results, the innermost one is named. Backward calls follow from the forward pass and
    are named only where the inputs of every forward call agree.
    """
    given: tuple[StreamCall, StreamCall] | None = None  # the first calls with different inputs
    made: tuple[StreamCall, StreamCall] | None = None  # calls with same inputs, different results
    for a, b in ((call_of(stream, entry_a), call_of(stream, entry_b))
                 for entry_a, entry_b in zip(first, second) if entry_a != entry_b):
        if a.identity != b.identity:
            if not made and not given:
                return ComparedField(stream, a.text(), b.text(), call=f'order of {stream}',
                                     phase=a.phase)
            break
        if a.input != b.input:
            given = given or (a, b)
        elif made is None and (not given or a.phase == 'forward') or (
                made and stream == MODULES and a.phase == made[0].phase
                and _inside(a.path, made[0].path)):
            made = a, b
        if stream != MODULES and (given or made):
            break
    calls = made or given
    if calls is not None:
        a, b = calls
        what = next(name for name in ('input', 'output', 'shapes')
                    if getattr(a, name) != getattr(b, name))
        return ComparedField(stream, getattr(a, what), getattr(b, what),
                             call=f'{what} of {a.text()}', phase=a.phase)
    extra = call_of(stream, max(first, second, key=len)[min(len(first), len(second))])
    return ComparedField(stream, len(first), len(second), call=f'number of {stream}',
                         phase=extra.phase)


def _inside(path: str, container: str) -> bool:
    return container == '(model)' != path or path.startswith(f'{container}.')


def divergences(a: Ranks, b: Ranks) -> Iterator[Divergence]:
    """Yield, in order, the iterations in which a rank of both runs differs."""
    steps = {rank: (a[rank].steps, b[rank].steps) for rank in sorted(a.keys() & b.keys())}
    for iteration in sorted(set().union(*(first.keys() & second.keys()
                                          for first, second in steps.values()))):
        ranks = {rank: tuple(field for field in compare_steps(first[iteration], second[iteration])
                             if not field.same) for rank, (first, second) in steps.items()
                 if iteration in first and iteration in second}
        if any(ranks.values()):
            yield Divergence(iteration, ranks)


def first_divergence(a: Ranks, b: Ranks) -> Divergence | None:
    """Return the first iteration that differs on any rank; None when all agree."""
    return next(divergences(a, b), None)


def paired_validations(a: Iterable[Validation], b: Iterable[Validation]
                       ) -> Iterator[tuple[Validation, Validation]]:
    """Yield the validations of two runs that belong together.

    A loop or a hook may validate several times after an iteration: the first is that of the first.
    """
    others: defaultdict[int, deque[Validation]] = defaultdict(deque)
    for val in b:
        others[val['iteration']].append(val)
    for val in a:
        same = others[val['iteration']]
        if same:
            yield val, same.popleft()


def first_differing_metric(a: Ranks, b: Ranks) -> Divergence | None:
    """Return the first differing metric of validations after the same number of iterations."""
    for rank in sorted(set(a) & set(b)):
        for ours, theirs in paired_validations(a[rank].vals, b[rank].vals):
            for name in dict.fromkeys([*ours['metrics'], *theirs['metrics']]):
                value, other = (val['metrics'].get(name) for val in (ours, theirs))
                if other != value:
                    return Divergence(ours['iteration'], {rank: (ComparedField(
                        f'metric {name} of the validation', value, other), )})
    return None


def compare_logs(a: Ranks, b: Ranks, end: int) -> Divergence | None:
    """Return the first difference before iteration ``end``: of an iteration, else of a metric."""
    a = {rank: log._replace(
        steps={iteration: step for iteration, step in log.steps.items() if iteration < end},
        vals=[val for val in log.vals if val['iteration'] <= end]) for rank, log in a.items()}
    return first_divergence(a, b) or first_differing_metric(a, b)


def difference_up_to(a: Ranks, b: Ranks, end: int) -> Divergence | None:
    """Return the first difference before iteration ``end``, else what run A has and B lacks."""
    return compare_logs(a, b, end) or _first_missing(a, b, end)


def _first_missing(a: Ranks, b: Ranks, end: int) -> Divergence | None:
    """Return the first iteration before ``end``, or field of one, that A has and B lacks."""
    steps = {rank: (log.steps, b[rank].steps if rank in b else {}) for rank, log in a.items()}
    missing = []
    for rank, (first, second) in steps.items():
        for i in first:
            if i < end:
                missing += [(i, rank, field) for field in (*STREAMS, *FIELDS)
                            if value_of(first[i], field) is not None
                            and value_of(second.get(i, {}), field) is None]
    if not missing:
        return None
    iteration, rank, name = min(missing, key=lambda place: place[:2])
    first, second = steps[rank]
    field = ComparedField(name, 'a value', None) if iteration in second else ComparedField(
        'number of iterations', sum(i < end for i in first), sum(i < end for i in second))
    return Divergence(iteration, {rank: (field, )})


def not_compared(a: Ranks, b: Ranks) -> list[str]:
    """Return notes on ranks and levels that only one of the runs recorded."""
    notes = []
    if set(a) != set(b):
        notes.append(f'A has fingerprints of ranks {sorted(a)}, B of {sorted(b)}: '
                     f'{sorted(set(a) & set(b))} are compared')
    levels = [sorted({str(start['level']) for log in run.values() for start in log.starts})
              for run in (a, b)]
    if levels[0] != levels[1]:
        notes.append(f'recorded at different levels, A {", ".join(levels[0])}, '
                     f'B {", ".join(levels[1])}: what both have is compared')
    return notes
