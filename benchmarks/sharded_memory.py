"""Measure what a process of virtual ranks holds in memory, with shared and with sharded weights.

    export MALLOC_MMAP_THRESHOLD_=1048576
    python benchmarks/sharded_memory.py DATA_ROOT [--models NAME ...] [--processes N ...]
    python benchmarks/sharded_memory.py --draw
    python benchmarks/sharded_memory.py DATA_ROOT --against-ddp [--models NAME ...] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Four ranks, with one small image each,
train RetinaNet on one, two and four processes, with ResNet-50 and SGD, and with Swin-B and AdamW.
Of the process that holds most:

- *kept*: bytes of weights and optimizer state after a step, counted; gradients are freed then
- *peak*: of resident memory in a step that is not repeated, over what the process had before it
  built the model. With the variable, the C library returns blocks above 1 MiB at once: this is
  memory in use, not memory kept for reuse.

The first command adds its rows to docs/results/sharded_memory.json, the second draws the figure of
the tutorial from it.

The third compares with DDP, one rank on each of two processes, with default settings and without
the variable: the peak of the resident memory of a process over what it had before it built the
model, until the training has ended. That is six iterations, with the steps that are repeated and a
checkpoint behind the fourth and the last. The two take turns in one run.
"""
from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import Hook

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'benchmarks'), str(ROOT / 'tests' / 'support')]

from children import Child, join_ranks, silence_output  # noqa: E402

import mmrepro  # noqa: E402, F401  mmcv-lite has operators from here on
from dev import figures  # noqa: E402
from mmrepro.distributed.unwrap import unwrap  # noqa: E402
from mmrepro.objects.digests import local_part  # noqa: E402
from mmrepro.objects.walks import tensors  # noqa: E402
from mmrepro.runs.launcher import free_port  # noqa: E402

RESULTS = ROOT / 'docs' / 'results' / 'sharded_memory.json'
RANKS, ITERATIONS, MEASURED = 4, 3, 2  # the third iteration is not repeated
MODELS = ('ResNet-50, SGD', 'Swin-B, AdamW')
AGAINST_DDP = ('Swin-T, AdamW', 'Swin-L, AdamW')
SWIN = {
    'Swin-T': dict(embed_dims=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24),
                   drop_path_rate=0.2),
    'Swin-B': dict(embed_dims=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32),
                   drop_path_rate=0.3),
    'Swin-L': dict(embed_dims=192, depths=(2, 2, 18, 2), num_heads=(6, 12, 24, 48),
                   drop_path_rate=0.3)}
MEMORIES = ('shared', 'sharded')


class Watch(Hook):
    """Counts what all ranks of a process keep, and measures the peak of an iteration."""
    priority = 100

    def __init__(self, storages: dict[int, int], peaks: list[int]) -> None:
        self.storages, self.peaks = storages, peaks

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == MEASURED:
            Path('/proc/self/clear_refs').write_text('5')

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                         outputs: Any = None) -> None:
        from virtual_ranks import resident
        if runner.iter == MEASURED:
            self.peaks.append(resident('VmHWM'))
            for value in [*unwrap(runner.model).parameters(),
                          *tensors(list(runner.optim_wrapper.optimizer.state.values()))]:
                storage = local_part(value).untyped_storage()
                self.storages[storage.data_ptr()] = storage.nbytes()


def settings(model: str, data_root: str) -> Any:
    from virtual_ranks import settings as small
    cfg = small('retinanet_r50_fpn', data_root, ITERATIONS)
    swin = SWIN.get(model.partition(',')[0])
    if swin is not None:
        cfg.model.backbone = dict(type='SwinTransformer', window_size=7, out_indices=(1, 2, 3),
                                  **swin)
        cfg.model.neck.update(in_channels=[swin['embed_dims'] * factor for factor in (2, 4, 8)],
                              start_level=0)
        cfg.optim_wrapper.optimizer = dict(type='AdamW', lr=1e-4, weight_decay=0.05)
    return cfg


def train(cfg: Any, process: int, processes: int, port: int) -> dict[str, int]:
    from mmengine.runner import Runner
    from virtual_ranks import resident

    from mmrepro.runs.startup import on_ranks
    silence_output()
    if processes > 1:
        join_ranks(process, processes, port)
        cfg.launcher = 'pytorch'
    before, peaks = resident('VmRSS'), []
    storages: dict[int, int] = {}

    def main() -> None:
        runner = Runner.from_cfg(cfg)
        runner.register_hook(Watch(storages, peaks), priority=100)
        runner.train()

    on_ranks(cfg, main)
    return dict(kept=sum(storages.values()), peak=max(peaks) - before)


def measure(model: str, memory: str, processes: int, data_root: str, folder: str) -> dict[str, Any]:
    cfg, port = settings(model, data_root), free_port()
    cfg.work_dir = tempfile.mkdtemp(dir=folder)
    cfg.randomness.virtual_ranks = dict(ranks=RANKS, memory=memory)
    children = [Child(train, cfg, process, processes, port) for process in range(processes)]
    found = [child.result(1800) for child in children]
    return dict(model=model, memory=memory, processes=processes, **{
        key: max(one[key] for one in found) for key in ('kept', 'peak')})


def train_all(cfg: Any, process: int, port: int) -> int:
    """Train on one of two processes; return the peak of its resident memory, over the start."""
    from mmengine.runner import Runner
    from virtual_ranks import resident

    from mmrepro.runs.startup import on_ranks
    silence_output()
    join_ranks(process, 2, port)
    cfg.launcher = 'pytorch'
    cfg.env_cfg.dist_cfg = dict(backend='gloo')
    before = resident('VmRSS')
    Path('/proc/self/clear_refs').write_text('5')
    on_ranks(cfg, lambda: Runner.from_cfg(cfg).train())
    return resident('VmHWM') - before


def against_ddp(model: str, data_root: str, folder: str) -> dict[str, Any]:
    """Return bytes of both processes with DDP and with sharded weights, and the ratio of peaks."""
    found: dict[str, Any] = dict(model=model, torch=torch.__version__)
    for way in ('ddp', 'sharded'):
        cfg, port = settings(model, data_root), free_port()
        cfg.train_cfg.max_iters = 6
        cfg.default_hooks.checkpoint = dict(type='CheckpointHook', interval=4, by_epoch=False)
        cfg.work_dir = tempfile.mkdtemp(dir=folder)
        if way == 'sharded':
            cfg.randomness.virtual_ranks = dict(ranks=2, memory='sharded')
        children = [Child(train_all, cfg, process, port) for process in range(2)]
        found[way] = [child.result(3600) for child in children]
    found['ratio'] = max(found['sharded']) / max(found['ddp'])
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table: a line per model and number of processes, in MiB."""
    lines = ['| model | processes | kept, shared | sharded | peak, shared | sharded |',
             '|---|---|---|---|---|---|']
    found = {(row['model'], row['processes'], row['memory']): row for row in rows}
    for model, processes, memory in found:
        if memory == MEMORIES[0]:
            cells = [f'{found[model, processes, kind][key] / 2**20:,.0f}'
                     for key in ('kept', 'peak') for kind in MEMORIES]
            lines.append(f'| {model} | {processes} | {" | ".join(cells)} |')
    return '\n'.join(lines)


def draw(rows: list[dict[str, Any]], figure: Any, axes: Any) -> None:
    for axis, model in zip(axes, MODELS):
        for memory, color in zip(MEMORIES, figures.COLORS):
            mine = [row for row in rows if (row['model'], row['memory']) == (model, memory)]
            counts = [row['processes'] for row in mine]
            for key, style in (('peak', '-'), ('kept', '--')):
                axis.plot(counts, [row[key] / 2**30 for row in mine], style, color=color,
                          marker='o', label=f'{memory}, {key}')
        axis.set_title(model)
        axis.set_xticks(counts)
        axis.set_xlabel('processes')
        axis.set_ylim(bottom=0)
    axes[0].set_ylabel('GiB in a process')
    figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=4,
                  fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('data_root', nargs='?')
    parser.add_argument('--models', nargs='+', choices=(*MODELS, *AGAINST_DDP))
    parser.add_argument('--against-ddp', action='store_true')
    parser.add_argument('--out', help='file for the rows of --against-ddp')
    parser.add_argument('--processes', nargs='+', type=int, default=(1, 2, 4))
    parser.add_argument('--draw', action='store_true')
    args = parser.parse_args()
    if args.against_ddp:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            found = []
            for model in args.models or AGAINST_DDP:
                found.append(against_ddp(model, args.data_root, folder))
                print(found[-1], flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(found, indent=1) + '\n')
        return
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if args.data_root:
        if 'MALLOC_MMAP_THRESHOLD_' not in os.environ:  # read when a process starts
            parser.error('export MALLOC_MMAP_THRESHOLD_=1048576 first')
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            for model in args.models or MODELS:
                for processes in args.processes:
                    for memory in MEMORIES:
                        row = measure(model, memory, processes, args.data_root, folder)
                        print(row, flush=True)
                        rows = [one for one in rows if any(one[key] != row[key] for key in (
                            'model', 'memory', 'processes'))] + [row]
                        RESULTS.write_text(json.dumps(rows, indent=1) + '\n')
    if args.draw:
        figures.save('sharded-memory', functools.partial(draw, rows), ncols=2, figsize=(9, 3.5))
    print(table(rows))


if __name__ == '__main__':
    main()
