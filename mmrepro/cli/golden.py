"""``mmrepro golden``: keep the bits of a short run in the repository, and check them."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..demo import use_data, write_dataset
from ..errors import DIFFERENT, DONE, NOTHING_TO_COMPARE, GoldenError
from ..facts.compatibility import table
from ..report.report import Report
from ..runs.config_files import read_config, setting
from ..runs.progress import progress_line
from ..verify import golden
from ..verify.golden import Checked, Recipe
from .arguments import Parser, finish, shared

ITERATIONS, LEVEL = 3, 'step'
GOLDENS = 'goldens'
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
        shared(json=None, work_dir=os.path.join('work_dirs', 'golden')),
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
        return finish(_record(args), args)
    parser.refuse(args, 'is for record: check trains what was recorded', *OF_RECORD)
    return finish(_check(args), args)


def _record(args: argparse.Namespace) -> Report:
    goldens = {}
    for config in args.configs:
        recipe = Recipe(os.path.normpath(config), args.iters or ITERATIONS, args.level or LEVEL,
                        args.demo_data, args.full, list(args.options_as_given))
        goldens[config] = golden.record(recipe, args.goldens, _train(recipe, args.work_dir))
    return Report('', '\n'.join(f'recorded {path}' for path in goldens.values()),
                  data=dict(goldens=goldens))


def _check(args: argparse.Namespace) -> Report:
    results: list[Checked] = []
    for recipe in golden.read_recipes(args.goldens, args.configs):
        run = _train(recipe, args.work_dir)
        checked = golden.check(recipe, args.goldens, run)
        results.append(checked)
        if args.json != '-':
            Report('', _text(checked, args.missing, run),
                   DONE if checked.equal else DIFFERENT).show()
        if checked.golden is None and args.missing == 'record':
            kept = golden.record(recipe, args.goldens, run)
            print(f'recorded {kept}', file=sys.stderr)
    lacking = any(checked.equal is None for checked in results) and args.missing == 'fail'
    code = (DIFFERENT if any(checked.equal is False for checked in results) else
            NOTHING_TO_COMPARE if lacking else DONE)
    return Report('', '', code, data=dict(goldens=[dict(
        config=checked.name, machine=checked.class_name, golden=checked.golden, equal=checked.equal,
        iterations=checked.iterations, nearest=checked.nearest or None,
        difference=checked.difference.as_dict() if checked.difference else None,
        facts=checked.facts) for checked in results]))


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
    with progress_line(sys.stderr) as say:
        return golden.train(recipe, cfg, work_dir, say)


def _text(checked: Checked, missing: str, run: str) -> str:
    if checked.equal:
        return f'EQUAL: {checked.name}, {checked.iterations} iterations, {checked.class_name}'
    if checked.golden is None:
        lines = [f'NO GOLDEN for this machine: {checked.name}, {checked.class_name}']
        if checked.nearest:
            lines.append(f'  the nearest is {checked.nearest}; different:\n{table(checked.facts)}')
        if missing != 'record':
            lines.append('  --missing record keeps the bits of this machine')
        return '\n'.join(lines)
    difference = checked.difference.text() if checked.difference else ''
    lines = [f'DIFFERENT after {checked.iterations} equal iterations: {checked.name}, '
             f'{difference} (first the golden, then this run)']
    if checked.facts:
        lines.append(f'different since it was recorded:\n{table(checked.facts)}')
    return '\n'.join([*lines, f'  mmrepro compare {checked.golden} {run}',
                      '  if the change is meant: mmrepro golden record, and commit the result'])
