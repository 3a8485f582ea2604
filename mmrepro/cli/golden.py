"""``mmrepro golden``: keep the bits of a short run in the repository, and check them."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ..demo import use_data, write_dataset
from ..errors import ConfigError, FingerprintError, GoldenError, MissingDataError
from ..exit_codes import DIFFERENT, DONE, NOTHING_TO_COMPARE
from ..facts.compatibility import table
from ..report.terminal import show
from ..runs.config_files import read_config
from ..runs.launcher import TrainingFailed
from ..runs.progress import ProgressLine
from ..verify import golden
from ..verify.golden import Checked, Recipe
from .arguments import OptionsAsGiven, Parser, quiet_when_reader_leaves, setting

ITERATIONS = 3
DEMO_DATA = os.path.join('data', 'demo')


def _parser() -> Parser:
    parser = Parser(
        'golden', 'Record the fingerprints of a short run of a config, for this class of hardware '
        'and versions, into a folder that belongs into the repository; or check that a run of '
        'today still has them. Start it where the paths of the configs begin.',
        'example:\n  %(prog)s record configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data\n'
        '  %(prog)s check\n\nexit code: 0 all equal, 1 different, or a training failed, 2 wrong '
        'usage, 3 no golden for this machine')
    parser.add_argument('action', choices=('record', 'check'), help='what to do')
    parser.add_argument('configs', metavar='CONFIG', nargs='*',
                        help='paths of configs (check: of those only; default: of all goldens)')
    parser.add_argument('--goldens', default='goldens', metavar='DIR',
                        help='where the goldens are (default: goldens)')
    parser.add_argument('--work-dir', default=os.path.join('work_dirs', 'golden'), metavar='DIR',
                        help='for the runs (default: work_dirs/golden)')
    parser.add_argument('--json', action='store_true', help='print the outcome as JSON')
    group = parser.add_argument_group('record')
    group.add_argument('--iters', type=int, metavar='N',
                       help=f'iterations (default: {ITERATIONS})')
    group.add_argument('--level', choices=('step', 'parameter', 'module'),
                       help='how much the fingerprints say (default: step)')
    group.add_argument('--full', action='store_true',
                       help='images, batch and weights as in the config (default: small)')
    group.add_argument('--demo-data', nargs='?', const=DEMO_DATA, metavar='DIR',
                       help=f'train on the demonstration dataset, written to DIR ({DEMO_DATA})')
    group.add_argument('--cfg-options', nargs='+', action=OptionsAsGiven, metavar='KEY=VALUE',
                       help='change settings of the config')
    group = parser.add_argument_group('check')
    group.add_argument('--missing', choices=('fail', 'pass', 'record'), default='fail',
                       help='where there is no golden for this machine: exit with code 3, with '
                       'code 0, or record one and exit with code 0 (default: fail)')
    parser.set_defaults(options_as_given=())
    return parser


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: recorded, or all equal; 1: different; 2: wrong usage; 3: nothing to compare."""
    parser = _parser()
    args = parser.parse_args(argv)
    parser.check_least(args, iters=1)
    try:
        if args.action == 'record':
            return _record(args, parser)
        return _check(args, parser)
    except (GoldenError, ConfigError, MissingDataError, FingerprintError, OSError, KeyError,
            ImportError) as error:
        parser.error(str(error))
    except TrainingFailed as error:
        print(f'\n{error}', file=sys.stderr)
        return DIFFERENT


def _record(args: argparse.Namespace, parser: Parser) -> int:
    if not args.configs:
        parser.error('record needs a config')
    for config in args.configs:
        recipe = Recipe(os.path.normpath(config), args.iters or ITERATIONS, args.level or 'step',
                        args.demo_data, args.full, list(args.options_as_given))
        kept = golden.record(recipe, args.goldens, _train(recipe, args.work_dir))
        print(json.dumps(dict(config=config, golden=kept)) if args.json else f'recorded {kept}')
    return DONE


def _check(args: argparse.Namespace, parser: Parser) -> int:
    given = [name for name in ('iters', 'level', 'demo_data', 'cfg_options') if getattr(args, name)]
    if given or args.full:
        parser.error(f'--{(given or ["full"])[0].replace("_", "-")} is for record: check trains '
                     'what was recorded')
    found: list[Checked] = []
    for recipe in golden.read_recipes(args.goldens, args.configs):
        run = _train(recipe, args.work_dir)
        one = golden.check(recipe, args.goldens, run)
        found.append(one)
        if not args.json:
            show(_text(one, recipe, args, run))
        if one.golden is None and args.missing == 'record':
            kept = golden.record(recipe, args.goldens, run)
            print(f'recorded {kept}', file=sys.stderr)
    lacking = any(one.equal is None for one in found) and args.missing == 'fail'
    code = (DIFFERENT if any(one.equal is False for one in found) else
            NOTHING_TO_COMPARE if lacking else DONE)
    if args.json:
        print(json.dumps(dict(exit_code=code, goldens=[dict(
            config=one.name, machine=one.class_name, golden=one.golden, equal=one.equal,
            iterations=one.iterations, nearest=one.nearest or None,
            difference=one.difference.as_dict() if one.difference else None,
            facts=[fact._asdict() for fact in one.facts]) for one in found]), indent=1,
            default=str))
    return code


def _train(recipe: Recipe, work_dir: str) -> str:
    if not os.path.isfile(recipe.config):
        raise GoldenError(f'{recipe.config}: no such config (seen from {os.getcwd()})')
    cfg = read_config(recipe.config, dict(map(setting, recipe.options)))
    if recipe.demo_data is not None:
        write_dataset(recipe.demo_data)
        # as the recipe says it, because batches hold the paths of their images
        use_data(cfg, recipe.demo_data)
    size = 'images, batch and weights as in the config' if recipe.full else 'small'
    print(f'{recipe.name}: {size}; no validation, no checkpoints; fingerprints', file=sys.stderr)
    line = ProgressLine(sys.stderr)
    with line:
        return golden.train(recipe, cfg, work_dir, line.say)


def _text(one: Checked, recipe: Recipe, args: argparse.Namespace, run: str) -> str:
    if one.golden is None:
        lines = [f'NO GOLDEN for this machine: {one.name}, {one.class_name}']
        if one.nearest:
            lines.append(f'  the nearest is {one.nearest}; different:\n{table(one.facts)}')
        if args.missing != 'record':
            lines.append('  --missing record keeps the bits of this machine')
        return '\n'.join(lines)
    if one.equal:
        return f'EQUAL: {one.name}, {one.iterations} iterations, {one.class_name}'
    lines = [f'DIFFERENT after {one.iterations} equal iterations: {one.name}, '
             f'{one.difference.text()} (first the golden, then this run)']
    if one.facts:
        lines.append(f'different since it was recorded:\n{table(one.facts)}')
    lines.append(f'  mmrepro compare {one.golden} {run}')
    lines.append('  if the change is meant: mmrepro golden record, and commit the result')
    return '\n'.join(lines)
