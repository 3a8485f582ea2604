"""Results of the sweep as tables: all configs, and those that need another package."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .families import FAMILIES, PACKAGES

__all__ = ['needs', 'reached_by', 'table']

# The outcomes as the table shows them.
WORDS = {'ok': 'yes', 'differs': '**different bits**', 'needs': 'needs', 'tracker': 'tracks only',
         'broken': 'no',
         'failed': '**failed**'}


def reached_by(rows: Iterable[dict]) -> dict[str, list[str]]:
    """Return {operator of mmcv: sorted folders of the zoo whose configs called it}."""
    reached: dict[str, set[str]] = {}
    for row in rows:
        for operator in row.get('operators', ()):
            reached.setdefault(operator, set()).add(row['family'])
    return {operator: sorted(folders) for operator, folders in sorted(reached.items())}


def _said(row: dict) -> str:
    word = WORDS[row['outcome']]
    if row['outcome'] == 'needs':
        return f'{word} {", ".join(row["packages"])}'
    if row.get('equal', True) is None:
        return f'{word}, once'
    return f'{word}: {row["error"]}' if 'error' in row else word


def table(results: dict[str, Any]) -> str:
    """Return a Markdown report on all configs of the sweep."""
    versions = ', '.join(f'{name} {version}' for name, version in results['versions'].items())
    rows = results['rows']
    count = {word: sum(row['outcome'] == word for row in rows) for word in WORDS}
    twice = sum(bool(row.get('equal')) for row in rows)
    lines = [
        f'| `{row["config"]}` | {row["annotations"]} | {_said(row)} | '
        f'{row.get("parameters", 0) / 1e6:.1f} | {row.get("seconds", 0):.0f} | '
        f'{row.get("peak_mib", 0)} | '
        f'{", ".join(_short(row.get("operators", ())))} |' for row in rows]
    return '\n'.join((
        '# The sweep over the zoo, config by config', '',
        f'Written by `python -m dev.zoo --out`; see [detectors](../evidence/zoo.md). '
        f'{versions}.', '',
        f'{len(rows)} of the {len(FAMILIES)} configs in the list, of '
        f'{len({row["family"] for row in rows})} folders: {count["ok"]} build, train and infer '
        f'({twice} of them twice, with the same bits), {count["needs"]} need another package, '
        f'{count["tracker"]} only track, {count["broken"]} raise an error of MMDetection itself, '
        f'{count["differs"]} gave different bits, {count["failed"]} failed. Seconds are of one '
        'core, of all runs together.', '',
        '| config | annotations | works | million parameters | s | MiB | operators of mmcv |',
        '|---|---|---|--:|--:|--:|---|', *lines, ''))


def _short(operators: Sequence[str]) -> list[str]:
    """Return names without direction: `roi_align` for its forward and its backward."""
    names = [name.replace('_forward', '').partition('_backward')[0] for name in operators]
    return list(dict.fromkeys(names))


def needs(rows: Iterable[dict], tried: Iterable[dict] = ()) -> str:
    """Return the configs that need another package as a Markdown table.

    Args:
        rows: of a sweep without these packages.
        tried: of sweeps with some of them.
    """
    found = {row['config']: f'{_said(row)}: ' + ', '.join(
        f'{name} {version}' for name, version in row['with'].items()) for row in tried}
    missing = sorted((tuple(row['packages']), row['config']) for row in rows
                     if row['outcome'] == 'needs')
    lines = [
        f'| {", ".join(f"`{name}`" for name in names)} | '
        f'{"; ".join(PACKAGES[name].why for name in names)} | `{config}` | '
        f'{found.get(config, "not tried")} |' for names, config in missing]
    return '\n'.join(('| package | for | config | works with it |', '|---|---|---|---|', *lines))
