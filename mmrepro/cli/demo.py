"""``mmrepro demo``: train one config several times, compare the weights after every iteration."""
from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ..demo.dataset import reads_coco, shipped, write_dataset
from ..errors import DONE
from ..runs.launcher import progress_line
from ..runs.startup import has_mmdet
from ..verbs import demo
from .arguments import DEMO_DATA, Parser, at_least, shared

DEFAULT_CONFIG = 'configs/demo/rtmdet_tiny_demo.py'
WITHOUT_MMDET = 'configs/demo/classifier_demo.py'
IMAGES, IMAGES_PER_RANK, IMAGES_IN_ALL = 6, 2, 24
PROCESSES = (1, 2)
OF_TRAINING = ('virtual_ranks', 'work_dir', 'config', 'images', 'epochs', 'portable', 'processes')


def _parser() -> Parser:
    parser = Parser(
        'demo', 'Train one config with two numbers of workers, without mmrepro and with it, where '
        'one run is killed and resumed. Compare the bits after every iteration. With '
        '--virtual-ranks, train the same ranks on one process and on two. With --data-only, write '
        'the demonstration dataset and train nothing.',
        'examples:\n  mmrepro demo --epochs 3\n  mmrepro demo --virtual-ranks 4\n'
        '  mmrepro demo --data-only --data data/demo',
        shared(virtual_ranks=None, work_dir=os.path.join('work_dirs', 'demo')))
    parser.add_argument('--data', default=DEMO_DATA, metavar='DIR',
                        help='where the demonstration dataset is written (default: %(default)s)')
    parser.add_argument('--config', metavar='CONFIG', default=None,
                        help='a config of configs/demo (default: RTMDet-tiny; without '
                        'MMDetection an image classifier)')
    parser.add_argument('--images', type=at_least(1), metavar='N', help='train on the first N '
                        f'images (default: {IMAGES}; with virtual ranks, {IMAGES_PER_RANK} for '
                        'each)')
    parser.add_argument('--epochs', type=at_least(1), default=2, metavar='N',
                        help='epochs over these images (default: %(default)s)')
    parser.add_argument('--portable', action='store_true',
                        help='train on the CPU with the bits of every x86-64 CPU')
    parser.add_argument('--processes', metavar='N,N', help='the numbers of processes, 1 to V '
                        f'(default: {",".join(map(str, PROCESSES))})')
    group = parser.add_argument_group('only the dataset')
    group.add_argument('--data-only', action='store_true',
                       help='write a small COCO-format detection dataset made of real photographs')
    # seeds as those of a training; a million images is a typing error
    group.add_argument('--seed', type=at_least(0, 2**32 - 1), metavar='N',
                       help='another seed, other images (0)')
    group.add_argument('--train', type=at_least(1, 1_000_000), metavar='N',
                       help=f'training images ({IMAGES_IN_ALL})')
    group.add_argument('--val', type=at_least(1, 1_000_000), metavar='N',
                       help='validation images (8)')
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Train and compare; exit code 0: every iteration agrees, 1: an iteration differs."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.data_only:
        parser.refuse(args, 'has no meaning with --data-only', *OF_TRAINING)
        return _write_data(args)
    parser.refuse(args, 'is for --data-only', 'seed', 'train', 'val')
    numbers = _processes(args, parser)
    if args.images is None:
        args.images = IMAGES
        if args.virtual_ranks:
            args.images = min(IMAGES_PER_RANK * args.virtual_ranks, IMAGES_IN_ALL)
    if args.config is None:
        args.config = shipped(DEFAULT_CONFIG if has_mmdet() else WITHOUT_MMDET)
        if not has_mmdet():
            print('MMDetection is not installed: a small image classifier takes the place of the '
                  'detector', flush=True)
    elif not os.path.isfile(args.config):
        parser.error(f'--config {args.config}: no such file')
    coco = reads_coco(args.config)
    if args.images > IMAGES_IN_ALL and coco:
        parser.error(f'--images {args.images}: the dataset has {IMAGES_IN_ALL}')
    parser.make_folder(args.work_dir)
    print('data:', f'{args.data}, digest {write_dataset(args.data)[:16]}' if coco else
          'cut out of the photographs')
    with progress_line(sys.stdout) as on_progress:
        report = demo(args.config, args.data, args.work_dir, images=args.images,
                      epochs=args.epochs, virtual_ranks=args.virtual_ranks, processes=numbers,
                      portable=args.portable, on_start=print, on_progress=on_progress)
    print('', *report.data['runs'], '', sep='\n')
    report.show()
    print('plot:', report.write(args.work_dir, 'demo')['losses.png'])
    return report.exit_code


def _write_data(args: argparse.Namespace) -> int:
    folder, train, val = args.data, args.train or IMAGES_IN_ALL, args.val or 8
    digest = write_dataset(folder, args.seed or 0, train, val)
    print(f'{folder}: {train} training and {val} validation images, digest {digest}')
    return DONE


def _processes(args: argparse.Namespace, parser: Parser) -> Sequence[int]:
    """Return the numbers of processes of the runs to compare; () without virtual ranks."""
    if args.virtual_ranks is None:
        if args.processes is not None:
            parser.error(f'--processes {args.processes}: needs --virtual-ranks V')
        return ()
    if args.processes is None:
        return PROCESSES
    numbers = parser.processes(args.processes, args.virtual_ranks)
    if len(numbers) < 2:
        parser.error(f'--processes {args.processes}: give two numbers or more, to compare them')
    return numbers
