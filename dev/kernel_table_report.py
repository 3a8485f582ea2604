"""The table of torch's own operators as Markdown: ``python -m dev.kernel_table_report``."""
from __future__ import annotations

from typing import List

from mmrepro.ops.aten.kernel_table import TABLE, KernelRow

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
    return f'`{module}`' + (', CPU too' if 'cpu' in row.devices else '')


def lines() -> List[str]:
    """Head and rows."""
    head = ['| operator | releases | torch, on CUDA | mmrepro | why | reached by |',
            '|---|---|---|---|---|---|']
    return head + [f'| `{row.operator.replace("torch._decomp.decompositions", "decompositions")}` '
                   f'| {_span(row)} | {row.torch} | {_ours(row)} | {row.why} | {row.users} |'
                   for row in TABLE]


if __name__ == '__main__':
    print('\n'.join(lines()))
