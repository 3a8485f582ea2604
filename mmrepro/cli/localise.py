"""``mmrepro localise``: the command line."""
from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any, Dict, List, Optional, Sequence, Tuple

from mmengine.config import Config

from ..fingerprint.reader import Run, TraceError, read_run
from ..localise.compared_runs import Side, start
from ..localise.search import Localiser, Outcome, first_iteration
from ..report.highlight import show
from ..runs.launcher import TrainingFailed
from . import program_name
from .arguments import Options, Parser, quiet_when_reader_leaves, setting

__all__ = ['main', 'outcome_of']

DEFAULT_ITERATIONS = 20
VARIABLE = re.compile(r'[A-Z][A-Z0-9_]*')  # a key written so is one of the environment
# variables of a manifest that a side gets again; others belong to the machine or the launcher
KEPT_VARIABLES = re.compile(r'PYTHONHASHSEED|OMP_.*|MKL_.*|CUBLAS_.*|CUDNN_.*|NCCL_.*|TORCH_.*|'
                            r'PYTORCH_.*|ATEN_.*|ONEDNN_.*|KMP_.*')

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
def main(argv: Optional[Sequence[str]] = None) -> int:
    """Returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    outcome = _outcome(args, parser)
    if outcome is None:
        return 1
    if args.json:
        print(json.dumps(outcome.as_dict(), indent=1))
    else:
        show(outcome.text())
    return 0 if outcome.verdict == 'equal' else 1


def outcome_of(argv: Sequence[str]) -> Optional[Outcome]:
    """What the command finds, unprinted; None when a training failed, which it says."""
    parser = _parser()
    return _outcome(parser.parse_args(argv), parser)


def _outcome(args: argparse.Namespace, parser: Parser) -> Optional[Outcome]:
    say = _Progress()
    try:
        work_dir = parser.make_folder(
            _new_folder(args.work_dir or os.path.join('work_dirs', 'localise')))
        if args.other is None:
            outcome = _of_config(args, parser, work_dir, say)
        else:
            outcome = _of_runs(args, work_dir, say)
    except ImportError as error:
        parser.error(f'{args.config}: {error}')
    except (TraceError, ValueError, FileNotFoundError) as error:
        parser.error(str(error))
    except TrainingFailed as error:
        say.end()
        print(error, file=sys.stderr)
        return None
    say.end()
    return outcome


def _parser() -> Parser:
    parser = Parser(
        prog=program_name('localise'), description='Name the first thing that differs between two '
        'runs: iteration, phase, module, operator, and the likely cause.',
        formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EPILOG)
    parser.add_argument('config', metavar='CONFIG | RUN_A',
                        help='a config, or the work directory of a run with fingerprints')
    parser.add_argument('other', metavar='RUN_B', nargs='?',
                        help='the work directory of the other run')
    parser.add_argument('--iters', type=int, default=DEFAULT_ITERATIONS, metavar='N',
                        help=f'iterations to compare (default: {DEFAULT_ITERATIONS})')
    parser.add_argument('--a', nargs='+', default=[], metavar='KEY=VALUE',
                        help='what is different on side A: settings of the config, and variables '
                        'of the environment (NAMES IN CAPITALS)')
    parser.add_argument('--b', nargs='+', default=[], metavar='KEY=VALUE', help='... on side B')
    parser.add_argument('--resume-b', type=int, metavar='ITERATION',
                        help='end side B before this iteration and resume it')
    parser.add_argument('--validate-b', type=int, metavar='ITERATION',
                        help='let side B validate before this iteration')
    parser.add_argument('--ranks', type=int, default=1, metavar='N',
                        help='processes of each side (default: 1)')
    parser.add_argument('--cfg-options', nargs='+', action=Options, default={},
                        metavar='KEY=VALUE', help='settings for both sides')
    parser.add_argument('--no-values', action='store_true',
                        help='do not run once more for how far the results are apart')
    parser.add_argument('--work-dir', metavar='DIR', help='where the runs write (default: a new '
                        'folder work_dirs/localise, work_dirs/localise.1, ...)')
    parser.add_argument('--json', action='store_true', help='print the result as JSON')
    return parser


def _of_config(args: argparse.Namespace, parser: argparse.ArgumentParser, work_dir: str,
               say: _Progress) -> Outcome:
    if not os.path.isfile(args.config):
        parser.error(f'{args.config}: no such config; to compare two runs, give both of their '
                     'work directories')
    for name, least in (('iters', 1), ('ranks', 1), ('resume_b', 1),
                        ('validate_b', 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f'--{name.replace("_", "-")} {value}: must be {least} or more')
    sides = []
    for name, given in (('A', args.a), ('B', args.b)):
        options, env = _split(given, parser)
        cfg = Config.fromfile(args.config)
        cfg.merge_from_dict({**args.cfg_options, **options})
        if args.validate_b and cfg.get('val_cfg') is None:
            parser.error(f'--validate-b {args.validate_b}: {args.config} has no val_cfg')
        path = os.path.join(work_dir, f'config_{name}.py')
        cfg.dump(path)
        turns = dict(resume_at=args.resume_b, validate_at=args.validate_b) if name == 'B' else {}
        sides.append(Side(name, path, env, args.ranks, asked={**options, **env}, **turns))
    return Localiser(tuple(sides), work_dir, _launch(say), say).search(
        args.iters, not args.no_values)


def _of_runs(args: argparse.Namespace, work_dir: str, say: _Progress) -> Outcome:
    runs = read_run(args.config), read_run(args.other)
    _, parting = first_iteration(*runs)
    sides = tuple(_side_of(name, run, parting.iteration if parting else 0, work_dir)
                  for name, run in zip('AB', runs))
    for side in sides:
        if side.checkpoint:
            say(f'side {side.name} continues from {side.checkpoint}')
    return Localiser(sides, work_dir, _launch(say), say).explain(*runs, not args.no_values)


def _side_of(name: str, run: Run, iteration: int, work_dir: str) -> Side:
    """The side that repeats a run: its config, its variables, its nearest checkpoint."""
    if not run.manifests:
        raise TraceError(f'{run.work_dir}: has no manifest, so the run cannot be repeated')
    manifest: Dict[str, Any] = run.manifests[0]
    path = os.path.join(work_dir, f'config_{name}.py')
    with open(path, 'w', encoding='utf-8') as file:
        file.write(manifest['config']['text'])
    env = {key: str(value) for key, value in (manifest.get('environment') or {}).items()
           if KEPT_VARIABLES.fullmatch(key) and value is not None}
    return Side(name, path, env, len(run.ranks), None, _nearest(run.work_dir, iteration))


def _nearest(folder: str, iteration: int) -> Optional[str]:
    """The last checkpoint of a run from which the iteration before this one still comes."""
    from ..checkpoint.files import CheckpointError, load
    best: Tuple[int, Optional[str]] = (0, None)
    for name in sorted(os.listdir(folder)):
        if not name.endswith('.pth'):
            continue
        path = os.path.join(folder, name)
        try:
            meta = load(path, map_location='meta').get('meta', {})
        except CheckpointError:
            continue
        if 'mmrepro' in meta and best[0] < meta['iter'] < iteration:
            best = meta['iter'], path
    return best[1]


def _split(given: List[str], parser: argparse.ArgumentParser) -> Tuple[Dict[str, Any],
                                                                      Dict[str, str]]:
    """Settings of the config, and variables of the environment."""
    options: Dict[str, Any] = {}
    env: Dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition('=')
        if equals and VARIABLE.fullmatch(key):
            env[key] = value
            continue
        try:
            key, options[key] = setting(text)
        except ValueError as error:
            parser.error(str(error))
    return options, env


def _new_folder(wanted: str) -> str:
    folder, number = wanted, 0
    while os.path.isdir(folder) and os.listdir(folder):
        number += 1
        folder = f'{wanted}.{number}'
    return folder


def _launch(say: _Progress) -> Any:
    return lambda side, folder, plan: start(side, folder, plan, say.count)


class _Progress:
    """Lines on the standard error; the count of iterations is written over on a terminal."""

    def __init__(self) -> None:
        self._open = False

    def __call__(self, line: str) -> None:
        self.end()
        print(line, file=sys.stderr, flush=True)

    def count(self, done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f'\r  {done}/{of}', end='', file=sys.stderr, flush=True)
            self._open = True

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr)
            self._open = False
