"""``mmrepro gpu_check``: does training repeat on this device, and at what cost?"""
from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..exit_codes import DIFFERENT, DONE, USAGE
from ..runs.startup import has_mmdet
from . import program_name
from .arguments import Parser

_CHECKOUT = 'single operators are checked from a checkout of mmrepro, with tools/gpu_check.py'


def _parser(operators: Mapping[str, Any]) -> Parser:
    name = program_name('gpu_check')
    parser = Parser(
        'gpu_check',
        description='Find out whether training repeats bit for bit on this device, '
        + ('operator by\noperator and detector by detector' if operators else
           'detector by\ndetector') + ', and what it costs.'
        + ('' if operators else f'\n{_CHECKOUT.capitalize()}.'),
        epilog=f'example:\n  {name} --out DIR --only detectors/DINO')
    parser.add_argument('--out', required=True, help='folder for gpu_check.json and gpu_check.md')
    parser.add_argument('--device', choices=('cuda', 'cpu'), default='cuda')
    parser.add_argument('--quick', action='store_true',
                        help='small inputs, few repetitions, two iterations')
    parser.add_argument('--seconds', type=float, default=450., help='limit of time (450)')
    parser.add_argument('--only', default='', metavar='REGEX',
                        help='rows whose "group/name" matches, e.g. "detectors/DINO"')
    parser.add_argument('--iterations', type=int, help='of a detector (20; quick: 2)')
    parser.add_argument('--against', metavar='FILE',
                        help='gpu_check.json of another process or machine: compare digests; '
                        'on the same machine they must be equal')
    parser.add_argument('--size', type=int, help='pixels of an image (640; quick: 128)')
    return parser


def main(arguments: Sequence[str] | None = None,
         operators: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Run the check.

    Args:
        operators: groups of rows (:class:`mmrepro.doctor.RowGroup`) to run besides
            the detectors, by name. ``tools/gpu_check.py`` has those of a checkout.

    Returns 0 if every row gave the same bits, 1 if one did not or failed, 2 if the device is
    missing or no row matches ``--only``.
    """
    parser = _parser(operators)
    args = parser.parse_args(arguments)
    parser.make_folder(args.out, '--out')
    against = None
    if args.against:
        try:
            against = json.loads(Path(args.against).read_text(encoding='utf-8'))
        except (OSError, ValueError) as error:
            parser.error(f'--against {args.against}: {error}')
    if not has_mmdet():
        print('gpu_check: it trains detectors of MMDetection, which is not installed: '
              'pip install "mmcv-lite<2.2" mmdet', file=sys.stderr)
        return USAGE
    import torch
    if args.device == 'cuda' and not torch.cuda.is_available():
        print('gpu_check: this torch sees no CUDA device; --device cpu runs the same code on the '
              'processor', file=sys.stderr)
        return USAGE
    from ..doctor import Settings, check, report

    def tell(group: str, name: str, result: dict[str, Any]) -> None:
        """Print a row and write all so far, so that an interrupted check leaves its results."""
        row = result[group][name]
        print(f'{group:9} {name:30} {row.get("seconds", 0.):6.1f} s  {report.verdict(row)}',
              flush=True)
        report.write(result, operators, args.out)

    # by default the size of a usual schedule on a GPU, or a small one
    settings = Settings(args.device, args.quick, args.iterations or (2 if args.quick else 20),
                        args.size or (128 if args.quick else 640))
    result = check(settings, args.seconds, args.only,
                   ' '.join(['gpu_check', *_public(arguments)]), operators, tell, against)
    if not any(result[group] for group in (*operators, 'detectors')):
        parser.error(f'--only {args.only}: no row matches'
                     + ('' if operators else f'; {_CHECKOUT}'))
    if not operators:
        print(f'{_CHECKOUT.capitalize()}.')
    print('\n'.join(map(str, report.write(result, operators, args.out))))
    return DIFFERENT if result['summary']['unequal'] or result['summary']['failed'] else DONE


def _public(arguments: Sequence[str] | None) -> list[str]:
    """The arguments without the name of the folder, which may be private."""
    shown = list(sys.argv[1:] if arguments is None else arguments)
    for i, text in enumerate(shown):
        for option, stands_for in (('--out', 'DIR'), ('--against', 'FILE')):
            if text == option and i + 1 < len(shown):
                shown[i + 1] = stands_for
            elif text.startswith(f'{option}='):
                shown[i] = f'{option}={stands_for}'
    return shown
