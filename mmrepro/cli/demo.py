"""Train one config twice, in two processes, and compare the weights after every iteration."""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from mmengine.config import Config

from ..demo.dataset import check_coco, refusal, write_dataset
from ..demo.demo_config import shipped, use_coco_classes, use_data
from ..demo.digest_hook import PREFIX
from . import program_name
from .arguments import Parser

__all__ = ['RUNS', 'Run', 'compare', 'main', 'prepare']

DEFAULT_CONFIG = 'configs/demo/faster-rcnn_r50_fpn_demo.py'
LOG_TAIL = 30  # lines of a failed run's log that are shown


class Run(NamedTuple):
    """One of the two runs: its name and what is different about it."""
    name: str
    num_workers: int
    hash_seed: str

    def title(self) -> str:
        return f'run {self.name}: num_workers={self.num_workers}, PYTHONHASHSEED={self.hash_seed}'


RUNS = (Run('A', num_workers=0, hash_seed='0'), Run('B', num_workers=2, hash_seed='1'))

Record = Dict[str, Any]


class RunFailed(RuntimeError):
    """A training process ended with an error."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code 0: every iteration agrees; 1: one differs, or a run failed; 2: wrong usage."""
    # mmengine imports it for every base of another package; nothing that the reader could change
    warnings.filterwarnings('ignore', message='pkg_resources is deprecated')
    args = _parse(argv)
    root, digest = args.data, None
    if args.coco is not None:
        root = args.coco
    else:
        try:
            digest = write_dataset(root)
        except (OSError, ModuleNotFoundError) as error:
            print(f'{program_name("demo")}: {refusal(error, root)}', file=sys.stderr)
            return 2
    print(f'data: {root}' + (f', digest {digest[:16]}' if digest else ''))
    records: List[List[Record]] = []
    for run in RUNS:
        folder = os.path.join(args.work_dir, run.name)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, 'config.py')
        prepare(args.config, run, root, args.coco is not None, args.images,
                args.epochs).dump(path)
        try:
            records.append(_train(run, path, folder))
        except RunFailed as error:
            print(f'\n{error}', file=sys.stderr)
            return 1
    table, same = compare(*records)
    print(f'\n{RUNS[0].title()}\n{RUNS[1].title()}\n\n{table}')
    return 0 if same else 1


def prepare(config: str, run: Run, root: str, coco: bool, images: int, epochs: int) -> Config:
    """The config of one run: few images, no validation, no checkpoints, a digest per iteration."""
    cfg = Config.fromfile(config, import_custom_modules=False)
    use_data(cfg, root)
    if coco:
        use_coco_classes(cfg)
    loader = cfg.train_dataloader
    loader.num_workers = run.num_workers
    loader.persistent_workers = run.num_workers > 0
    innermost = loader.dataset
    while 'dataset' in innermost:
        innermost = innermost['dataset']
    innermost.indices = images
    cfg.train_cfg.max_epochs = epochs
    for phase in ('val', 'test'):
        for key in (f'{phase}_cfg', f'{phase}_dataloader', f'{phase}_evaluator'):
            cfg[key] = None
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=-1, save_last=False)
    cfg.custom_hooks = [*cfg.get('custom_hooks', []),
                        dict(type='mmrepro.demo.digest_hook.DigestHook')]
    return cfg


def compare(first: Sequence[Record], second: Sequence[Record]) -> Tuple[str, bool]:
    """A table of both runs, iteration by iteration, with the verdict; and whether they agree."""
    lines = [f'{"iteration":>9}  {"loss A":>12}  {"loss B":>12}  {"weights A":<16}  '
             f'{"weights B":<16}  same bits']
    differing: Optional[int] = None
    for a, b in zip(first, second):
        same = all(a[key] == b[key] for key in ('weights', 'optimizer', 'loss'))
        if not same and differing is None:
            differing = a['iteration']
        lines.append(f'{a["iteration"]:>9}  {_loss(a):>12}  {_loss(b):>12}  '
                     f'{a["weights"][:16]}  {b["weights"][:16]}  {"yes" if same else "NO"}')
    if len(first) != len(second) or not first:
        verdict = f'DIFFERENT: {len(first)} iterations in run A, {len(second)} in run B'
        return '\n'.join([*lines, '', verdict]), False
    if differing is not None:
        verdict = f'DIFFERENT from iteration {differing} on'
        return '\n'.join([*lines, '', verdict]), False
    verdict = (f'SAME BITS: loss, weights and optimizer state agree after each of {len(first)} '
               'iterations')
    return '\n'.join([*lines, '', verdict]), True


def _loss(record: Record) -> str:
    return '-' if record['loss'] is None else f'{record["loss"]:.8f}'


def _train(run: Run, config: str, folder: str) -> List[Record]:
    """Start ``tools/train.py`` and collect its digests, with a progress line."""
    command = [sys.executable, '-u', shipped('tools/train.py'), config, '--work-dir', folder]
    # one thread per operator is the fastest for images this small, and by far on a busy machine
    threads = os.environ.get('OMP_NUM_THREADS', '1')
    env = {'MKL_NUM_THREADS': threads, **os.environ, 'OMP_NUM_THREADS': threads,
           'PYTHONHASHSEED': run.hash_seed}
    log_path = os.path.join(folder, 'output.txt')
    records: List[Record] = []
    started = time.monotonic()
    print(f'{run.title()}\n  starting', end='', flush=True)
    with open(log_path, 'w', encoding='utf-8') as log, subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, text=True,
            encoding='utf-8', errors='replace') as process:
        for line in process.stdout:
            log.write(line)
            if line.startswith(PREFIX):
                records.append(json.loads(line[len(PREFIX):]))
                _progress(records[-1], started)
    print()
    if process.returncode != 0:
        with open(log_path, encoding='utf-8') as log:
            tail = ''.join(log.readlines()[-LOG_TAIL:])
        raise RunFailed(f'{tail}\nrun {run.name} failed with exit code {process.returncode}; all '
                        f'of its output is in {log_path}')
    return records


def _progress(record: Record, started: float) -> None:
    text = (f'  iteration {record["iteration"]}/{record["total"]}  loss {_loss(record)}  '
            f'{time.monotonic() - started:.0f} s')
    # one line that is written over on a terminal, one line per iteration in a log file
    print(f'\r{text}' if sys.stdout.isatty() else f'\n{text}', end='', flush=True)


def _parse(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    parser = Parser(
        prog=program_name('demo'), description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='example:\n  mmrepro demo --epochs 3')
    data = parser.add_mutually_exclusive_group()
    data.add_argument('--data', default='data/demo', metavar='DIR',
                      help='where the demonstration data set is written (default: data/demo)')
    data.add_argument('--coco', metavar='DIR', help='train on COCO 2017 in this folder instead')
    parser.add_argument('--config', metavar='CONFIG', default=None,
                        help='a config of configs/demo (default: Faster R-CNN R50-FPN)')
    parser.add_argument('--images', type=int, default=6, metavar='N',
                        help='train on the first N images (default: 6)')
    parser.add_argument('--epochs', type=int, default=2, metavar='N',
                        help='epochs over these images (default: 2)')
    parser.add_argument('--work-dir', default='work_dirs/demo', metavar='DIR',
                        help='where configs and logs go (default: work_dirs/demo)')
    args = parser.parse_args(argv)
    for name in ('images', 'epochs'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} {getattr(args, name)}: must be 1 or more')
    if args.coco is not None:
        try:
            check_coco(args.coco)
        except FileNotFoundError as error:
            parser.error(f'--coco {error}')
    if args.config is None:
        args.config = shipped(DEFAULT_CONFIG)
    elif not os.path.isfile(args.config):
        parser.error(f'--config {args.config}: no such file')
    parser.make_folder(args.work_dir)
    return args
