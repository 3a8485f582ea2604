"""The command ``tools/gpu_check.py``."""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dev.operator_check import GROUPS
from mmrepro.cli.arguments import Parser, at_least, finish, shared
from mmrepro.errors import ConfigError, MissingPackageError
from mmrepro.runs.startup import has_mmdet
from mmrepro.util.files import read_json

from . import report
from .checking import check
from .rows import RowGroup, Settings

__all__ = ['COMMAND', 'main']

COMMAND = 'gpu_check.py'
SECONDS = 450.


def _parser() -> Parser:
    parser = Parser(
        COMMAND, 'Find out whether training repeats bit for bit on this device, detector by '
        'detector and operator by operator, and what that costs.',
        'examples:\n  python tools/gpu_check.py --out DIR\n'
        '  python tools/gpu_check.py --out DIR --only detectors/DINO\n\n'
        'exit code: 0 done, 1 a row did not give equal bits or failed, 2 wrong usage, 3 no row '
        'ran', shared(json=None))
    parser.add_argument('--out', metavar='DIR', required=True,
                        help='folder for gpu_check.json and gpu_check.html')
    parser.add_argument('--device', choices=('cpu', 'cuda'), default='cuda',
                        help='default: %(default)s')
    parser.add_argument('--quick', action='store_true',
                        help='small inputs, few repetitions, two iterations')
    parser.add_argument('--seconds', type=float, default=SECONDS,
                        help='limit of time (default: %(default)s)')
    parser.add_argument('--only', metavar='REGEX', default='',
                        help='rows whose "group/name" matches, e.g. "detectors/DINO"')
    parser.add_argument('--iters', type=at_least(1), metavar='N',
                        help='iterations of a detector (20; quick: 2)')
    parser.add_argument('--against', metavar='FILE',
                        help='gpu_check.json of another process or machine: compare digests; '
                        'on the same machine they must be equal')
    parser.add_argument('--size', type=at_least(1), metavar='N',
                        help='pixels of an image (640; quick: 128)')
    return parser


def main(argv: Sequence[str] | None = None,
         operators: Mapping[str, RowGroup] = GROUPS) -> int:
    """Run the rows of the detectors and of ``operators``, by the name of their group.

    Returns 1 if a row failed or gave different bits.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f'--only {args.only}: not a regular expression: {error}')
    parser.make_folder(args.out, '--out')
    groups = (*operators, 'detectors')
    shape = {'machine': object, **{f'{group}?': {str: dict} for group in groups}}
    against = read_json(args.against, ConfigError, shape) if args.against else None
    if not has_mmdet():
        raise MissingPackageError('detectors of MMDetection are trained, and it is not installed: '
                                  'pip install "mmcv-lite<2.2" mmdet')
    if args.device == 'cuda' and not torch.cuda.is_available():
        raise ConfigError('this torch sees no CUDA device; --device cpu runs the same code on the '
                          'processor')

    def on_row(group: str, name: str, result: dict[str, Any]) -> None:
        """Print a row and write all so far, so that an interrupted check leaves its results."""
        row = result[group][name]
        print(f'{group:9} {name:30} {row.get("seconds", 0.):6.1f} s  {report.verdict(row)}',
              file=sys.stderr, flush=True)
        report.report_of(result, operators).write(args.out, 'gpu_check')

    result = check(_settings(args), args.seconds, args.only, _shown(args, words), operators, on_row,
                   against)
    if not any(result[group] for group in groups):
        parser.error(f'--only {args.only}: no row matches')
    whole = report.report_of(result, operators)
    whole.data['written'] = whole.write(args.out, 'gpu_check')
    return finish(whole, args)


def _settings(args: argparse.Namespace) -> Settings:
    """Return by default the size of a usual schedule on a GPU, or a small one."""
    iterations, size = (2, 128) if args.quick else (20, 640)
    return Settings(args.device, args.quick, args.iters or iterations, args.size or size)


def _shown(args: argparse.Namespace, words: Sequence[str]) -> str:
    """Return the command line for the result, without the names of folders, which may be private.
    """
    placeholders = {args.out: 'DIR', f'--out={args.out}': '--out=DIR', args.against: 'FILE',
                    f'--against={args.against}': '--against=FILE'}
    return ' '.join([COMMAND, *(placeholders.get(word, word) for word in words)])
