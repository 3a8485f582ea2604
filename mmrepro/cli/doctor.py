"""``mmrepro doctor``: the environment, mmcv's operators, whether training repeats on this GPU."""
from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import DIFFERENT, DONE, ConfigError, MissingPackageError
from ..ops.choice import PROVIDERS
from ..report.report import Report
from ..report.table import Table
from ..runs.startup import has_mmdet
from ..util.files import read_json
from .arguments import Parser, at_least, finish, shared

CHECKOUT = 'single operators are checked from a checkout of mmrepro, with tools/gpu_check.py'
OF_GPU = ('out', 'quick', 'seconds', 'only', 'iters', 'against', 'size')


def _parser() -> Parser:
    parser = Parser(
        'doctor', 'Print what decides about bits on this machine (hardware, versions, flags and '
        'environment variables), and which packages are broken, outdated or untried, with the '
        'commands that fix them. With --operators, list mmcv\'s compiled operators: the provider '
        'of each and why, whether it gives the same bits every time, and who uses it. '
        'With --gpu, find out whether training repeats bit for bit on this device, detector by '
        f'detector, and what it costs; {CHECKOUT}.',
        'examples:\n  mmrepro doctor\n  mmrepro doctor --operators --device cuda --json\n'
        '  mmrepro doctor --gpu --out DIR --only detectors/DINO\n\n'
        'exit code: 0 done, 1 a package is broken or outdated, or with --gpu a row did not give '
        'equal bits or failed, 2 wrong usage, 3 with --gpu, no row ran',
        shared(json=None))
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument('--operators', nargs='?', const='auto', choices=PROVIDERS,
                      help='list the operators; with a value, the choices of this '
                      "randomness.operators, or mmcv's own (compiled) (default: auto, as in a "
                      'deterministic run)')
    kind.add_argument('--gpu', action='store_true', help='check that training repeats')
    parser.add_argument('--device', choices=('cpu', 'cuda'),
                        help='of --operators it need not be there (default: cuda if there is one; '
                        'with --gpu: cuda)')
    group = parser.add_argument_group('--gpu')
    group.add_argument('--out', metavar='DIR', help='folder for gpu_check.json and gpu_check.html')
    group.add_argument('--quick', action='store_true',
                       help='small inputs, few repetitions, two iterations')
    group.add_argument('--seconds', type=float, help='limit of time (450)')
    group.add_argument('--only', metavar='REGEX',
                       help='rows whose "group/name" matches, e.g. "detectors/DINO"')
    group.add_argument('--iters', type=at_least(1), metavar='N',
                       help='iterations of a detector (20; quick: 2)')
    group.add_argument('--against', metavar='FILE',
                       help='gpu_check.json of another process or machine: compare digests; '
                       'on the same machine they must be equal')
    group.add_argument('--size', type=at_least(1), metavar='N',
                       help='pixels of an image (640; quick: 128)')
    return parser


def main(argv: Sequence[str] | None = None, operators: Mapping[str, Any] = {}) -> int:
    """Print the report; with ``--gpu``, exit code 1: a row failed or gave different bits.

    Args:
        operators: groups of rows (:class:`mmrepro.doctor.RowGroup`) that ``--gpu`` runs besides
            the detectors, by name. ``tools/gpu_check.py`` has those of a checkout.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.gpu:
        shown = list(sys.argv[1:] if argv is None else argv)
        return _check(args, parser, shown, operators)
    parser.refuse(args, 'is for --gpu', *OF_GPU)
    device = args.device or ('cuda' if torch.cuda.is_available() else 'cpu')
    if args.operators is not None:
        return _list_operators(args, device)
    from ..doctor import environment, package_problems
    parts, problems = environment(device), package_problems()
    header = ('packages', 'state', 'problem', 'source')
    tables = [Table((), [(name, str(value)) for name, value in rows.items()], part)
              for part, rows in parts.items()]
    if problems:
        tables += [Table(header, [[row[name] for name in header] for row in problems])]
    return finish(Report(
        '', 'fix these known problems of the packages with, in this order:' if problems else
        'no known problem of the installed packages',
        DIFFERENT if any(row['state'] != 'untried' for row in problems) else DONE, tables,
        advice=[row['command'] for row in problems], data=dict(parts, problems=problems)), args)


def _list_operators(args: argparse.Namespace, device: str) -> int:
    from ..ops import catalogue
    try:
        entries = catalogue(device, args.operators)
    except ModuleNotFoundError as error:
        raise MissingPackageError(f'{error}; install "mmcv-lite<2.2" or mmcv') from error
    same = ['-' if entry.provider == 'none' else 'yes' if entry.deterministic else 'NO'
            for entry in entries]
    return finish(Report(
        '', f'{len(entries)} operators, operators={args.operators!r}: {same.count("NO")} not '
        f'deterministic on {device}, {same.count("-")} not available (they import, and say what '
        'to install when called)', tables=[Table(
            ('operator', 'provider', f'same bits on {device}', 'why this provider', 'used by'),
            [(entry.operator, entry.provider, bits, entry.reason, entry.users)
             for entry, bits in zip(entries, same)])],
        data=dict(provider=args.operators, device=device, operators=entries)), args)


def _check(args: argparse.Namespace, parser: Parser, words: Sequence[str],
           operators: Mapping[str, Any]) -> int:
    if args.out is None:
        parser.error('--gpu needs --out DIR')
    try:
        re.compile(args.only or '')
    except re.error as error:
        parser.error(f'--only {args.only}: not a regular expression: {error}')
    parser.make_folder(args.out, '--out')
    shape = {'machine': object, **{f'{group}?': {str: dict} for group in (*operators, 'detectors')}}
    against = read_json(args.against, ConfigError, shape) if args.against else None
    if not has_mmdet():
        raise MissingPackageError('--gpu trains detectors of MMDetection, which is not installed: '
                                  'pip install "mmcv-lite<2.2" mmdet')
    device = args.device or 'cuda'
    if device == 'cuda' and not torch.cuda.is_available():
        raise ConfigError('this torch sees no CUDA device; --device cpu runs the same code on the '
                          'processor')
    from ..doctor import Settings, check, report

    def tell(group: str, name: str, result: dict[str, Any]) -> None:
        """Print a row and write all so far, so that an interrupted check leaves its results."""
        row = result[group][name]
        print(f'{group:9} {name:30} {row.get("seconds", 0.):6.1f} s  {report.verdict(row)}',
              file=sys.stderr, flush=True)
        report.report_of(result, operators).write(args.out, 'gpu_check')

    # by default the size of a usual schedule on a GPU, or a small one
    settings = Settings(device, args.quick, args.iters or (2 if args.quick else 20),
                        args.size or (128 if args.quick else 640))
    # names of folders may be private
    placeholders = {args.out: 'DIR', f'--out={args.out}': '--out=DIR', args.against: 'FILE',
                    f'--against={args.against}': '--against=FILE'}
    command = ' '.join(['doctor', *(placeholders.get(word, word) for word in words)])
    seconds = 450. if args.seconds is None else args.seconds
    result = check(settings, seconds, args.only or '', command, operators, tell, against)
    if not any(result[group] for group in (*operators, 'detectors')):
        parser.error(f'--only {args.only}: no row matches'
                     + ('' if operators else f'; {CHECKOUT}'))
    whole = report.report_of(result, operators)
    whole.data['written'] = whole.write(args.out, 'gpu_check')
    whole.advice += [] if operators else [f'{CHECKOUT.capitalize()}.']
    return finish(whole, args)
