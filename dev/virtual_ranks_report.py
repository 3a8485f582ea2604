"""The tables of docs/results/virtual_ranks_*.json that the docs show."""
from __future__ import annotations

from typing import Any

__all__ = ['table', 'zoo_table']


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table: a row per config, a column per number of ranks."""
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


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return 'not run'
    different = sum(bool(row['difference']) for row in rows)
    processes = sorted({row['processes'] for row in rows})
    resumes = sum(bool(row['resumed_from']) for row in rows)
    return (f'{f"{different} different" if different else "equal"}: N = '
            f'{", ".join(map(str, processes))}; {resumes} resumes')


def zoo_table(report: dict[str, Any]) -> str:
    """Return a Markdown table: a row per family that was trained, then those that were not."""
    rows = [row for row in report['rows'] if 'cannot' not in row]
    families = sorted({row['family'] for row in rows})
    lines = ['| family | config | width | weights | steps and samples repeated | bits |',
             '|---|---|---|---|---|---|']
    for name in families:
        lines.append(_family([row for row in rows if row['family'] == name]))
    different = sum(bool(row['difference']) for row in rows)
    lines += ['', f'{len(families)} families, {len(rows)} runs, {different} different.', '',
              '| not trained | why |', '|---|---|']
    lines += [f'| {row["family"]} | {row["cannot"]} |'
              for row in sorted(report['rows'], key=lambda row: row['family']) if 'cannot' in row]
    return '\n'.join(lines)


def _family(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    config = first['config'].partition('/')[2].rpartition('.')[0]
    # a run that crashed says nothing of itself
    memory = ', '.join(sorted({row['memory'] for row in rows if 'memory' in row}))
    repeated = [sum(row.get(key, 0) for row in rows) for key in ('steps', 'samples')]
    bits = _cell(rows) if not any(row['difference'] for row in rows) else '; '.join(
        f'N = {row["processes"]}{_resumed(row)}: {row["difference"]}'
        for row in rows if row['difference'])
    return (f'| {first["family"]} | {config} | {first["width"]} | {memory} | '
            f'{repeated[0]}, {repeated[1]} | {bits} |')


def _resumed(row: dict[str, Any]) -> str:
    return f', resumed from {row["resumed_from"]}' if row['resumed_from'] else ''
