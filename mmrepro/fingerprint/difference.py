"""Which fields of two records of an iteration differ, in the order in which they come about."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

__all__ = ['Difference', 'differing_fields', 'first_difference']

# cause before effect: what comes first may explain what comes after
FIELDS = ('epoch', 'batch.positions', 'batch.indices', 'batch.data', 'operators', 'modules',
          'losses', 'buffers', 'gradients', 'lr', 'optimizer', 'parameters')
DETAILED = ('losses', 'lr')  # fields whose parts are named
STREAMS = {'operators': 4, 'modules': 3}  # field: entries that say which call it is
MAX_NAMES = 3  # of parameters; the rest is counted

Record = Mapping[str, Any]


class Difference(NamedTuple):
    """Where two runs part: iteration, field, and what both have there."""
    iteration: int
    field: str
    first: Any
    second: Any

    def text(self) -> str:
        return (f'iteration {self.iteration}, {self.field}: {_short(self.first)} and '
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
        elif field in STREAMS:
            found.append(_in_stream(field, a, b))
        else:
            found.append((field + _names(field, first, second), a, b))
    return found


def _names(field: str, first: Record, second: Record) -> str:
    """Whose, where both records have digests by name."""
    a, b = _get(first, f'by_name.{field}'), _get(second, f'by_name.{field}')
    if not a or not b:
        return ''
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    more = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
    return f' of {", ".join(names[:MAX_NAMES])}{more}' if names else ''


def _in_stream(field: str, first: List[list], second: List[list]) -> Tuple[str, Any, Any]:
    """The first call whose input or output differs, or that only one of them has."""
    width = STREAMS[field]
    for a, b in zip(first, second):
        if a[:width] != b[:width]:
            return f'{field} in their order', _call(a[:width]), _call(b[:width])
        for place, side in ((width, 'input'), (width + 1, 'output')):
            if a[place] != b[place]:
                return f'{side} of {_call(a[:width])}', a[place], b[place]
    return f'number of {field}', len(first), len(second)


def _call(names: List[Any]) -> str:
    *what, number = names
    return f'{" ".join(filter(None, map(str, what)))} (call {number})'


def first_difference(first: Dict[int, Record], second: Dict[int, Record]) -> Optional[Difference]:
    """The first iteration that both have and in which they differ, with its first field."""
    for iteration in sorted(set(first) & set(second)):
        fields = differing_fields(first[iteration], second[iteration])
        if fields:
            return Difference(iteration, *fields[0])
    return None
