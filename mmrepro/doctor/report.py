"""The report of the check: a JSON file, and its tables in Markdown."""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import detectors
from .rows import Row, RowGroup

# What is said of comparisons that are reported and not judged, and of those that are.
_COMPARED = {'other_process': {True: 'also in another process'},
             'other_machine': {True: 'also on the other machine',
                               False: 'different bits on the other machine'},
             'fewer_multiprocessors': {True: 'also on fewer multiprocessors',
                                       False: 'different bits on fewer multiprocessors'}}


def verdict(row: Row) -> str:
    """Return the result of a row in a few words."""
    if 'error_text' in row:
        return f'failed: {row["error_text"]}'
    if 'left_out' in row:
        return f'left out: {row["left_out"]}'
    if 'refused' in row:
        return 'refused by name' if row['refused'] else 'ran (torch refuses it on CUDA)'
    if row.get('difference'):
        return f'DIFFERS, {row["difference"]}'
    if row.get('differs'):
        return f'DIFFERS: {", ".join(row["differs"])}'
    if row.get('other_process') is False:
        return 'DIFFERS from the other process'
    if row.get('disagrees'):
        return f'equal, but WRONG: {", ".join(row["disagrees"])}'
    if row.get('finite') is False:
        return 'equal, but not finite'
    return ', '.join(['equal', *(words[row[key]] for key, words in _COMPARED.items()
                                 if row.get(key) is not None)])


def outcome(result: dict[str, Any]) -> str:
    """Return how many rows ran, and with what result, in a sentence."""
    return ('{ran} of {rows} rows ran: {equal} gave equal bits, {unequal} did not, {failed} '
            'failed; {seconds:.0f} seconds.').format_map(result['summary'])


def _line(*cells: str) -> str:
    return f'| {" | ".join(cells)} |'


def _table_of(group: RowGroup, rows: dict[str, Row]) -> list[str]:
    return [f'## {group.title}', '',
            _line(group.subject, 'bits', *(heading for heading, _ in group.columns)),
            '|---|---|' + '---|' * len(group.columns),
            *(_line(name, verdict(row), *(text(row) for _, text in group.columns))
              for name, row in rows.items()), '']


def table(result: dict[str, Any], operators: Mapping[str, RowGroup]) -> str:
    """Return the report as Markdown; a group without rows has no table."""
    machine = ', '.join(f'{key} {value}' for key, value in result['machine'].items())
    lines = [f'# Does training repeat on this {result["machine"]["device"].upper()}?', '',
             f'Machine: {machine}.', '',
             f'{outcome(result)} Command: `{result["command"]}`.', '',
             'ms: median of a forward and a backward (an iteration, for detectors) in '
             'deterministic mode, then by default; ratio: the former over the latter. error: '
             'of small inputs against float64 on a CPU, relative, in the 2-norm.', '']
    for name, group in dict(detectors=detectors.GROUP, **operators).items():
        if result.get(name):
            lines += _table_of(group, result[name])
    return '\n'.join(lines)


def write(result: dict[str, Any], operators: Mapping[str, RowGroup], folder: str
          ) -> tuple[Path, Path]:
    """Write both files, also for an unfinished check, and return their paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    files = path / 'gpu_check.json', path / 'gpu_check.md'
    files[0].write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
    files[1].write_text(table(result, operators) + '\n', encoding='utf-8')
    return files
