"""Measure what a witness costs the run beside it, as ratios in one run.

    python benchmarks/witness.py DATA_ROOT [--models NAME ...] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Iterations with and without a real
witness beside them alternate in one process; the witness is started with what a run would give it.
`slow-data` is RTMDet-tiny with a dataset that computes for 30 s when it is built. Prints a Markdown
table, writes JSON.
"""
from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any

import torch
from mmdet.datasets import CocoDataset
from mmengine.registry import DATASETS
from mmengine.runner import Runner

import mmrepro
from mmrepro.selfcheck import recipe, witness
from mmrepro.selfcheck.witness_process import Start, WitnessProcess

MODELS = ('faster-rcnn_r50_fpn', 'rtmdet_tiny', 'slow-data')
ITERATIONS = 10_000
SLOW = 30  # seconds


@DATASETS.register_module()
class SlowDataset(CocoDataset):
    """COCO's annotations, and 30 seconds of processor time."""

    def load_data_list(self) -> list[dict]:
        end = time.process_time() + SLOW
        while time.process_time() < end:
            sum(range(10_000))
        return super().load_data_list()


def measure(name: str, data_root: str, folder: str, rounds: int) -> dict[str, Any]:
    """Return seconds of iterations with and without a witness, and what the witness took."""
    from mmrepro.demo.dataset import demo_config
    cfg = demo_config('rtmdet_tiny' if name == 'slow-data' else name, data_root)
    if name == 'slow-data':
        cfg.train_dataloader.dataset.type = 'SlowDataset'
    cfg.work_dir = os.path.join(folder, name)
    cfg.randomness = dict(seed=1, deterministic=True, self_checks=dict(witness=False),
                          numerics=dict(num_threads=1))
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    made = recipe.recipe_of(Runner, dict(cfg=cfg), dict(os.environ))
    begun = time.process_time()
    runner = Runner.from_cfg(cfg)
    times: dict[str, list[float]] = dict(alone=[], beside=[])
    used: dict[str, Any] = {}

    def iterate(kind: str, count: int) -> None:
        for _ in range(count):
            start = time.perf_counter()
            runner.model.train_step(next(batches), runner.optim_wrapper)
            times[kind].append(time.perf_counter() - start)

    def all_batches() -> Any:
        while True:
            yield from runner.train_loop.dataloader

    prepare(runner)
    batches, set_up = all_batches(), time.process_time() - begun
    iterate('alone', 3)
    checkpoint = os.path.join(cfg.work_dir, 'early.pth')
    runner.save_checkpoint(cfg.work_dir, 'early.pth', by_epoch=False)
    times['alone'].clear()
    for _ in range(rounds):
        iterate('alone', 10)
        process = WitnessProcess(made, [
            Start('repeated', 0, witness.REPEATED_ITERATIONS, None, other_workers=True),
            Start('resumed', 3, 3 + witness.RESUMED_ITERATIONS, checkpoint)],
            runner.repro.as_dict(), [], cfg.work_dir)
        while not process.ended():
            iterate('beside', 1)
        results = process.results()
        used = dict(seconds=sum(result.seconds for result in results),
                    errors=[result.error for result in results if result.error])
        process.kill()
    alone, beside = (statistics.median(times[kind]) for kind in ('alone', 'beside'))
    return dict(alone_s=alone, beside_s=beside, ratio=beside / alone, set_up_s=set_up, **used,
                allowed_s=witness.FREE_SECONDS + witness.MAX_TIME_SHARE * ITERATIONS * alone,
                peak_mib=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
                run_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def prepare(runner: Any) -> None:
    """Build what ``train()`` builds before its loop begins."""
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
    runner._init_model_weights()
    runner.optim_wrapper.initialize_count_status(runner.model, 0, ITERATIONS)
    runner.call_hook('before_run')
    runner.call_hook('before_train')  # averages are made here, and checkpoints hold them
    runner.model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--models', nargs='+', choices=MODELS, default=MODELS)
    parser.add_argument('--rounds', type=int, default=3, help='witnesses of each model')
    parser.add_argument('--work-dir', default='work_dirs/witness')
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    mmrepro.activate()
    found = {name: measure(name, args.data_root, args.work_dir, args.rounds)
             for name in args.models}
    print('| model | an iteration | beside a witness | a witness takes | allowed for '
          f'{ITERATIONS:,} iterations | memory of the witness, of the run |')
    print('|---|---|---|---|---|---|')
    for name, one in found.items():
        print(f'| {name} | {one["alone_s"]:.2f} s | {one["ratio"]:.3f} x | '
              f'{one["seconds"]:.0f} s | {one["allowed_s"]:.0f} s | '
              f'{one["peak_mib"]:.0f}, {one["run_mib"]:.0f} MiB |')
    if args.out:
        with open(args.out, 'w', encoding='utf-8') as file:
            json.dump(dict(models=found, torch=torch.__version__), file, indent=1)


if __name__ == '__main__':
    main()
