"""``mmrepro localise CONFIG``, or two runs."""
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from ..localise.search import DEFAULT_ITERATIONS, localise
from ..runs.config_files import setting
from .arguments import Parser, at_least, finish, shared

VARIABLE = re.compile(r'[A-Z][A-Z0-9_]*')  # a key of this form is an environment variable

EPILOG = '''example:
  %(prog)s configs/demo/faster-rcnn_r50_fpn_demo.py
      two runs of one config, in fresh processes
  %(prog)s CONFIG --b OMP_NUM_THREADS=1 train_dataloader.num_workers=4
      the config as it is, against the config with changed settings
  %(prog)s CONFIG --resume-b 5
      an uninterrupted run against one that is resumed before iteration 5
  %(prog)s CONFIG --validate-b 5
      an uninterrupted run against one that validates before iteration 5
  %(prog)s work_dirs/first work_dirs/second
      two runs that were trained with --fingerprint

exit code: 0 no difference, 1 a difference (or a run that failed), 2 wrong usage'''


def main(argv: Sequence[str] | None = None) -> int:
    """Name the first difference; exit code 0: there is none, 1: there is a difference."""
    parser = Parser(
        'localise', 'Name the first thing that differs between two runs: iteration, phase, '
        'module, operator, and the likely cause.', EPILOG,
        shared(iters=DEFAULT_ITERATIONS, ranks=1, cfg_options=None, work_dir=None, json=None))
    parser.add_argument('config', metavar='CONFIG | RUN_A',
                        help='a config, or the work directory of a run with fingerprints')
    parser.add_argument('run_b', metavar='RUN_B', nargs='?', help='the work directory of run B')
    parser.add_argument('--a', nargs='+', default=[], metavar='KEY=VALUE',
                        help='changes for run A: settings of the config, and environment variables '
                        '(NAMES IN CAPITALS)')
    parser.add_argument('--b', nargs='+', default=[], metavar='KEY=VALUE',
                        help='changes for run B')
    parser.add_argument('--resume-b', type=at_least(1), metavar='ITERATION',
                        help='end run B before this iteration and resume it')
    parser.add_argument('--validate-b', type=at_least(1), metavar='ITERATION',
                        help='let run B validate before this iteration')
    parser.add_argument('--no-values', action='store_true',
                        help='do not run once more to measure how far the results are apart')
    args = parser.parse_args(argv)
    if args.run_b is None and os.path.isdir(args.config):
        parser.error(f'{args.config} is a folder; to compare two runs, give both of their work '
                     'directories')
    if args.run_b is not None:
        parser.refuse(args, 'is for a CONFIG: two runs are repeated as they were', 'a', 'b',
                      'resume_b', 'validate_b', 'cfg_options', 'ranks', 'iters')
    if args.work_dir is not None:
        parser.make_folder(args.work_dir)
    (settings_a, env_a), (settings_b, env_b) = map(_split, (args.a, args.b))
    return finish(localise(
        args.config, args.run_b, iterations=args.iters, options=args.cfg_options or {},
        settings=(settings_a, settings_b), env=(env_a, env_b), ranks=args.ranks,
        resume_b=args.resume_b, validate_b=args.validate_b, values=not args.no_values,
        work_dir=args.work_dir), args)


def _split(given: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the settings of the config, and the environment variables."""
    settings: dict[str, Any] = {}
    env: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition('=')
        if equals and VARIABLE.fullmatch(key):
            env[key] = value
        else:
            key, settings[key] = setting(text)
    return settings, env
