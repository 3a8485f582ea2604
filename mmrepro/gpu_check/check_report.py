"""The report of the check: a JSON file, and its tables in Markdown."""
from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, List, Tuple

__all__ = ['NAME', 'table', 'verdict', 'write']

NAME = 'gpu_check'


def verdict(row: Dict[str, Any]) -> str:
    """The result of a row in a few words."""
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
    if row.get('disagrees'):
        return f'equal, but WRONG: {", ".join(row["disagrees"])}'
    if row.get('finite') is False:
        return 'equal, but not finite'
    return 'equal'


def _number(value: Any, form: str) -> str:
    missing = value is None or (isinstance(value, float) and math.isnan(value))
    return '' if missing else format(value, form)


def _operators(title: str, rows: Dict[str, dict]) -> List[str]:
    lines = [f'## {title}', '',
             '| operator | bits | runs | error | ms | default | ms | ratio | default repeats |',
             '|---|---|---|---|---|---|---|---|---|']
    for name, row in rows.items():
        repeats = row.get('default_equal')
        lines.append(
            f'| {name} | {verdict(row)} | {row.get("times", "")} | '
            f'{_number(row.get("error"), ".1e")} | {_number(row.get("ms"), ".2f")} | '
            f'{row.get("default_error", row.get("default", ""))} | '
            f'{_number(row.get("default_ms"), ".2f")} | {_number(row.get("ratio"), ".2f")} | '
            f'{"" if repeats is None else "yes" if repeats else "no"} |')
    return [*lines, '']


def _detectors(rows: Dict[str, dict]) -> List[str]:
    lines = ['## Detectors', '',
             '| detector | bits | iterations | pixels | ms | default | ms | ratio | GiB | GiB |',
             '|---|---|---|---|---|---|---|---|---|---|']
    for name, row in rows.items():
        lines.append(
            f'| {name} | {verdict(row)} | {row.get("iterations", "")} | {row.get("size", "")} | '
            f'{_number(row.get("ms"), ".1f")} | {row.get("default", "")} | '
            f'{_number(row.get("default_ms"), ".1f")} | {_number(row.get("ratio"), ".2f")} | '
            f'{_number(row.get("peak_gib"), ".2f")} | '
            f'{_number(row.get("default_peak_gib"), ".2f")} |')
    return [*lines, '']


def table(result: Dict[str, Any]) -> str:
    """The report as Markdown."""
    machine = ', '.join(f'{key} {value}' for key, value in result['machine'].items())
    summary = result['summary']
    lines = [f'# Does training repeat on this {result["machine"]["device"].upper()}?', '',
             f'Machine: {machine}.', '',
             f'{summary["equal"]} rows gave equal bits, {summary["unequal"]} did not, '
             f'{summary["failed"]} failed, {summary["left_out"]} were left out; '
             f'{summary["seconds"]:.0f} seconds. Command: `{result["command"]}`.', '',
             'ms: median of a forward and a backward (of an iteration, for detectors) in '
             'deterministic mode, then by default; ratio: the former over the latter. error: '
             'of small inputs against float64 on a CPU, relative, in the 2-norm.', '']
    lines += _detectors(result['detectors'])
    lines += _operators('Operators of mmcv', result['mmcv'])
    if result['triton']:
        lines += _operators('Operators of mmcv, kernels in Triton', result['triton'])
    lines += _operators("torch's own operators", result['torch'])
    return '\n'.join(lines)


def write(result: Dict[str, Any], folder: str, name: str = NAME) -> Tuple[Path, Path]:
    """Write both files, also for an unfinished check, and return their paths."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    files = path / f'{name}.json', path / f'{name}.md'
    files[0].write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
    files[1].write_text(table(result) + '\n', encoding='utf-8')
    return files
