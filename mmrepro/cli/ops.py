"""``mmrepro ops``: the operators, who answers for each, and whether that gives equal bits."""
from __future__ import annotations

import argparse
import json
import sys
from typing import Any, Dict, List, Optional, Sequence

import torch

from ..ops.operator_table import FAMILIES, Family
from ..ops.provider import CatalogueEntry, catalogue, provider
from . import program_name
from .arguments import Parser, quiet_when_reader_leaves

__all__ = ['as_json', 'as_text', 'main', 'page']

# What the page says about the two kinds of compiled kernels.
COMPILED = {
    'atomics': '**no**: adds with atomics',
    'ordered': 'yes',
}


def _verdict(entry: CatalogueEntry) -> str:
    if entry.provider == 'none':
        return '-'
    return 'yes' if entry.deterministic else 'NO'


def as_text(entries: Sequence[CatalogueEntry], device: str) -> str:
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


def as_json(entries: Sequence[CatalogueEntry], device: str) -> Dict[str, Any]:
    """The same for programs: provider, device, and a dict per operator."""
    return dict(provider=provider(), device=device,
                operators=[entry._asdict() for entry in entries])


def _cell(text: str) -> str:
    return text.replace('|', '\\|')


def _line(family: Family, reached: Dict[str, List[str]]) -> str:
    names = '<br>'.join(f'`{name}`' for name in family.names)
    folders = sorted({folder for name in family.names for folder in reached.get(name, ())})
    measured = f'<br>in the walk: {", ".join(folders)}' if folders else ''
    return '| ' + ' | '.join((
        names, f'`{family.source}`', _cell(family.users) + measured,
        f'yes: {family.why}' if family.module else '**not available**',
        COMPILED[family.compiled])) + ' |'


def page(reached: Optional[Dict[str, List[str]]] = None) -> str:
    """The tables of docs/operators.md, from the table of operators.

    Args:
        reached: operator -> folders of the zoo whose walk called it; see ``dev.zoo``.
    """
    reached = reached or {}
    head = ('| operator | in `mmcv/ops` | who uses it | mmrepro: same bits every time |'
            " mmcv's CUDA kernel |\n|---|---|---|---|---|")
    ours = '\n'.join(_line(f, reached) for f in FAMILIES if f.module)
    without = '\n'.join(
        f'| {", ".join(f"`{name}`" for name in f.names)} | `{f.source}` | {_cell(f.users)} |'
        for f in FAMILIES if not f.module)
    return (f'\n## Operators in PyTorch\n\n{head}\n{ours}\n\n'
            '## Without an implementation\n\nNo config of MMDetection builds them. They import, '
            'and when called say that a compiled mmcv has them.\n\n'
            f'| operator | in `mmcv/ops` | who uses it |\n|---|---|---|\n{without}\n')


@quiet_when_reader_leaves
def main(argv: Optional[Sequence[str]] = None) -> int:
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
    form.add_argument('--markdown', action='store_true', help='the tables of docs/operators.md')
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
