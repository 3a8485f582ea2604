"""Which fields of two records of an iteration differ, in the order in which they come about."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

__all__ = ['Difference', 'differing_fields', 'first_difference']

# cause before effect: what comes first may explain what comes after
FIELDS = ('epoch', 'batch.positions', 'batch.indices', 'batch.data', 'modules', 'losses', 'buffers',
          'gradients', 'lr', 'optimizer', 'parameters')
DETAILED = ('losses', 'lr')  # fields whose parts are named

Record = Mapping[str, Any]


class Difference(NamedTuple):
    """Where two runs part: iteration, field, and what both have there."""
    iteration: int
    field: str
    first: Any
    second: Any

    def text(self) -> str:
        return (f'iteration {self.iteration}: {self.field} differ'
                f'{"" if self.field.endswith("s") else "s"}: {_short(self.first)} and '
                f'{_short(self.second)}')


def _short(value: Any) -> str:
    if value is None:
        return 'nothing'
    if isinstance(value, str) and value.lstrip('-').startswith('0x'):
        return f'{float.fromhex(value)!r} ({value})'
    text = str(value)
    return text if len(text) <= 80 else f'{text[:77]}...'


def _get(record: Record, field: str) -> Any:
    value: Any = record
    for name in field.split('.'):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def differing_fields(first: Record, second: Record) -> List[Tuple[str, Any, Any]]:
    """(field, one value, other value) for what both records have and what is not equal.

    What only one of them has is of another level and cannot be compared.
    """
    found = []
    for field in FIELDS:
        a, b = _get(first, field), _get(second, field)
        if a == b or a is None or b is None:
            continue
        if field in DETAILED:
            found += [(f'{field}.{name}', a.get(name), b.get(name))
                      for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
        elif field == 'modules':
            found.append(_module(a, b))
        else:
            found.append((field, a, b))
    return found


def _module(first: List[list], second: List[list]) -> Tuple[str, Any, Any]:
    for a, b in zip(first, second):
        if a != b:
            path, phase, call = a[:3]
            if a[:3] == b[:3]:
                side = 'input' if a[3] != b[3] else 'output'
                place = 3 if a[3] != b[3] else 4
                return f'{phase} of {path}, call {call}: {side}', a[place], b[place]
            return 'modules in their order', ' '.join(map(str, a[:3])), ' '.join(map(str, b[:3]))
    return 'number of module calls', len(first), len(second)


def first_difference(first: Dict[int, Record], second: Dict[int, Record]) -> Optional[Difference]:
    """The first iteration that both have and in which they differ, with its first field."""
    for iteration in sorted(set(first) & set(second)):
        fields = differing_fields(first[iteration], second[iteration])
        if fields:
            return Difference(iteration, *fields[0])
    return None
