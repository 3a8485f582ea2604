"""Two runs: what they were made of, where they part, and how the difference grows."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..fingerprint.reader import RankLog
from .run_view import RunView, number

__all__ = ['Comparison', 'First', 'Field', 'compare_runs']

MAX_NAMES = 3  # parameters that a first difference names; the rest is counted

# Fields of an iteration in the order in which they come into being: the first that differs is the
# nearest to the cause.
ORDER = ('batch.positions', 'batch.indices', 'batch.data', 'losses', 'lr', 'gradients',
         'parameters', 'buffers', 'optimizer')
MEANING = {
    'batch.positions': 'the order of samples',
    'batch.indices': 'which samples are in the batch',
    'batch.data': 'what is in the batch: reading, augmentation, collation',
    'losses': 'the forward pass: model, batch or weights',
    'lr': 'the schedule or the optimizer',
    'gradients': 'the backward pass, the sum over ranks, or weights that something changed in '
                 'between',
    'parameters': 'the optimizer step',
    'buffers': 'running statistics, counters',
    'optimizer': 'the state of the optimizer',
    'scalars': 'what MMEngine logged',
}


class Field(NamedTuple):
    """One field of one iteration in both runs. ``names`` are the parts that differ."""
    field: str
    a: str
    b: str
    same: bool
    names: Tuple[str, ...] = ()


@dataclass(frozen=True)
class First:
    """The first iteration that differs, and all of its fields, in order."""
    iteration: int
    epoch: Optional[int]
    rank: int
    fields: List[Field]
    module: str = ''

    @property
    def field(self) -> Field:
        return next(field for field in self.fields if not field.same)

    def sentence(self) -> str:
        one = self.field
        names = f' ({", ".join(one.names[:MAX_NAMES])}' + (
            f' and {len(one.names) - MAX_NAMES} more)' if len(one.names) > MAX_NAMES else ')'
        ) if one.names else ''
        kind = one.field if one.field in MEANING else one.field.partition('.')[0]
        rank = f', rank {self.rank}' if self.rank else ''
        return (f'iteration {self.iteration}{rank}: {one.field}{names} differs first: '
                f'{MEANING.get(kind, kind)}')


@dataclass
class Comparison:
    """All that the reports show.

    Attributes:
        exact: bits were compared (fingerprints); otherwise what MMEngine logged.
        common: iterations that both have.
        only: iterations that one has and the other lacks.
        losses: loss -> (iterations, values of A, values of B).
        vals: metric -> (steps, values of A, values of B).
        parted: parameter -> first iteration after which its bits differ, None: never; in the order
            of the model. Empty below level 'parameter'.
        norms: (iterations, parameters, relative difference of norms per iteration and parameter);
            0 where the bits agree.
        distances: checkpoint or iteration -> see ``weights``.
    """
    a: RunView
    b: RunView
    exact: bool
    common: List[int]
    only: Tuple[List[int], List[int]]
    first: Optional[First]
    differing: int
    manifest: List[Any] = field(default_factory=list)
    losses: Dict[str, Tuple[List[int], List[float], List[float]]] = field(default_factory=dict)
    vals: Dict[str, Tuple[List[int], List[float], List[float]]] = field(default_factory=dict)
    parted: Dict[str, Optional[int]] = field(default_factory=dict)
    norms: Tuple[List[int], List[str], List[List[float]]] = ((), (), ())
    weights: List[Any] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Nothing that both runs have differs."""
        return bool(self.common) and self.first is None and not any(
            value.distance for value in self.weights if value.distance is not None)

    def verdict(self) -> str:
        if not self.common:
            return 'NOTHING TO COMPARE: the runs have no iteration in common'
        span = f'{len(self.common)} iterations, {self.common[0]} to {self.common[-1]}'
        if self.first is not None:
            return f'DIFFERENT: {self.first.sentence()}'
        if not self.equal:
            return f'DIFFERENT: checkpoints differ, although {span} do not'
        if self.exact:
            return f'SAME BITS: {span}'
        return (f'SAME LOGS: {span} as MMEngine logged them; bits were not recorded '
                '(mmrepro train --fingerprint records them)')


def compare_runs(a: RunView, b: RunView) -> Comparison:
    """Compare what both runs have: fingerprints if both have them, else MMEngine's logs."""
    exact = bool(a.ranks and b.ranks)
    notes = [f'A: {note}' for note in a.notes] + [f'B: {note}' for note in b.notes]
    if not exact:
        notes.append(_why_not_exact(a, b))
    steps = ((a.log.steps, b.log.steps) if exact else (a.scalars, b.scalars))
    common = sorted(set(steps[0]) & set(steps[1]))
    only = tuple(sorted(set(one) - set(other)) for one, other in (steps, steps[::-1]))
    if exact:
        first, differing = _first_exact(a, b, notes)
    else:
        first, differing = _first_logged(a, b, common)
    comparison = Comparison(a, b, exact, common, only, first, differing, notes=notes)
    notes += _lengths(comparison)
    comparison.losses = _columns(a.losses(exact), b.losses(exact))
    comparison.vals = _columns(a.vals(exact), b.vals(exact))
    if exact:
        comparison.parted = _parted(a.log, b.log, common)
        comparison.norms = _norms(a, b, common)
    return comparison


def _why_not_exact(a: RunView, b: RunView) -> str:
    lacking = ' and '.join(name for name, run in (('A', a), ('B', b)) if not run.ranks)
    return (f'{lacking}: no fingerprints, so the logs of MMEngine are compared. They hold '
            'losses of the logged iterations only, means over the last ones, and no gradients or '
            'weights: the iteration named is the first logged one that shows the difference')


def _lengths(found: Comparison) -> Iterator[str]:
    for name, extra, other in (('A', found.only[0], 'B'), ('B', found.only[1], 'A')):
        if extra:
            yield (f'{len(extra)} iterations of {name} are not in {other} '
                   f'({extra[0]} to {extra[-1]}): not compared')


# ---------------------------------------------------------------------------- first difference


def _first_exact(a: RunView, b: RunView, notes: List[str]) -> Tuple[Optional[First], int]:
    ranks = sorted(set(a.ranks) & set(b.ranks))
    if set(a.ranks) != set(b.ranks):
        notes.append(f'A has fingerprints of ranks {sorted(a.ranks)}, B of {sorted(b.ranks)}: '
                     f'{ranks} are compared')
    levels = [{start.get('level') for start in run.log.starts} for run in (a, b)]
    if levels[0] != levels[1]:
        notes.append(f'recorded at other levels, A {_words(levels[0])}, B {_words(levels[1])}: '
                     'what both have is compared')
    differing = {rank: [i for i in sorted(set(a.ranks[rank].steps) & set(b.ranks[rank].steps))
                        if not _same(a.ranks[rank].steps[i], b.ranks[rank].steps[i])]
                 for rank in ranks}
    firsts = [(found[0], rank) for rank, found in differing.items() if found]
    if not firsts:
        return None, 0
    candidates = [First(iteration, a.ranks[rank].steps[iteration].get('epoch'), rank,
                        _fields(a.ranks[rank].steps[iteration], b.ranks[rank].steps[iteration]),
                        _module(a.ranks[rank].steps[iteration], b.ranks[rank].steps[iteration]))
                  for iteration, rank in firsts if iteration == min(firsts)[0]]
    # of several ranks, the one whose difference is the nearest to the cause
    nearest = min(candidates, key=lambda first: ORDER.index(first.field.field))
    return nearest, len({i for found in differing.values() for i in found})


def _words(levels: Any) -> str:
    return ', '.join(sorted(map(str, levels)))


def _same(a: Dict[str, Any], b: Dict[str, Any]) -> bool:
    return all(field.same for field in _fields(a, b))


def _get(record: Dict[str, Any], path: str) -> Any:
    for key in path.split('.'):
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _fields(a: Dict[str, Any], b: Dict[str, Any]) -> List[Field]:
    """All fields that both records have, in the order of ``ORDER``."""
    found = []
    for path in ORDER:
        one, other = _get(a, path), _get(b, path)
        if one is None or other is None:
            continue
        names: Tuple[str, ...] = ()
        if one != other:
            parts = ((_get(a, f'by_name.{path}'), _get(b, f'by_name.{path}'))
                     if path in ('gradients', 'parameters', 'buffers', 'optimizer')
                     else (one, other))
            if all(isinstance(part, dict) for part in parts):
                names = tuple(name for name in {**parts[0], **parts[1]}
                              if parts[0].get(name) != parts[1].get(name))
        found.append(Field(path, _show(one, names), _show(other, names), one == other, names))
    return found


def _show(value: Any, names: Tuple[str, ...]) -> str:
    if isinstance(value, dict):
        picked = {name: value.get(name) for name in names} if names else value
        return ', '.join(f'{name}={_decimal(part)}' for name, part in list(picked.items())[:3])
    return str(value) if len(str(value)) <= 60 else f'{str(value)[:57]}...'


def _decimal(value: Any) -> str:
    if isinstance(value, list):
        return ' '.join(map(_decimal, value[:2]))
    if value is None:
        return '(missing)'
    if isinstance(value, str) and not value.lstrip('-').startswith(('0x', 'inf', 'nan')):
        return value
    return f'{number(value):.9g}'


def _module(a: Dict[str, Any], b: Dict[str, Any]) -> str:
    """With level 'module': the first call whose inputs agree and whose outputs do not."""
    one, other = a.get('modules') or (), b.get('modules') or ()
    first, found = '', None
    for mine, theirs in zip(one, other):
        if mine[:3] != theirs[:3]:
            if found is None:
                return f'the order of modules differs at {mine[0]}'
            break
        if mine == theirs:
            continue
        if mine[3] != theirs[3]:
            first = first or f'{mine[1]} of {mine[0]} has other inputs already'
        elif found is None and (mine[1] == 'forward' or not first):
            # what goes backward depends on the forward pass as well
            found = mine
        elif found is not None and mine[1] == found[1] and _inside(mine[0], found[0]):
            found = mine
    return f'{found[1]} of {found[0]}: equal inputs, other outputs' if found else first


def _inside(path: str, container: str) -> bool:
    return container == '(model)' != path or path.startswith(f'{container}.')


def _first_logged(a: RunView, b: RunView, common: List[int]) -> Tuple[Optional[First], int]:
    first, differing = None, 0
    for i in common:
        one, other = a.scalars[i], b.scalars[i]
        names = [name for name in {**one, **other}
                 if name in one and name in other and not _equal(one[name], other[name])]
        differing += bool(names)
        if names and first is None:
            shared = [name for name in one if name in other]
            order = sorted(shared, key=lambda name: ('loss' not in name, name == 'grad_norm'))
            fields = [Field(f'scalars.{name}', f'{one[name]:.9g}', f'{other[name]:.9g}',
                            name not in names) for name in order]
            first = First(i, None, 0, fields)
    return first, differing


def _equal(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


# ---------------------------------------------------------------------------- growth


def _columns(a: Dict[int, Dict[str, float]], b: Dict[int, Dict[str, float]]
             ) -> Dict[str, Tuple[List[int], List[float], List[float]]]:
    """Per name: the steps at which both have it, and both values."""
    names: Dict[str, None] = {}
    for row in (*a.values(), *b.values()):
        names.update(dict.fromkeys(row))
    found = {}
    for name in names:
        steps = [i for i in sorted(set(a) & set(b)) if name in a[i] and name in b[i]]
        if steps:
            found[name] = (steps, [a[i][name] for i in steps], [b[i][name] for i in steps])
    return found


def _parted(a: RankLog, b: RankLog, common: List[int]) -> Dict[str, Optional[int]]:
    found: Dict[str, Optional[int]] = {}
    for i in common:
        one, other = (_get(log.steps[i], 'by_name.parameters') or {} for log in (a, b))
        for name in one:
            if name in other and found.get(name) is None:
                found[name] = i if one[name] != other[name] else None
    return found


def _norms(a: RunView, b: RunView, common: List[int]
           ) -> Tuple[List[int], List[str], List[List[float]]]:
    norms_a, norms_b = a.norms, b.norms
    steps = [i for i in common if i in norms_a and i in norms_b]
    if not steps:
        return [], [], []
    names = [name for name in norms_a[steps[0]] if name in norms_b[steps[0]]]
    rows = []
    for i in steps:
        digests = [_get(run.log.steps[i], 'by_name.parameters') or {} for run in (a, b)]
        rows.append([_relative(norms_a[i].get(name, math.nan), norms_b[i].get(name, math.nan))
                     if digests[0].get(name) != digests[1].get(name) or not digests[0] else 0.
                     for name in names])
    return steps, names, rows


def _relative(a: float, b: float) -> float:
    """|a - b| / |a|; never 0, because this is asked only where bits differ."""
    if a == b:
        return 2.**-24  # the norms agree although the bits do not: below their resolution
    return abs(a - b) / abs(a) if a else math.inf
