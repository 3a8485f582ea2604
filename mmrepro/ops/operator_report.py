"""The catalogue of operators as text, as JSON and as the tables of docs/operators.md."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from .operator_table import FAMILIES
from .provider import CatalogueEntry, provider

__all__ = ['as_json', 'as_markdown', 'as_text']

# Whether a kind of compiled kernel gives the same bits on every run.
_COMPILED = {'atomics': '**no**: adds with atomics', 'ordered': 'yes'}


def _verdict(entry: CatalogueEntry) -> str:
    if entry.provider == 'none':
        return '-'
    return 'yes' if entry.deterministic else 'NO'


def as_text(entries: Sequence[CatalogueEntry], device: str) -> str:
    """A line per operator, and totals."""
    lines = [('operator', 'provider', f'same bits on {device}', 'used by'),
             *((e.operator, e.provider, _verdict(e), e.users) for e in entries)]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    table = '\n'.join('  '.join(
        [*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]) for line in lines)
    verdicts = [_verdict(e) for e in entries]
    return (f'{table}\n\n{len(entries)} operators, provider {provider()!r}: '
            f'{verdicts.count("NO")} not deterministic on {device}, {verdicts.count("-")} not '
            'available (they import, and say what to install when called)')


def as_json(entries: Sequence[CatalogueEntry], device: str) -> Dict[str, Any]:
    """The same as a dict: provider, device, and a dict per operator."""
    return dict(provider=provider(), device=device,
                operators=[entry._asdict() for entry in entries])


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head, *lines = ('| ' + ' | '.join(cell.replace('|', '\\|') for cell in row) + ' |'
                    for row in (titles, *rows))
    return '\n'.join((head, '|' + '---|' * len(titles), *lines))


def as_markdown(reached: Optional[Mapping[str, List[str]]] = None) -> str:
    """The tables of docs/operators.md, from the table of operators.

    ``reached`` has, by operator, the folders of the model zoo whose sweep called it; see
    ``dev.zoo``.
    """
    rows, missing = [], []
    for family in FAMILIES:
        if not family.module:
            missing.append((', '.join(f'`{name}`' for name in family.names), f'`{family.source}`',
                            family.users))
            continue
        folders = sorted({folder for name in family.names
                          for folder in (reached or {}).get(name, ())})
        measured = f'<br>in the sweep: {", ".join(folders)}' if folders else ''
        rows.append(('<br>'.join(f'`{name}`' for name in family.names), f'`{family.source}`',
                     family.users + measured, f'yes: {family.why}', _COMPILED[family.compiled]))
    ours = _table(('operator', 'in `mmcv/ops`', 'who uses it', 'mmrepro: same bits every time',
                   "mmcv's CUDA kernel"), rows)
    without = _table(('operator', 'in `mmcv/ops`', 'who uses it'), missing)
    return (f'\n## Operators in PyTorch\n\n{ours}\n\n## Without an implementation\n\nNo config of '
            'MMDetection builds them. They import, and when called say that a compiled mmcv has '
            f'them.\n\n{without}\n')
