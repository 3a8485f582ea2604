"""``mmrepro replay``: train again from a manifest, compare, stop at the first difference."""
from __future__ import annotations

import json
import os
import sys
from typing import Any, List, Optional, Sequence

from ..exit_codes import DIFFERENT, DONE
from ..fingerprint.manifest import ORDER
from ..fingerprint.reader import FingerprintError
from ..report.terminal import show
from ..runs.launcher import TrainingFailed
from ..runs.progress import ProgressLine
from ..text import shorten
from ..verify.replay import replay
from .arguments import Parser, quiet_when_reader_leaves

__all__ = ['main']

MAX_ROWS = 12  # differences of the environment that are shown of each severity


@quiet_when_reader_leaves
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code 0: the same bits; 1: a difference, or the training failed; 2: wrong usage."""
    parser = Parser('replay', 'Train again from a manifest; compare the fingerprints, stop at the '
                    'first difference.',
                    'example:\n  mmrepro replay work_dirs/faster-rcnn_r50_fpn_demo --iters 3')
    parser.add_argument('run', metavar='RUN',
                        help='work directory of a run that was trained with --fingerprint')
    parser.add_argument('--iters', type=int, metavar='N',
                        help='repeat the first N iterations (default: all that were recorded)')
    parser.add_argument('--work-dir', metavar='DIR', help='for the replay (default: RUN_replay)')
    parser.add_argument('--json', action='store_true', help='print the outcome as JSON')
    args = parser.parse_args(argv)
    parser.check_least(args, iters=1)
    work_dir = args.work_dir or os.path.normpath(args.run) + '_replay'
    line = ProgressLine(sys.stderr)

    def report(found: List[Any]) -> None:
        line.end()
        if not args.json:
            show(_environment_text(found))

    try:
        with line:
            outcome = replay(args.run, work_dir, args.iters, line.say, report)
    except FingerprintError as error:
        parser.error(str(error))
    except TrainingFailed as error:
        print(f'\n{error}', file=sys.stderr)
        return DIFFERENT
    same = outcome.difference is None
    if args.json:
        print(json.dumps(dict(
            run=args.run, work_dir=work_dir, same=same, compared=outcome.compared,
            rank=outcome.rank, notes=outcome.notes,
            difference=None if same else outcome.difference.as_dict(),
            environment=[one._asdict() for one in outcome.environment]), indent=1, default=str))
    else:
        verdict = (f'SAME BITS: {outcome.compared} iterations of {args.run} were repeated exactly'
                   if same else f'DIFFERENT after {outcome.compared} equal iterations: '
                   f'{outcome.difference.text()} (first the original, then the replay)')
        show('\n'.join([*(f'note: {note}' for note in outcome.notes), verdict]))
    return DONE if same else DIFFERENT


def _environment_text(found: Sequence[Any]) -> str:
    if not found:
        return 'environment: the same'
    lines = ['environment: then -> now']
    for severity in ORDER:
        rows = [one for one in found if one.severity == severity]
        if rows:
            lines.append(f'  {severity}:')
        lines += [f'    {one.name}: {shorten(one.then, 40)} -> {shorten(one.now, 40)}  '
                  f'({one.consequence})' for one in rows[:MAX_ROWS]]
        if len(rows) > MAX_ROWS:
            lines.append(f'    and {len(rows) - MAX_ROWS} more')
    return '\n'.join(lines)
