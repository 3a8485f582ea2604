"""``mmrepro ops``: the operators, the provider of each, and whether it gives the same bits."""
from __future__ import annotations

import json
import sys
from collections.abc import Sequence

import torch

from ..ops.choice import PROVIDERS
from ..ops.operator_report import as_json, as_markdown, as_text, catalogue
from .arguments import Parser, quiet_when_reader_leaves


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """``mmrepro ops``. Returns 0, or 2 without any mmcv."""
    parser = Parser(
        'ops', description="mmcv's compiled operators: the provider of each and why, "
        'whether it gives the same bits every time, and which detectors use it.',
        epilog='example:\n  %(prog)s --device cuda --json')
    parser.add_argument('--operators', choices=PROVIDERS, default='auto',
                        help='the choices of this randomness.operators (default: %(default)s, what '
                        'a deterministic run takes)')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        default='cuda' if torch.cuda.is_available() else 'cpu',
                        help='where the operators would run; it need not be there (here: '
                        '%(default)s)')
    group = parser.add_mutually_exclusive_group()
    group.add_argument('--json', action='store_true', help='for programs')
    group.add_argument('--markdown', action='store_true',
                      help='the tables of docs/reference/operators.md')
    args = parser.parse_args(argv)
    if args.markdown:
        print(as_markdown())
        return 0
    try:
        entries = catalogue(args.device, args.operators)
    except ModuleNotFoundError as error:
        print(f'mmrepro ops: {error}; install "mmcv-lite<2.2" or mmcv', file=sys.stderr)
        return 2
    form = entries, args.device, args.operators
    print(json.dumps(as_json(*form), indent=1) if args.json else as_text(*form))
    return 0
