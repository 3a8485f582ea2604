"""``mmrepro localise``: the command line."""
from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import FingerprintError
from ..localise.entry import DEFAULT_ITERATIONS, localise_config, localise_runs, unused_folder
from ..localise.search import LocaliseResult
from ..report.terminal import show
from ..runs.launcher import TrainingFailed
from .arguments import Parser, quiet_when_reader_leaves, setting

VARIABLE = re.compile(r'[A-Z][A-Z0-9_]*')  # a key of this form is an environment variable

EPILOG = '''example:
  %(prog)s configs/demo/faster-rcnn_r50_fpn_demo.py
      two runs of one config, in fresh processes
  %(prog)s CONFIG --b OMP_NUM_THREADS=1 train_dataloader.num_workers=4
      the config as it is, against the config with other settings
  %(prog)s CONFIG --resume-b 5
      an uninterrupted run against one that is resumed before iteration 5
  %(prog)s CONFIG --validate-b 5
      an uninterrupted run against one that validates before iteration 5
  %(prog)s work_dirs/first work_dirs/second
      two runs that were trained with --fingerprint

exit code: 0 no difference, 1 a difference (or a run that failed), 2 wrong usage'''


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: no difference; 1: a difference, or a run that failed; 2: wrong usage."""
    parser = Parser('localise', 'Name the first thing that differs between two runs: iteration, '
                    'phase, module, operator, and the likely cause.', EPILOG)
    parser.add_argument('config', metavar='CONFIG | RUN_A',
                        help='a config, or the work directory of a run with fingerprints')
    parser.add_argument('other', metavar='RUN_B', nargs='?',
                        help='the work directory of the other run')
    parser.add_number('--iters', DEFAULT_ITERATIONS, 'N', 'iterations to compare')
    parser.add_argument('--a', nargs='+', default=[], metavar='KEY=VALUE',
                        help='changes for run A: settings of the config, and environment variables '
                        '(NAMES IN CAPITALS)')
    parser.add_argument('--b', nargs='+', default=[], metavar='KEY=VALUE',
                        help='changes for run B')
    parser.add_argument('--resume-b', type=int, metavar='ITERATION',
                        help='end run B before this iteration and resume it')
    parser.add_argument('--validate-b', type=int, metavar='ITERATION',
                        help='let run B validate before this iteration')
    parser.add_number('--ranks', 1, 'N', 'processes of each run')
    parser.add_config_options('settings for both runs', default={})
    parser.add_argument('--no-values', action='store_true',
                        help='do not run once more to measure how far the results are apart')
    parser.add_argument('--work-dir', metavar='DIR', help='where the runs write (default: a new '
                        'folder work_dirs/localise, work_dirs/localise.1, ...)')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    args = parser.parse_args(argv)
    try:
        result = _localise(args, parser)
    except ImportError as error:
        parser.error(f'{args.config}: {error}')
    except (FingerprintError, ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except TrainingFailed as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(result.as_dict(), indent=1))
    else:
        show(result.text())
    return 0 if result.verdict == 'equal' else 1


def _localise(args: argparse.Namespace, parser: Parser) -> LocaliseResult:
    work_dir = parser.make_folder(
        unused_folder(args.work_dir or os.path.join('work_dirs', 'localise')))
    if args.other is not None:
        return localise_runs(args.config, args.other, work_dir, not args.no_values)
    if not os.path.isfile(args.config):
        parser.error(f'{args.config}: no such config; to compare two runs, give both of their '
                     'work directories')
    parser.check_least(args, iters=1, ranks=1, resume_b=1, validate_b=1)
    (settings_a, env_a), (settings_b, env_b) = map(_split, (args.a, args.b))
    return localise_config(
        args.config, work_dir, args.iters, common=args.cfg_options,
        settings=(settings_a, settings_b), env=(env_a, env_b), ranks=args.ranks,
        resume_b=args.resume_b, validate_b=args.validate_b, values=not args.no_values)


def _split(given: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings of the config, and environment variables."""
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition('=')
        if equals and VARIABLE.fullmatch(key):
            env[key] = value
        else:
            key, settings[key] = setting(text)
    return settings, env
