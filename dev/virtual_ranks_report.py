"""The table of docs/results/virtual_ranks_matrix.json that the docs show."""
from __future__ import annotations

from typing import Any, Dict, List

__all__ = ['table']


def table(report: Dict[str, Any]) -> str:
    """Markdown: a row per config, a column per number of ranks."""
    rows = report['rows']
    numbers = sorted({row['ranks'] for row in rows})
    lines = ['| config | ' + ' | '.join(f'V = {count}' for count in numbers) + ' |',
             '|---|' + '---|' * len(numbers)]
    for name in dict.fromkeys(row['config'] for row in rows):
        cells = [_cell([row for row in rows if (row['config'], row['ranks']) == (name, count)])
                 for count in numbers]
        lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
    different = sum(bool(row['difference']) for row in rows)
    lines += ['', f'{len(rows)} comparisons, {different} different.']
    return '\n'.join(lines)


def _cell(rows: List[Dict[str, Any]]) -> str:
    if not rows:
        return 'not run'
    different = sum(bool(row['difference']) for row in rows)
    processes = sorted({row['processes'] for row in rows})
    resumes = sum(bool(row['resumed_from']) for row in rows)
    return (f'{f"{different} different" if different else "equal"}: N = '
            f'{", ".join(map(str, processes))}; {resumes} resumes')
