"""The table of torch's own operators as Markdown: ``python -m dev.kernel_table_report``."""
from __future__ import annotations

import re

from mmrepro.ops.aten.kernel_table import FAMILIES, TABLE, KernelRow

__all__ = ['lines']


def _span(row: KernelRow) -> str:
    first, last = '.'.join(map(str, row.since)), f'{row.until[0]}.{row.until[1] - 1}'
    if row.until[0] == 99:
        return 'all' if row.since == (2, 0) else f'from {first}'
    return f'to {last}' if row.since == (2, 0) else f'{first} to {last}'


def _ours(row: KernelRow) -> str:
    if not row.target:
        return 'left'
    module = row.target.partition(':')[0]
    if module == 'refusal':
        return 'refused'
    return f'`{module}`' + (', CPU too' if 'cpu' in row.devices else '')


def _alternatives(pattern: str) -> str:
    """Format the alternatives of a pattern, separated by the bars outside of parentheses."""
    parts = re.findall(r'(?:\([^()]*(?:\([^()]*\)[^()]*)*\)|[^|])+', pattern)
    return ', '.join(f'`{part}`' for part in parts)


def lines() -> list[str]:
    """Return the table, its numbered reasons, the users of operators, and the families."""
    reasons = {why: number for number, why in enumerate(
        dict.fromkeys(row.why for row in TABLE), 1)}
    names = [f'`{row.operator.replace("torch._decomp.decompositions", "decompositions")}`'
             for row in TABLE]
    users: dict[str, list[str]] = {}
    for name, row in zip(names, TABLE):
        if row.users and name not in users.setdefault(row.users, []):
            users[row.users].append(name)
    return ['| operator | releases | torch, on CUDA | mmrepro | reason |',
            '|---|---|---|---|--:|',
            *(f'| {name} | {_span(row)} | {row.torch} | {_ours(row)} | {reasons[row.why]} |'
              for name, row in zip(names, TABLE)),
            '', 'Reasons:', '', *(f'{number}. {why}' for why, number in reasons.items()),
            '', '### Who reaches them', '',
            *(f'- {", ".join(found)}: {used}' for used, found in users.items()),
            '', '### Families of operators', '',
            *(f'- *{family.torch}*, {family.why}: {_alternatives(family.pattern)}'
              for family in FAMILIES)]


if __name__ == '__main__':
    print('\n'.join(lines()))
