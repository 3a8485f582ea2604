"""``mmrepro replay``: train again from a manifest, compare, stop at the first difference."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import FingerprintError
from ..exit_codes import DIFFERENT, DONE
from ..facts.compatibility import SEVERITIES
from ..report.terminal import show
from ..runs.launcher import TrainingFailed
from ..runs.progress import ProgressLine
from ..text import shorten
from ..verify.export import export
from ..verify.replay import replay
from .arguments import Parser, quiet_when_reader_leaves

MAX_ROWS = 12  # differences of the environment that are shown of each severity


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the same bits; 1: a difference, or the training failed; 2: wrong usage."""
    parser = Parser('replay', 'Train again from a manifest; compare the fingerprints, stop at the '
                    'first difference.',
                    'example:\n  mmrepro replay work_dirs/faster-rcnn_r50_fpn_demo --iters 3\n'
                    '  mmrepro replay work_dirs/monday --export to_publish')
    parser.add_argument('run', metavar='RUN',
                        help='work directory of a run that was trained with --fingerprint, or '
                        'a folder that --export has written')
    parser.add_argument('--iters', type=int, metavar='N',
                        help='repeat the first N iterations (default: all that were recorded)')
    parser.add_argument('--work-dir', metavar='DIR', help='for the replay (default: RUN_replay)')
    parser.add_config_options('change settings that say where files lie on this machine')
    parser.add_argument('--export', metavar='DIR', help='train nothing: write what somebody else '
                        'needs to repeat the run into a new folder')
    parser.add_argument('--json', action='store_true', help='print the outcome as JSON')
    args = parser.parse_args(argv)
    parser.check_least(args, iters=1)
    if args.export is not None:
        return _export(args, parser)
    work_dir = args.work_dir or os.path.normpath(args.run) + '_replay'
    line = ProgressLine(sys.stderr)
    print('the settings of the run, except that no checkpoints are written', file=sys.stderr)

    def report(found: list[Any]) -> None:
        line.end()
        if not args.json:
            show(_environment_text(found))

    try:
        with line:
            outcome = replay(args.run, work_dir, args.iters, line.say, report, args.cfg_options)
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


def _export(args: argparse.Namespace, parser: Parser) -> int:
    given = [name for name in ('iters', 'work_dir', 'cfg_options') if getattr(args, name)]
    if given:
        parser.error(f'--export trains nothing: --{given[0].replace("_", "-")} has no meaning')
    try:
        files = export(args.run, args.export)
    except (FingerprintError, OSError) as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps(dict(run=args.run, export=args.export, files=files), indent=1))
    else:
        show('\n'.join([*(f'wrote {os.path.join(args.export, name)}' for name in files),
                        f'look through it before you publish it; mmrepro replay {args.export} '
                        'checks it']))
    return DONE


def _environment_text(found: Sequence[Any]) -> str:
    if not found:
        return 'environment: the same'
    lines = ['environment: then -> now']
    for severity in SEVERITIES:
        rows = [one for one in found if one.severity == severity]
        if rows:
            lines.append(f'  {severity}:')
        lines += [f'    {one.name}: {shorten(one.then, 40)} -> {shorten(one.now, 40)}  '
                  f'({one.consequence})' for one in rows[:MAX_ROWS]]
        if len(rows) > MAX_ROWS:
            lines.append(f'    and {len(rows) - MAX_ROWS} more')
    return '\n'.join(lines)
