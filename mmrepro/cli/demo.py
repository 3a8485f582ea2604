"""``mmrepro demo``: train one config twice and compare the weights after every iteration."""
from __future__ import annotations

import os
import sys
import time
from typing import List, Optional, Sequence, Tuple

from ..demo.dataset import check_coco, refusal, write_dataset
from ..demo.shipped_configs import reads_coco, shipped
from ..demo.two_runs import RUNS, DemoRun, Record, prepare, train
from ..exit_codes import DIFFERENT, DONE, USAGE
from ..runs.launcher import TrainingFailed
from ..runs.progress import ProgressLine
from ..runs.startup import has_mmdet
from .arguments import Parser

__all__ = ['compare', 'main']

DEFAULT_CONFIG = 'configs/demo/faster-rcnn_r50_fpn_demo.py'
WITHOUT_MMDET = 'configs/demo/classifier_demo.py'


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code 0: every iteration agrees; 1: one differs, or a run failed; 2: wrong usage."""
    parser = Parser('demo', 'Train one config twice, in two processes, and compare the weights '
                    'after every iteration.', 'example:\n  mmrepro demo --epochs 3')
    data = parser.add_mutually_exclusive_group()
    data.add_argument('--data', default='data/demo', metavar='DIR',
                      help='where the demonstration dataset is written (default: data/demo)')
    data.add_argument('--coco', metavar='DIR', help='train on COCO 2017 in this folder instead')
    parser.add_argument('--config', metavar='CONFIG', default=None,
                        help='a config of configs/demo (default: Faster R-CNN R50-FPN; without '
                        'MMDetection an image classifier)')
    parser.add_number('--images', 6, 'N', 'train on the first N images')
    parser.add_number('--epochs', 2, 'N', 'epochs over these images')
    parser.add_argument('--work-dir', default='work_dirs/demo', metavar='DIR',
                        help='where configs and logs go (default: work_dirs/demo)')
    args = parser.parse_args(argv)
    parser.check_least(args, images=1, epochs=1)
    if args.coco is not None:
        try:
            check_coco(args.coco)
        except FileNotFoundError as error:
            parser.error(f'--coco {error}')
    if args.config is None:
        args.config = shipped(DEFAULT_CONFIG if has_mmdet() else WITHOUT_MMDET)
        if not has_mmdet():
            print('MMDetection is not installed: a small image classifier takes the place of the '
                  'detector', flush=True)
    elif not os.path.isfile(args.config):
        parser.error(f'--config {args.config}: no such file')
    parser.make_folder(args.work_dir)
    root, digest = args.coco or args.data, None
    detection = reads_coco(args.config)
    if not detection and args.coco is not None:
        parser.error(f'--coco {args.coco}: {args.config} does not read COCO')
    if detection and args.coco is None:
        try:
            digest = write_dataset(root)
        except (OSError, ModuleNotFoundError) as error:
            print(f'{parser.prog}: {refusal(error, root)}', file=sys.stderr)
            return USAGE
    source = root if detection else 'cut out of the photographs'
    print(f'data: {source}' + (f', digest {digest[:16]}' if digest else ''))
    records: List[List[Record]] = []
    for run in RUNS:
        folder = os.path.join(args.work_dir, run.name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, 'config.py')
        prepare(args.config, run, root, args.coco is not None, args.images,
                args.epochs).dump(path)
        try:
            records.append(_train(run, path, folder))
        except TrainingFailed as error:
            print(f'\n{error}', file=sys.stderr)
            return DIFFERENT
    table, same = compare(*records)
    print(f'\n{RUNS[0].title()}\n{RUNS[1].title()}\n\n{table}')
    return DONE if same else DIFFERENT


def _train(run: DemoRun, config: str, folder: str) -> List[Record]:
    print(run.title(), flush=True)
    started = time.monotonic()
    with ProgressLine(sys.stdout) as line:
        line.say('  starting')
        return train(run, config, folder, lambda record: line.say(
            f'  iteration {record["iteration"]}/{record["total"]}  loss {_loss(record)}  '
            f'{time.monotonic() - started:.0f} s'))


def compare(first: Sequence[Record], second: Sequence[Record]) -> Tuple[str, bool]:
    """A table of both runs, iteration by iteration, with the verdict; and whether they agree."""
    lines = [f'{"iteration":>9}  {"loss A":>12}  {"loss B":>12}  {"weights A":<16}  '
             f'{"weights B":<16}  same bits']
    differing: Optional[int] = None
    for a, b in zip(first, second):
        equal = all(a[key] == b[key] for key in ('weights', 'optimizer', 'loss'))
        if not equal and differing is None:
            differing = a['iteration']
        lines.append(f'{a["iteration"]:>9}  {_loss(a):>12}  {_loss(b):>12}  '
                     f'{a["weights"][:16]}  {b["weights"][:16]}  {"yes" if equal else "NO"}')
    same = False
    if len(first) != len(second) or not first:
        verdict = f'DIFFERENT: {len(first)} iterations in run A, {len(second)} in run B'
    elif differing is not None:
        verdict = f'DIFFERENT from iteration {differing} on'
    else:
        same, verdict = True, ('SAME BITS: loss, weights and optimizer state agree after each of '
                               f'{len(first)} iterations')
    return '\n'.join([*lines, '', verdict]), same


def _loss(record: Record) -> str:
    return '-' if record['loss'] is None else f'{record["loss"]:.8f}'
