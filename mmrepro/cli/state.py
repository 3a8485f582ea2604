"""``mmrepro state``: name state in Python attributes that a config loses when it resumes."""
from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial

from ..exit_codes import DIFFERENT, DONE
from ..runs.launcher import PlannedRun
from ..verify.state_probe import StateVerdict, probe, train_all
from .training_arguments import load, training_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: nothing is lost; 1: named attributes are lost, or bits differ."""
    parser = training_parser('state', 'Name state in Python attributes that a config loses when it '
                             'resumes.')
    parser.epilog = 'example:\n  %(prog)s configs/demo/yolox_s_demo.py --at 2 --iters 4'
    parser.add_number('--at', 2, 'K', 'resume after this many iterations')
    parser.add_number('--iters', 4, 'N', 'iterations of the uninterrupted runs')
    parser.add_argument('--json', metavar='FILE', help='write the outcome to a file')
    args = parser.parse_args(argv)
    if args.json:
        parser.make_folder_of(args.json, '--json')
    if not 0 < args.at < args.iters:
        parser.error(f'--at {args.at} --iters {args.iters}: 0 < K < N is needed')

    def say(run: PlannedRun) -> None:
        print(f'mmrepro state: {run.folder} is done', file=sys.stderr)

    folder = args.work_dir or tempfile.mkdtemp(prefix='mmrepro-state-')
    try:
        verdict = probe(load(args, parser), args.at, args.iters, folder,
                        partial(train_all, done=say))
    except RuntimeError as error:  # TrainingFailed is one
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return DIFFERENT
    finally:
        if args.work_dir is None:
            shutil.rmtree(folder)
    print(text_of(verdict))
    if args.json:
        with open(args.json, 'w', encoding='utf-8') as file:
            json.dump(dict(verdict._asdict(), lost=[row._asdict() for row in verdict.lost]), file,
                      indent=2)
    return DONE if verdict.good else DIFFERENT


def text_of(verdict: StateVerdict) -> str:
    span = f'iterations {verdict.at} to {verdict.iterations - 1}'
    lines = [f'{span}: the resumed run ' + (f'differs first in {verdict.first}' if verdict.first
                                            else 'has the bits of the uninterrupted one')]
    if not verdict.lost:
        return '\n'.join([*lines, 'no attribute is lost' if not verdict.first else
                          'no attribute explains it: `mmrepro localise` compares operators'])
    lines.append(f'{len(verdict.lost)} attributes are lost when the run resumes:')
    for row in verdict.lost:
        lines += [f'  {row.owner} ({row.cls}).{row.attribute}',
                  f'      in the uninterrupted run {row.then}, in the resumed one {row.now}']
    lines += ['keep them in checkpoints, in a module that the config imports:',
              '  from mmrepro.checkpoint import adapters']
    for cls in dict.fromkeys(row.cls for row in verdict.lost):
        names = ', '.join(repr(row.attribute) for row in verdict.lost if row.cls == cls)
        lines.append(f"  adapters.register({cls}, {names}, why='...')")
    return '\n'.join(lines)
