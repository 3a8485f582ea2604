"""``mmrepro golden``: keep the bits of a short run in the repository, and check them."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from ..report.report import Report
from ..runs.launcher import progress_line
from ..verbs.golden import (
    GOLDENS,
    ITERATIONS,
    LEVEL,
    WORK_DIR,
    check_goldens,
    record_goldens,
)
from .arguments import Parser, finish, shared

# options of `record`; `check` trains what was recorded
OF_RECORD = ('iters', 'level', 'demo_data', 'cfg_options', 'full')


def _parser() -> Parser:
    parser = Parser(
        'golden', 'Record the fingerprints of a short run of a config, for this class of hardware '
        'and versions, into a folder that belongs into the repository; or check that a run of '
        'today still has them. Start it where the paths of the configs begin.',
        'example:\n  %(prog)s record configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data\n'
        '  %(prog)s check\n\nexit code: 0 all equal, 1 different, or a training failed, 2 wrong '
        'usage, 3 no golden for this machine',
        shared(json=None, work_dir=WORK_DIR),
        shared(f'record ({ITERATIONS} iterations, level {LEVEL}, small, unless these say '
               'otherwise)', iters=None, level=None, full=False, demo_data=None, cfg_options=None))
    parser.add_argument('action', choices=('record', 'check'), help='what to do')
    parser.add_argument('configs', metavar='CONFIG', nargs='*',
                        help='paths of configs (check: of those only; default: of all goldens)')
    parser.add_argument('--goldens', default=GOLDENS, metavar='DIR',
                        help='where the goldens are (default: %(default)s)')
    group = parser.add_argument_group('check')
    group.add_argument('--missing', choices=('fail', 'pass', 'record'), default='fail',
                       help='where there is no golden for this machine: exit with code 3, with '
                       'code 0, or record one and exit with code 0 (default: fail)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Record or check; exit code 0: recorded or equal, 1: different, 3: nothing to compare."""
    parser = _parser()
    args = parser.parse_args(argv)
    parser.make_folder(args.work_dir)
    if args.action == 'record':
        if not args.configs:
            parser.error('record needs a config')
        parser.refuse(args, 'is for check', 'missing')
        parser.make_folder(args.goldens, '--goldens')
    else:
        parser.refuse(args, 'is for record: check trains what was recorded', *OF_RECORD)
    with progress_line(sys.stderr) as on_progress:
        def on_start(text: str) -> None:
            on_progress('')
            print(text, file=sys.stderr, flush=True)

        def on_report(report: Report) -> None:
            on_progress('')
            if args.json != '-':
                report.show()

        given = dict(goldens=args.goldens, work_dir=args.work_dir, on_start=on_start,
                     on_progress=on_progress)
        if args.action == 'record':
            report = record_goldens(
                args.configs, iterations=args.iters or ITERATIONS, level=args.level or LEVEL,
                demo_data=args.demo_data, full=args.full, options=args.options_as_given, **given)
        else:
            report = check_goldens(args.configs, missing=args.missing, on_report=on_report, **given)
    return finish(report, args)
