"""The tables of docs/evidence/cost.md."""
from __future__ import annotations

from typing import Any

HEAD = ('| operator | forward ms | mmcv | ratio | backward ms | mmcv | ratio '
        '| extra memory x (f / b) | mmcv | compared with |\n'
        '|---|---|---|---|---|---|---|---|---|---|')
BOX_HEAD = ('| operator | size | ms | mmcv | ratio '
            '| extra memory x (MiB) | mmcv | compared with |\n'
            '|---|---|---|---|---|---|---|---|')


def ratio(numerator: float, denominator: float | None) -> str:
    return f'{numerator / denominator:.2f}' if denominator else ''


def row(entry: dict[str, Any]) -> str:
    """Return a line of the page for a case of features.py."""
    times, memories = entry['seconds'], entry['memory']
    ours, other = times['torch'], times.get('compiled') or times.get('peer')
    cells = [entry['case']]
    for i in (0, 1):
        shown = entry['backward'] or i == 0
        cells += [f'{ours[i] * 1e3:.1f}' if shown else '',
                  f'{other[i] * 1e3:.1f}' if other and shown else '',
                  ratio(ours[i], other[i]) if other and shown else '']
    for name in ('torch', 'compiled'):
        found = memories.get(name) or {}
        cells.append(' / '.join(f'{found[k]:.1f}' for k in ('forward', 'backward') if k in found))
    cells.append('' if 'compiled' in times or not other else entry['peer'])
    return '| ' + ' | '.join(cells) + ' |'


def box_row(entry: dict[str, Any]) -> str:
    """Return a line of the page for a case of boxes.py."""
    memories = [entry.get(f'{who}_memory') for who in ('ours', 'theirs')]
    cells = [entry['operator'], entry['size'], f'{entry["ours_ms"]:.2f}',
             f'{entry["theirs_ms"]:.2f}', f'{entry["ratio"]:.2f}',
             *(f'{m["times"]:.1f} ({m["mib"]:.1f})' if m else '' for m in memories),
             '' if entry['peer'].startswith('mmcv') else entry['peer']]
    return '| ' + ' | '.join(cells) + ' |'


def boxes(report: dict[str, Any]) -> str:
    """The second table of what ``--out`` wrote."""
    return '\n'.join((BOX_HEAD, *map(box_row, report['boxes'])))


def page(report: dict[str, Any]) -> str:
    """Both tables of what ``--out`` wrote."""
    return '\n'.join((HEAD, *map(row, report['features']), '', boxes(report)))
