"""``mmrepro gpu_check``: does training repeat on this device, and at what cost?"""
from __future__ import annotations

import argparse
import sys
from typing import Any, Dict, List, Optional, Sequence

from . import program_name
from .arguments import Parser

__all__ = ['main']


def _parse(arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    name = program_name('gpu_check')
    parser = Parser(
        'gpu_check',
        description='Find out whether training repeats bit for bit on this device, operator by\n'
        'operator and detector by detector, and what it costs.',
        epilog=f'example:\n  {name} --out DIR --only detectors/DINO')
    parser.add_argument('--out', required=True, help='folder for gpu_check.json and gpu_check.md')
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    parser.add_argument('--quick', action='store_true',
                        help='small inputs, few repetitions, two iterations')
    parser.add_argument('--seconds', type=float, default=450., help='limit of time (450)')
    parser.add_argument('--only', default='', metavar='REGEX',
                        help='rows whose "group/name" matches, e.g. "detectors/DINO"')
    parser.add_argument('--iterations', type=int, default=None, help='of a detector (20; quick: 2)')
    parser.add_argument('--size', type=int, default=None, help='pixels of an image')
    return parser.parse_args(arguments)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the check.

    Returns 0 if every row gave the same bits, 1 if one did not or failed, 2 if the device is
    missing.
    """
    args = _parse(arguments)
    import torch
    if args.device == 'cuda' and not torch.cuda.is_available():
        print('gpu_check: this torch sees no CUDA device; --device cpu runs the same code on the '
              'processor', file=sys.stderr)
        return 2
    from ..gpu_check import check_loop, check_report

    def tell(group: str, name: str, result: Dict[str, Any]) -> None:
        """Print a row and write all so far, so that an interrupted check leaves its results."""
        row = result[group][name]
        print(f'{group:9} {name:30} {row.get("seconds", 0.):6.1f} s  {check_report.verdict(row)}',
              flush=True)
        check_report.write(result, args.out)

    result = check_loop.run_check(
        args.device, args.seconds, args.quick, args.only, args.iterations, args.size,
        ' '.join(['gpu_check', *_public(arguments)]), tell)
    print('\n'.join(map(str, check_report.write(result, args.out))))
    return 1 if result['summary']['unequal'] or result['summary']['failed'] else 0


def _public(arguments: Optional[Sequence[str]]) -> List[str]:
    """The arguments without the name of the folder, which may be private."""
    shown = list(sys.argv[1:] if arguments is None else arguments)
    for i, text in enumerate(shown):
        if text == '--out' and i + 1 < len(shown):
            shown[i + 1] = 'DIR'
        elif text.startswith('--out='):
            shown[i] = '--out=DIR'
    return shown
