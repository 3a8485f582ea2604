"""``mmrepro replay``: train again from a manifest, compare, stop at the first difference."""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..facts.compatibility import FactDifference, table
from ..runs.launcher import progress_line
from ..verbs import export, replay
from .arguments import Parser, finish, shared


def main(argv: Sequence[str] | None = None) -> int:
    """Train again and compare; exit code 0: the same bits, 1: a difference."""
    parser = Parser('replay', 'Train again from a manifest; compare the fingerprints, stop at the '
                    'first difference.',
                    'example:\n  mmrepro replay work_dirs/faster-rcnn_r50_fpn_demo --iters 3\n'
                    '  mmrepro replay work_dirs/monday --export to_publish',
                    shared(iters=None, work_dir=None, json=None, cfg_options=None))
    parser.add_argument('run', metavar='RUN',
                        help='work directory of a run that was trained with --fingerprint, or '
                        'a folder that --export has written')
    parser.add_argument('--export', metavar='DIR', help='train nothing: write what somebody else '
                        'needs to repeat the run into a new folder')
    args = parser.parse_args(argv)
    if args.export is not None:
        parser.refuse(args, 'has no meaning: --export trains nothing', 'iters', 'work_dir',
                      'cfg_options')
        return finish(export(args.run, args.export), args)
    work_dir = args.work_dir or os.path.normpath(args.run) + '_replay'
    if os.path.isdir(args.run):
        parser.make_folder(work_dir)
    print('the settings of the run, except that no checkpoints are written', file=sys.stderr)

    with progress_line(sys.stderr) as on_progress:
        def on_differences(differences: Sequence[FactDifference]) -> None:
            on_progress('')
            if args.json != '-':
                print('environment:' if differences else 'environment: the same')
                print(table(differences) if differences else '', flush=True)

        report = replay(args.run, work_dir, args.iters, on_progress, on_differences,
                        args.cfg_options or {})
    return finish(report, args)
