"""Measure what a process of virtual ranks holds in memory, with shared and with sharded weights.

    export MALLOC_MMAP_THRESHOLD_=1048576
    python benchmarks/sharded_memory.py DATA_ROOT [--models NAME ...] [--processes N ...]
    python benchmarks/sharded_memory.py --draw

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Four ranks, with one small image each,
train RetinaNet on one, two and four processes, with ResNet-50 and SGD, and with Swin-B and AdamW.
Of the process that holds most:

- *kept*: bytes of weights and optimizer state after a step, counted; gradients are freed then
- *peak*: of resident memory in a step that is not repeated, over what the process had before it
  built the model. With the variable, the C library returns blocks above 1 MiB at once: this is
  memory in use, not memory kept for reuse.

The first command adds its rows to docs/results/sharded_memory.json, the second draws the figure of
the tutorial from it.
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
from mmrepro.objects.nested import tensors  # noqa: E402
from mmrepro.runs.launcher import free_port  # noqa: E402

RESULTS = ROOT / 'docs' / 'results' / 'sharded_memory.json'
RANKS, ITERATIONS, MEASURED = 4, 3, 2  # the third iteration is not repeated
MODELS = ('ResNet-50, SGD', 'Swin-B, AdamW')
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
    if model.startswith('Swin-B'):
        cfg.model.backbone = dict(
            type='SwinTransformer', embed_dims=128, depths=(2, 2, 18, 2),
            num_heads=(4, 8, 16, 32), window_size=7, out_indices=(1, 2, 3), drop_path_rate=0.3)
        cfg.model.neck.update(in_channels=[256, 512, 1024], start_level=0)
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
    parser.add_argument('--models', nargs='+', default=MODELS, choices=MODELS)
    parser.add_argument('--processes', nargs='+', type=int, default=(1, 2, 4))
    parser.add_argument('--draw', action='store_true')
    args = parser.parse_args()
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if args.data_root:
        if 'MALLOC_MMAP_THRESHOLD_' not in os.environ:  # read when a process starts
            parser.error('export MALLOC_MMAP_THRESHOLD_=1048576 first')
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder:
            for model in args.models:
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
