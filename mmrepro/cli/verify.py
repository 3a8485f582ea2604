"""``mmrepro verify``: train in fresh processes, vary what must not matter, compare the bits."""
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from mmengine.config import Config

from ..demo import use_data, write_dataset
from ..errors import FingerprintError, MissingDataError
from ..exit_codes import DIFFERENT, DONE
from ..localise import entry
from ..localise.search import LocaliseResult
from ..report.terminal import show
from ..runs.config_edits import prepare, virtual_ranks
from ..runs.launcher import TrainingFailed, one_thread_each
from ..runs.progress import ProgressLine
from ..verify.variations import USUAL, VARIATIONS, VariationResult, verify
from .arguments import Parser, quiet_when_reader_leaves

ITERATIONS = 5
DEMO_DATA = 'data/demo'
ALL = 'all'  # of --vary
# variations that are events of a run, not changes of its config: parameters of localise_config
EVENTS = {'resume': 'resume_b', 'validation': 'validate_b'}


@quiet_when_reader_leaves
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: all equal; 1: a difference, or a training failed; 2: wrong usage."""
    parser = Parser(
        'verify', 'Train a config in several fresh processes, varying what must not matter, and '
        'compare the bits.',
        'variations:\n' + '\n'.join(
            f'  {name:<10}  {one.title}{"" if name in USUAL else " (not by default)"}'
            for name, one in VARIATIONS.items())
        + '\n\nexample:\n  mmrepro verify configs/demo/faster-rcnn_r50_fpn_demo.py --demo-data')
    parser.add_argument('config', metavar='CONFIG')
    parser.add_number('--iters', ITERATIONS, 'N', 'iterations of each run')
    parser.add_argument('--vary', metavar='NAME,...',
                        help=f'what to vary, or all (default: {",".join(USUAL)}; of virtual ranks '
                        'ranks as well)')
    parser.add_argument('--virtual-ranks', type=int, metavar='V',
                        help='train V virtual ranks; `ranks` then changes the number of processes')
    parser.add_argument('--full', action='store_true',
                        help='images, batch and weights as in the config')
    parser.add_argument('--level', choices=('step', 'parameter', 'module'), default='step',
                        help='how much the fingerprints say (default: step)')
    parser.add_argument('--demo-data', nargs='?', const=DEMO_DATA, metavar='DIR',
                        help=f'train on the demonstration dataset, written to DIR ({DEMO_DATA})')
    parser.add_config_options()
    parser.add_argument('--jobs', type=int, metavar='N',
                        help='runs at a time (default: 2 where there are cores for them, 1 on a '
                        'GPU)')
    parser.add_argument('--json', action='store_true', help='print the certificate as JSON')
    parser.add_argument('--localise', action='store_true',
                        help='when bits differ, go on and name the cause')
    parser.add_argument('--work-dir', default='work_dirs/verify', metavar='DIR',
                        help='for logs and fingerprints (default: work_dirs/verify)')
    args = parser.parse_args(argv)
    given = ','.join(USUAL) if args.vary is None else args.vary
    names = list(VARIATIONS) if given.strip() == ALL else list(dict.fromkeys(
        name.strip() for name in given.split(',') if name.strip()))
    unknown = [name for name in names if name not in VARIATIONS]
    if unknown or not names:
        parser.error(f'--vary {args.vary}: {", ".join(unknown) or "nothing"} is not allowed; '
                     f'allowed: {",".join(VARIATIONS)}, or {ALL}')
    parser.check_least(args, iters=1, jobs=1, virtual_ranks=2)
    cfg = _read(args, parser)
    if args.vary is None and virtual_ranks(cfg) is not None:
        names.append('ranks')
    notes = _prepare(cfg, names, args, parser)
    threads = int(one_thread_each()['OMP_NUM_THREADS'])
    import torch
    jobs = args.jobs or (1 if torch.cuda.is_available() else
                         max(1, min(2, (os.cpu_count() or 1) // threads)))
    started = time.monotonic()
    parser.make_folder(args.work_dir)
    try:
        with ProgressLine(sys.stderr) as line:
            results = verify(cfg, args.work_dir, names, args.iters, jobs, args.level, line.say)
    except TrainingFailed as error:
        _show_failure(error, args, notes)
        return DIFFERENT
    except FingerprintError as error:
        print(f'\n{error}', file=sys.stderr)
        return DIFFERENT
    notes.append(f'{args.iters} iterations, fingerprints of level {args.level}, '
                 f'{time.monotonic() - started:.0f} s')
    same = all(result.equal or result.skipped for result in results) and any(
        result.equal for result in results)
    if not args.json:
        show(certificate(args.config, results, notes, args.work_dir))
    found = _localise(results, args.work_dir, args.iters) if args.localise else None
    if args.json:
        variations = [dict(name=result.name, title=result.title, equal=result.equal,
                           skipped=result.skipped or None, remark=result.remark or None,
                           difference=result.difference.as_dict() if result.difference else None)
                      for result in results]
        print(json.dumps(dict(
            config=args.config, same=same, iterations=args.iters, level=args.level, notes=notes,
            work_dir=args.work_dir, variations=variations,
            localise=found.as_dict() if found else None), indent=1))
    elif found:
        show(found.text())
    return DONE if same else DIFFERENT


def _show_failure(error: TrainingFailed, args: argparse.Namespace, notes: list[str]) -> None:
    """Why there is no certificate; what a self-check of a training has found is a verdict."""
    if error.finding is None:
        print(f'\n{error}', file=sys.stderr)
    elif args.json:
        print(json.dumps(dict(config=args.config, same=False, notes=notes, work_dir=args.work_dir,
                              variations=[], finding=error.finding, log=error.log), indent=1))
    else:
        show('\n'.join([args.config, *(f'  {note}' for note in notes), '',
                        'DIFFERENT BITS within one run, before it was compared with others:',
                        *(f'  {line}' for line in error.finding.splitlines()), '',
                        f'All of its output is in {error.log}']))


def _read(args: argparse.Namespace, parser: Parser) -> Config:
    cfg = parser.read_config(args.config, args.cfg_options)
    if args.virtual_ranks is not None:
        cfg.randomness = dict(cfg.get('randomness') or {}, virtual_ranks=args.virtual_ranks)
    return cfg


def _prepare(cfg: Config, names: Sequence[str], args: argparse.Namespace,
             parser: Parser) -> list[str]:
    """Make ``cfg`` one to verify; returns what was done to it."""
    notes = []
    try:
        if args.demo_data is not None:
            write_dataset(args.demo_data)
            use_data(cfg, os.path.abspath(args.demo_data))
            notes.append(f'data: the demonstration dataset in {args.demo_data}')
        return notes + prepare(cfg, names, args.full)
    except (MissingDataError, OSError, KeyError, ImportError) as error:
        parser.error(f'{args.config}: {error}')


def _localise(results: Sequence[VariationResult], work_dir: str,
              iterations: int) -> LocaliseResult | None:
    """Name the cause of the first variation that differs; see ``mmrepro localise``."""
    first = next((result for result in results if result.difference is not None), None)
    if first is None:
        return None
    name = first.name
    if VARIATIONS[name].prepare or VARIATIONS[name].elsewhere:
        print(f'\n{name}: mmrepro localise cannot repeat what surrounds this run; the first field '
              'that differs says where to look (docs/how-to/my-runs-differ.md)', file=sys.stderr)
        return None
    reference, other = (os.path.join(work_dir, which) for which in (first.reference, name))
    folder = entry.unused_folder(os.path.join(work_dir, 'localise'))
    os.makedirs(folder, exist_ok=True)
    try:
        if name not in EVENTS:
            print(f'\nmmrepro localise {reference} {other}', file=sys.stderr, flush=True)
            return entry.localise_runs(reference, other, folder)
        # the reference's config has no validation that run B could do
        config = os.path.join(reference if name == 'resume' else other, 'config.py')
        half = max(1, iterations // 2)
        print(f'\nmmrepro localise {config} --{EVENTS[name].replace("_", "-")} {half} --iters '
              f'{iterations}', file=sys.stderr, flush=True)
        return entry.localise_config(config, folder, iterations, **{EVENTS[name]: half})
    except (TrainingFailed, FingerprintError, ValueError) as error:
        print(error, file=sys.stderr)
        return None


def certificate(config: str, results: Sequence[VariationResult], notes: Sequence[str],
                work_dir: str) -> str:
    """The table that the command prints."""
    width = max(len(result.title) for result in results)
    lines = [f'{config}', *(f'  {note}' for note in notes), '']
    for result in results:
        verdict = (f'not run: {result.skipped}' if result.skipped else
                   f'DIFFERENT  {result.difference.text()}' if not result.equal else
                   f'equal ({result.remark})' if result.remark else 'equal')
        lines.append(f'  {result.name:<10}  {result.title:<{width}}  {verdict}')
    different = [result for result in results if result.difference is not None]
    if different:
        lines += ['', f'DIFFERENT BITS in {len(different)} of {len(results)} variations. Both '
                  f'runs are in {work_dir}; to see them side by side:',
                  f'  mmrepro compare {os.path.join(work_dir, different[0].reference)} '
                  f'{os.path.join(work_dir, different[0].name)}']
    elif any(result.equal for result in results):
        lines += ['', 'SAME BITS: batches, losses, gradients, parameters, buffers and optimizer '
                  'state agree after every iteration'
                  + ('; with other instruction sets, batches do' if any(
                      result.remark for result in results) else '')]
    else:
        lines += ['', 'NOTHING WAS COMPARED']
    return '\n'.join(lines)
