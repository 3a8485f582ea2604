"""Measure the cost of repeating a step as a ratio, alternately in one process.

    python benchmarks/step_checks.py DATA_ROOT [--pairs N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Steps that are checked and steps
that are not alternate in one run; times are of the processor. Prints a Markdown table, writes JSON.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
from typing import Any

import torch
from overhead import batches, paused_runner

from mmrepro.run.hooks.self_check import is_due
from mmrepro.selfcheck import forked
from mmrepro.selfcheck.steps import StepCheck
from mmrepro.util.scoped import around_next_step

MODELS = ('faster-rcnn_r50_fpn', 'rtmdet_tiny')
LENGTHS = (1_000, 10_000, 90_000)  # iterations of trainings
INTERVAL = 1000


def _processor_time() -> float:
    return sum(os.times()[:4])  # copies of the process included


def measure(name: str, data_root: str, folder: str, pairs: int) -> dict[str, Any]:
    """Return processor seconds of steps, and the number of passes of a check."""
    from mmrepro.demo.dataset import demo_config
    runner = paused_runner(demo_config(name, data_root), f'{folder}/{name}', True)
    source = batches(runner)
    failed = print if forked.is_possible(runner.model) else None
    times: dict[str, list[float]] = dict(plain=[], checked=[])
    for index in range(pairs + 2):
        for kind in ('plain', 'checked') if index % 2 else ('checked', 'plain'):
            batch = next(source)
            gc.collect()
            begun = _processor_time()
            if kind == 'checked':
                around_next_step(runner.model, StepCheck(
                    runner, (), lambda runner, problem: None, failed))
            runner.train_loop.run_iter(index, batch)
            times[kind].append(_processor_time() - begun)
    plain, checked = (statistics.median(times[kind][2:]) for kind in ('plain', 'checked'))
    return dict(plain_s=plain, checked_s=checked, ratio=checked / plain, shares={
        str(length): (checked / plain - 1) * sum(
            is_due(i, INTERVAL) for i in range(length)) / length for length in LENGTHS})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--pairs', type=int, default=10, help='steps of each kind')
    parser.add_argument('--work-dir', default='work_dirs/step_checks')
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    torch.set_num_threads(1)

    import mmdet.models  # noqa: F401
    found = {name: measure(name, args.data_root, args.work_dir, args.pairs) for name in MODELS}
    lengths = ' | '.join(f'of {length:,} iterations' for length in LENGTHS)
    print(f'| model | a step | checked | {lengths} |\n|---|---|---|{"---|" * len(LENGTHS)}')
    for name, one in found.items():
        shares = ' | '.join(f'{share:.2%}' for share in one['shares'].values())
        print(f'| {name} | {one["plain_s"]:.2f} s | {one["ratio"]:.2f} x | {shares} |')
    if args.out:
        with open(args.out, 'w') as file:
            json.dump(dict(models=found, torch=torch.__version__), file, indent=1)


if __name__ == '__main__':
    main()
