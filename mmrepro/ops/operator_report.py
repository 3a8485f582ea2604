"""The catalogue of operators as text, as JSON and as the tables of docs/reference/operators.md."""
from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Sequence

from .operator_table import FAMILIES
from .provider import CatalogueEntry, provider

__all__ = ['as_json', 'as_markdown', 'as_text']

# Whether a kind of compiled kernel gives the same bits on every run.
_COMPILED = {'atomics': '**no**: atomics', 'ordered': 'yes'}


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


def as_markdown(reached: Optional[Mapping[str, List[str]]] = None) -> str:
    """The tables of docs/reference/operators.md, from the table of operators.

    Args:
        reached: operator -> folders of the model zoo whose sweep called it; see ``dev.zoo``.
    """
    ours = [family for family in FAMILIES if family.module]
    reasons = {why: number for number, why in enumerate(
        dict.fromkeys(family.why for family in ours), 1)}
    rows: List[str] = []
    users: Dict[str, List[str]] = {}
    for family in ours:
        names = [f'`{name}`' for name in family.names]
        folders = {folder for name in family.names for folder in (reached or {}).get(name, ())}
        rows.append(f'| {"<br>".join(names)} | yes, {reasons[family.why]} '
                    f'| {_COMPILED[family.compiled]} | {len(folders) or ""} |')
        users.setdefault(family.users, []).extend(names)
    missing = [f'- {family.users}, `{family.source}`: '
               + ', '.join(f'`{name}`' for name in family.names)
               for family in FAMILIES if not family.module]
    return '\n'.join((
        '', '| operator | mmrepro | mmcv on CUDA | folders |', '|---|---|---|--:|', *rows, '',
        "Why mmrepro's form gives the same bits every time:", '',
        *(f'{number}. {why}' for why, number in reasons.items()), '',
        '### Who uses them', '',
        *(f'- {", ".join(names)}: {used}' for used, names in users.items()), '',
        '### Without an implementation', '',
        'No config of MMDetection builds them. They import, and when called say that a compiled '
        'mmcv has them.', '', *missing, ''))
