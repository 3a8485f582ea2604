"""``mmrepro ops``: the operators, who answers for each, and whether that gives equal bits."""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from ..ops.operator_table import FAMILIES, Family
from ..ops.provider import Entry, catalogue, provider
from . import program_name
from .arguments import Parser, quiet_when_reader_leaves

__all__ = ['as_json', 'as_text', 'main', 'page']

# What the page says about the two kinds of compiled kernels.
COMPILED = {'atomics': '**no**: atomics', 'ordered': 'yes'}


def _verdict(entry: Entry) -> str:
    if entry.provider == 'none':
        return '-'
    return 'yes' if entry.deterministic else 'NO'


def as_text(entries: Sequence[Entry], device: str) -> str:
    """A line per operator, and counts."""
    titles = ('operator', 'provider', f'same bits on {device}', 'used by')
    lines = [titles] + [
        (e.operator, e.provider, _verdict(e), e.users) for e in entries]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    table = '\n'.join('  '.join(
        [*(cell.ljust(width) for cell, width in zip(line, widths)), line[3]]) for line in lines)
    missing = [e for e in entries if e.provider == 'none']
    different = [e for e in entries if e.provider != 'none' and not e.deterministic]
    summary = (f'{len(entries)} operators, provider {provider()!r}: '
               f'{len(different)} not deterministic on {device}, {len(missing)} not available '
                '(they import, and say what to install when called)')
    return f'{table}\n\n{summary}'


def as_json(entries: Sequence[Entry], device: str) -> dict[str, Any]:
    """The same for programs: provider, device, and a dict per operator."""
    return dict(provider=provider(), device=device,
                operators=[entry._asdict() for entry in entries])


def _names(family: Family) -> str:
    return ', '.join(f'`{name}`' for name in family.names)


def page(reached: dict[str, list[str]] | None = None) -> str:
    """The tables of docs/reference/operators.md, from the table of operators.

    Args:
        reached: operator -> folders of the zoo whose sweep called it; see ``dev.zoo``.
    """
    reached = reached or {}
    ours = [family for family in FAMILIES if family.module]
    reasons = {why: number for number, why in enumerate(
        dict.fromkeys(family.why for family in ours), 1)}
    rows, users = [], {}
    for family in ours:
        folders = {folder for name in family.names for folder in reached.get(name, ())}
        rows.append(f'| {_names(family).replace(", ", "<br>")} | yes, {reasons[family.why]} '
                    f'| {COMPILED[family.compiled]} | {len(folders) or ""} |')
        users.setdefault(family.users, []).append(_names(family))
    return '\n'.join((
        '',
        '| operator | mmrepro | mmcv on CUDA | folders |', '|---|---|---|--:|', *rows,
        '', 'Why mmrepro\'s form gives the same bits every time:', '',
        *(f'{number}. {why}' for why, number in reasons.items()),
        '', '### Who uses them', '',
        *(f'- {", ".join(names)}: {used}' for used, names in users.items()),
        '', '### Without an implementation', '',
        'No config of MMDetection builds them. They import, and when called say that a compiled '
        'mmcv has them.', '',
        *(f'- {family.users}, `{family.source}`: {_names(family)}'
          for family in FAMILIES if not family.module), ''))


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """``mmrepro ops``. Returns 0."""
    parser = Parser(
        prog=program_name('ops'), description="mmcv's compiled operators: who answers for each, "
        'whether it gives the same bits every time, and which detectors use it.',
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example:\n  %(prog)s --device cuda --json')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='where the operators would run; it need not be there (here: '
                        '%(default)s)')
    form = parser.add_mutually_exclusive_group()
    form.add_argument('--json', action='store_true', help='for programs')
    form.add_argument('--markdown', action='store_true', help='the tables of docs/reference/operators.md')
    args = parser.parse_args(argv)
    if args.markdown:
        print(page())
        return 0
    try:
        entries = catalogue(args.device)
    except ModuleNotFoundError as error:
        print(f'mmrepro ops: {error}; install "mmcv-lite<2.2" or mmcv', file=sys.stderr)
        return 2
    print(json.dumps(as_json(entries, args.device), indent=1) if args.json
          else as_text(entries, args.device))
    return 0
