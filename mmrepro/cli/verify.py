"""``mmrepro verify``: train in fresh processes, vary what must not matter, compare the bits."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..runs.launcher import progress_line
from ..verbs import verify, verify_run
from ..verbs.variations import USUAL, VARIATIONS
from .arguments import Parser, at_least, finish, shared

ALL, KILLS = 'all', 'kills'  # of --vary
WORK_DIR = os.path.join('work_dirs', 'verify')
# options that have no meaning for a work directory
OF_CONFIGS = ('vary', 'iters', 'level', 'full', 'demo_data', 'jobs', 'at', 'localise',
              'virtual_ranks', 'cfg_options', 'work_dir')


def _parser() -> Parser:
    rows = '\n'.join(f'  {name:<10}  {row.title}{"" if name in USUAL else " (not by default)"}'
                     for name, row in VARIATIONS.items())
    parser = Parser(
        'verify', 'Train a config in several fresh processes, varying what must not matter, and '
        'compare the bits of every iteration. Of a work directory, repeat the first iterations and '
        'resume from its checkpoints.',
        f'variations:\n{rows}\n\n'
        'examples:\n  mmrepro verify configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data\n'
        '  mmrepro verify configs/demo/yolox_s_demo.py --vary resume --localise\n'
        '  mmrepro verify work_dirs/monday\n\n'
        'exit code: 0 all equal, 1 a difference, or a training failed, 2 wrong usage, '
        '3 nothing was compared',
        shared(iters=5, virtual_ranks=None, full=False, level='step', demo_data=None,
               cfg_options=None, json=None, work_dir=None))
    parser.add_argument('config', metavar='CONFIG', help='path of a config, or package::path; or '
                        'the work directory of a run, to repeat and resume it as it is')
    parser.add_argument('--vary', metavar='NAME,...',
                        help=f'what to vary, or all (default: {",".join(USUAL)}; of virtual ranks '
                        'ranks as well)')
    parser.add_argument('--jobs', type=at_least(1), metavar='N',
                        help='runs at a time (default: 2 where there are cores for them, 1 on a '
                        'GPU)')
    parser.add_argument('--localise', action='store_true',
                        help='when bits differ, go on and name the cause')
    parser.add_argument('--at', type=at_least(1), metavar='K', help='resume and validate after '
                        'this many iterations (default: half of them)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Compare runs; exit code 0: all equal, 1: different, 3: nothing was compared."""
    parser = _parser()
    args = parser.parse_args(argv)
    if os.path.isdir(args.config):
        parser.refuse(args, 'has no meaning for a work directory', *OF_CONFIGS)
        with progress_line(sys.stderr) as on_progress:
            return finish(verify_run(args.config, on_progress), args)
    names = None
    if args.vary is not None:
        names = [name.strip() for name in args.vary.split(',') if name.strip()]
        if KILLS in names:
            parser.error(f'--vary {KILLS}: interruptions at random moments are tested in a '
                         'checkout of mmrepro: python -m dev.kills CONFIG')
        names = [row for name in names for row in (VARIATIONS if name == ALL else (name, ))]
    work_dir = parser.make_folder(args.work_dir or WORK_DIR)
    with progress_line(sys.stderr) as on_progress:
        report = verify(
            args.config, vary=names, iterations=args.iters, level=args.level, full=args.full,
            ranks=args.virtual_ranks, demo_data=args.demo_data, options=args.cfg_options,
            jobs=args.jobs, work_dir=work_dir, at=args.at, explain=args.localise,
            on_progress=on_progress)
    return finish(report, args)
