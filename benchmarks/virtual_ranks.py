"""Measure the cost of virtual ranks against trainings that do the same work without them.

    python benchmarks/virtual_ranks.py DATA_ROOT [--out FILE] [--models NAME ...]
                                       [--ranks V ...] [--large]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Three comparisons, with the
contestants in turn, each in forked processes with one thread:

- V ranks in one process, against one process that accumulates V batches: processor time of an
  optimizer step in which no step is repeated (those are 11 of the first 1000), and the peak of
  memory over what the process had before it built the model. Where SyncBN makes statistics of V
  batches, also one process with V images in a batch.
- the peak of memory again, with images of nine times the area (--large).
- two processes with virtual_ranks=2, against two processes with mmrepro's DDP: processor time of
  both.

Prints Markdown tables, and writes JSON, to which a run with other models or ranks is added. A row
that is measured again keeps the ratios of its first measurement.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'support')]

from children import Child, join_ranks, silence_output  # noqa: E402

import mmrepro  # noqa: E402, F401  mmcv-lite has operators from here on
from mmrepro.config import is_due  # noqa: E402
from mmrepro.runs.launcher import free_port  # noqa: E402

# RTMDet communicates in the forward pass
MODELS = ('faster-rcnn_r50_fpn', 'retinanet_r50_fpn', 'yolox_s', 'rtmdet_tiny',
          'deformable-detr_r50')
LARGE_MODELS = MODELS[:-1]
LARGER = 3  # times as wide and as high
SIZES = ('scale', 'img_scale', 'size', 'crop_size', 'border', 'random_size_range')
RANKS = (2, 4, 8)
STEPS = 7  # of the optimizer; the first one is not measured, nor those that repeat a step
LIMIT = 1800  # seconds
TARGETS = dict(time=1.05, memory=1.15, ddp=1.03, batch=1.15)


class Clock(Hook):
    """Processor time of each step of the optimizer in which no step was repeated."""
    priority = 100

    def __init__(self, every: int, times: list[float]) -> None:
        self.every, self.times = every, times
        self.last: float | None = None
        self.repeated = False

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        self.repeated |= is_due(runner.iter + 1, runner.repro.self_checks.steps)
        if (runner.iter + 1) % self.every == 0:
            now = time.process_time()
            if self.last is not None and not self.repeated:
                self.times.append(now - self.last)
            self.last, self.repeated = now, False


def settings(model: str, data_root: str, iterations: int, larger: int = 1) -> Any:
    """Return the demo config of a model, with real widths and one small image per batch."""
    from mmrepro.demo.dataset import demo_config
    cfg = demo_config(model, data_root)
    cfg.train_cfg = dict(by_epoch=False, max_iters=iterations, val_interval=10 ** 6)
    cfg.train_dataloader.update(batch_size=1, num_workers=0, persistent_workers=False,
                                sampler=dict(type='InfiniteSampler', shuffle=True))
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.test_cfg = cfg.test_dataloader = cfg.test_evaluator = None
    cfg.default_hooks.checkpoint = None
    cfg.custom_hooks = [hook for hook in cfg.get('custom_hooks', []) if hook.type == 'EMAHook']
    cfg.log_level = 'ERROR'
    if model == 'yolox_s':
        cfg.sync_bn = 'torch'
        # draws the size of images by iteration, and the contestants differ in their number
        cfg.model.data_preprocessor.batch_augments = None
    _enlarge([cfg.train_dataloader.dataset, cfg.model.data_preprocessor], larger)
    return cfg


def _enlarge(node: Any, factor: int) -> None:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key in SIZES and isinstance(value, (list, tuple)):
            node[key] = tuple(factor * one for one in value)
        elif isinstance(value, (dict, list)):
            _enlarge(value, factor)


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes (Linux)."""
    text = Path('/proc/self/status').read_text()
    return int(re.search(rf'{field}:\s+(\d+) kB', text).group(1)) * 1024


def train(cfg: Any, every: int, process: int, processes: int, port: int) -> dict[str, Any]:
    """Train in this process; return seconds of each step and the peak of memory over the start."""
    from mmengine.runner import Runner

    from mmrepro.runs.startup import on_ranks
    silence_output()
    join_ranks(process, processes, port)
    if processes > 1:
        cfg.launcher = 'pytorch'
        cfg.env_cfg.dist_cfg = dict(backend='gloo')
    ctypes.CDLL(None).malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')
    before, clocks = resident('VmRSS'), []

    def main() -> None:
        times: list[float] = []
        clocks.append(times)
        runner = Runner.from_cfg(cfg)
        runner.register_hook(Clock(every, times), priority=100)
        runner.train()

    on_ranks(cfg, main)
    return dict(steps=clocks[0], bytes=resident('VmHWM') - before)


def run(cfg: Any, every: int, processes: int = 1) -> dict[str, Any]:
    """Return sums over the processes; ``steps`` is a list of seconds."""
    port = free_port()
    children = [Child(train, cfg, every, process, processes, port) for process in range(processes)]
    results = [child.result(LIMIT) for child in children]
    return dict(steps=[sum(parts) for parts in zip(*(one['steps'] for one in results))],
                bytes=sum(one['bytes'] for one in results))


def contest(contestants: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Run the functions of ``contestants`` alternately; return medians and peaks of memory."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in sorted(contestants, reverse=number % 2 == 1):
            found[name].append(contestants[name]())
    return {name: dict(
        seconds=statistics.median(second for one in runs for second in one['steps']),
        all_seconds=[one['steps'] for one in runs],
        mib=statistics.median(one['bytes'] for one in runs) / 2 ** 20)
        for name, runs in found.items()}


def against_accumulation(model: str, ranks: int, data_root: str, folder: str, rounds: int,
                         larger: int = 1) -> dict[str, Any]:
    steps = STEPS if larger == 1 else 3

    def config(iterations: int) -> Any:
        cfg = settings(model, data_root, iterations, larger)
        cfg.work_dir = tempfile.mkdtemp(dir=folder)
        return cfg

    def virtual(memory: str = 'shared') -> dict[str, Any]:
        cfg = config(steps)
        # the clock is a hook that the table does not know
        cfg.randomness.virtual_ranks = dict(ranks=ranks, memory=memory)
        return run(cfg, 1)

    def accumulating() -> dict[str, Any]:
        cfg = config(steps * ranks)
        cfg.pop('sync_bn', None)
        cfg.optim_wrapper.accumulative_counts = ranks
        return run(cfg, ranks)

    def batch() -> dict[str, Any]:
        cfg = config(steps)
        cfg.pop('sync_bn', None)
        cfg.train_dataloader.batch_size = ranks
        return run(cfg, 1)

    contestants = dict(virtual=virtual, accumulating=accumulating)
    if 'sync_bn' in settings(model, data_root, steps):
        contestants['batch'] = batch
    found = contest(contestants, rounds)
    return dict(model=model, ranks=ranks, **found, **_ratios(found, 'accumulating'))


def against_ddp(model: str, data_root: str, folder: str, rounds: int) -> dict[str, Any]:
    def start(ranks: Any) -> dict[str, Any]:
        cfg = settings(model, data_root, 2 * STEPS)
        cfg.work_dir = tempfile.mkdtemp(dir=folder)
        cfg.pop('sync_bn', None)  # DDP refuses it on a CPU
        cfg.randomness.virtual_ranks = ranks
        return run(cfg, 1, processes=2)

    found = contest(dict(virtual=lambda: start(2), ddp=lambda: start(None)), rounds)
    return dict(model=model, ranks=2, **found, **_ratios(found, 'ddp'))


def _ratios(found: dict[str, Any], other: str) -> dict[str, float]:
    return dict(time_ratio=found['virtual']['seconds'] / found[other]['seconds'],
                memory_ratio=found['virtual']['mib'] / found[other]['mib'])


def tables(report: dict[str, Any]) -> str:
    """Markdown."""
    lines = ['| model | V | a step of V accumulated batches | virtual ranks | memory, accumulated '
             '| virtual ranks |', '|---|---|---|---|---|---|']
    for row in report['accumulation']:
        other = row['accumulating']
        lines.append(f'| {row["model"]} | {row["ranks"]} | {other["seconds"]:.2f} s '
                     f'| {_against(row, "time")} | {other["mib"]:.0f} MiB '
                     f'| {_against(row, "memory")} |')
    lines += ['', '| model, one batch of V images | V | time | virtual ranks | memory '
              '| virtual ranks |', '|---|---|---|---|---|---|']
    for row in report['accumulation']:
        if 'batch' in row:
            ratio, other = _ratios(row, 'batch'), row['batch']
            lines.append(f'| {row["model"]} | {row["ranks"]} | {other["seconds"]:.2f} s '
                         f'| {ratio["time_ratio"]:.2f} x (goal {TARGETS["batch"]:.2f}) '
                         f'| {other["mib"]:.0f} MiB '
                         f'| {ratio["memory_ratio"]:.2f} x |')
    lines += ['', '| model, large images | V | memory, accumulated | virtual ranks '
              '| one batch of V |', '|---|---|---|---|---|']
    for row in report['large']:
        base = row['accumulating']['mib']
        cell = f'{row["batch"]["mib"] / base:.2f} x' if 'batch' in row else ''
        lines.append(f'| {row["model"]} | {row["ranks"]} | {base:.0f} MiB '
                     f'| {_against(row, "memory")} | {cell} |')
    lines += ['', '| model | DDP, two processes | `virtual_ranks=2`, two processes |',
              '|---|---|---|']
    for row in report['ddp']:
        lines.append(f'| {row["model"]} | {row["ddp"]["seconds"]:.2f} s '
                     f'| {_against(row, "ddp")} |')
    return '\n'.join(lines)


def _against(row: dict[str, Any], target: str) -> str:
    key = 'memory_ratio' if target == 'memory' else 'time_ratio'
    ratio, before, goal = row[key], row.get('before'), TARGETS[target]
    missed = '' if ratio <= goal else ', missed'
    if row.get('new'):
        return f'{ratio:.2f} x (goal {goal:.2f}{missed})'
    return f'{before[key]:.2f} x before, {ratio:.2f} x (goal {goal:.2f}{missed})' if before else \
        f'{ratio:.2f} x before (goal {goal:.2f}), not measured again'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root', nargs='?')
    parser.add_argument('--models', nargs='*', choices=MODELS)
    parser.add_argument('--ranks', nargs='*', type=int, default=RANKS)
    parser.add_argument('--rounds', type=int, default=1)
    parser.add_argument('--no-ddp', action='store_true', help='leave out the third comparison')
    parser.add_argument('--large', action='store_true', help='the second comparison only')
    parser.add_argument('--out', help='write JSON here')
    parser.add_argument('--page', action='store_true', help='print the tables of --out')
    args = parser.parse_args()
    report: dict[str, Any] = dict(torch=torch.__version__, accumulation=[], large=[], ddp=[])
    if args.out and os.path.exists(args.out):
        report = json.loads(Path(args.out).read_text())
    if args.page:
        print(tables(report))
        return

    import mmdet.datasets
    import mmdet.models  # noqa: F401  once, before the processes are forked
    torch.set_num_threads(1)

    def done(kind: str, row: dict[str, Any]) -> None:
        for old in report[kind]:
            if (old['model'], old['ranks']) == (row['model'], row['ranks']):
                if old.get('new'):
                    row['new'] = True
                else:
                    row['before'] = old.get('before') or {
                        key: old[key] for key in ('time_ratio', 'memory_ratio')}
                report[kind][report[kind].index(old)] = row
                break
        else:
            report[kind].append(dict(row, new=True))  # there was no such row before
        print(kind, row['model'], row['ranks'], f'{row["time_ratio"]:.3f}',
              f'{row["memory_ratio"]:.3f}', flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=1) + '\n')

    with tempfile.TemporaryDirectory() as folder:
        for model in args.models or (LARGE_MODELS if args.large else MODELS):
            for ranks in args.ranks:
                done('large' if args.large else 'accumulation', against_accumulation(
                    model, ranks, args.data_root, folder, args.rounds,
                    LARGER if args.large else 1))
            if not (args.no_ddp or args.large):
                done('ddp', against_ddp(model, args.data_root, folder, args.rounds))
    print(tables(report))


if __name__ == '__main__':
    main()
