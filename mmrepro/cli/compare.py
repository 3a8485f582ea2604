"""``mmrepro compare RUN_A RUN_B``."""
from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from ..verbs import compare, compare_modules, compare_onnx
from .arguments import Parser, at_least, existing_checkpoint, finish, shared


def main(argv: Sequence[str] | None = None) -> int:
    """Compare two runs; 0: nothing differs, 1: something does, 3: nothing to compare."""
    parser = Parser(
        'compare', 'Where do two runs diverge, and how does the difference grow? With '
        'fingerprints (train --fingerprint) in both, bits are compared; without, what MMEngine '
        'logged: also of runs of stock MMEngine and of MMDetection 2.x.',
        'example:\n  %(prog)s work_dirs/monday work_dirs/tuesday --out comparison\n\n'
        'exit code: 0 nothing differs (with --tolerance: by more than it), 1 something does, '
        '2 wrong usage, 3 nothing to compare', shared(json=None))
    parser.add_argument('run_a', help='a work directory, a time-stamped folder of MMEngine, a '
                        'scalars.json, or a .log.json of mmcv 1.x')
    parser.add_argument('run_b', help='the run to compare it with')
    parser.add_argument('--out', metavar='DIR',
                        help='write plots (PNG), compare.html and compare.json here')
    parser.add_argument('--all', action='store_true',
                        help='list all differences in settings and environment, harmless ones '
                        'included')
    parser.add_argument('--no-weights', action='store_true',
                        help='leave checkpoints unread (they are large)')
    parser.add_argument('--tolerance', type=at_least(0, kind=float), metavar='REL',
                        help='for runs on different machines: report how far losses, norms and '
                        'metrics are apart, and exit with 1 if any exceeds this relative '
                        'difference')
    group = parser.add_argument_group('two configs or environments')
    group.add_argument('--trace', action='store_true',
                       help='RUN_A and RUN_B are configs or work directories: give both models the '
                       'same weights and batch, and name the first module whose output differs')
    group.add_argument('--checkpoint', metavar='FILE',
                       help='the weights (default: the last checkpoint of RUN_A, or initial ones)')
    group.add_argument('--python', metavar='PYTHON', help='run B with this interpreter, which '
                       'needs MMEngine, what the config uses, and mmrepro only with mmcv-lite')
    group = parser.add_argument_group('an exported model')
    group.add_argument('--onnx', metavar='FILE.onnx', help='RUN_A is a config, RUN_B a checkpoint: '
                       'name the first node of the exported model whose output differs from that '
                       'of its module by more than --tolerance (default: 0.001)')
    group.add_argument('--image', metavar='FILE',
                       help='the input, after the test pipeline (default: random numbers)')
    args = parser.parse_args(argv)
    for way, words in (('trace', ('checkpoint', 'python')), ('onnx', ('image', ))):
        if not getattr(args, way):
            parser.refuse(args, f'needs --{way}', *words)
        else:
            parser.refuse(args, f'has no meaning with --{way}', 'no_weights')
    if args.onnx:
        parser.refuse(args, 'has no meaning with --onnx', 'trace')
        for path in filter(None, (args.onnx, args.image)):
            existing_checkpoint(path, 'file')
    if args.out:
        parser.make_folder(args.out, '--out')
    if args.onnx:
        report = compare_onnx(args.onnx, args.run_a, args.run_b, image=args.image,
                              tolerance=args.tolerance)
    elif args.trace:
        report = compare_modules(
            args.run_a, args.run_b, checkpoint=args.checkpoint, python=args.python,
            tolerance=args.tolerance, on_progress=partial(print, file=sys.stderr))
    else:
        report = compare(args.run_a, args.run_b, weights=not args.no_weights,
                         tolerance=args.tolerance)
    report.data['written'] = report.write(args.out, 'compare') if args.out else {}
    if not args.out:
        report.advice.append('--out DIR writes plots and an HTML report')
    return finish(report, args, args.all)
