"""Measure the cost of mmrepro as ratios, alternately in one process.

    python benchmarks/overhead.py DATA_ROOT [--pairs N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Prints a Markdown table and writes
JSON. Absolute times are of this machine; the ratios are what to compare.

Leaves out the steps that a run repeats (randomness.self_checks.steps), which
benchmarks/step_checks.py measures, and the loading of samples, of which benchmarks/sample_check.py
measures the check.
"""
from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import time
import timeit
from typing import Any, Callable

import torch

import mmrepro
from mmrepro import determinism, patches, seeds


def microseconds(function: Callable, number: int = 5000) -> float:
    """Return the least time of five measurements."""
    return min(timeit.repeat(function, number=number, repeat=5)) / number * 1e6


def paused_runner(cfg: Any, work_dir: str, active: bool) -> Any:
    """Return a runner that is ready to run its first iteration."""
    from mmengine.registry import LOOPS
    from mmengine.runner import EpochBasedTrainLoop, Runner

    @LOOPS.register_module(force=True)
    class PausedLoop(EpochBasedTrainLoop):
        def run(self) -> None:
            self.runner.call_hook('before_train')
            self.runner.call_hook('before_train_epoch')
            self.runner.model.train()

    cfg = copy.deepcopy(cfg)
    cfg.work_dir = work_dir
    if active:
        cfg.randomness.self_checks = dict(steps=0)  # benchmarks/step_checks.py measures it
    cfg.train_cfg = dict(type='PausedLoop', max_epochs=1000)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.default_hooks.checkpoint = None
    if not active:
        mmrepro.deactivate()
        cfg.pop('runner_type', None)
        cfg.randomness = dict(seed=42)
        mmrepro.ops.install()
    runner = Runner.from_cfg(cfg)
    runner.train()
    mmrepro.activate()
    return runner


def batches(runner: Any) -> Any:
    while True:
        yield from runner.train_loop.dataloader


def iterations(cfg: Any, folder: str, pairs: int) -> dict[str, Any]:
    """Time iterations of the stock and the reproducible runner, alternately on the same batches.

    Batches are loaded outside of what is timed; what seeding a sample costs is a row of its own.
    """
    stock = paused_runner(cfg, f'{folder}/stock', False)
    ours = paused_runner(cfg, f'{folder}/ours', True)
    assert type(stock).__name__ == 'Runner' and type(ours).__name__ == 'ReproRunner'
    times: dict[str, list[float]] = dict(stock=[], ours=[])
    runners, source = {'stock': stock, 'ours': ours}, batches(ours)
    with determinism.deterministic(True):
        for index in range(pairs + 2):
            order = ('stock', 'ours') if index % 2 else ('ours', 'stock')
            batch = next(source)
            for name in order:
                own = copy.deepcopy(batch)  # a step may change it
                gc.collect()
                start = time.perf_counter()
                runners[name].train_loop.run_iter(index, own)
                times[name].append(time.perf_counter() - start)
    pairs_of = sorted(b / a for a, b in zip(times['stock'][2:], times['ours'][2:]))
    return dict(
        quartiles=[pairs_of[round((len(pairs_of) - 1) * share)] for share in (0.25, 0.5, 0.75)],
        stock_ms=statistics.median(times['stock'][2:]) * 1e3,
        ours_ms=statistics.median(times['ours'][2:]) * 1e3,
        ratio=statistics.median(times['ours'][2:]) / statistics.median(times['stock'][2:]))


def added_per_iteration(batch_size: int) -> float:
    """Return the microseconds that mmrepro adds to an iteration, as the sum of its parts."""
    sample = microseconds(lambda: seeds.seed_all(42, 'sample', 3, 12345))
    step = microseconds(lambda: seeds.seed_all(42, 'step', 12345))
    return batch_size * sample + 2 * step


def import_seconds(code: str) -> float:
    timer = ('import time; start = time.perf_counter(); '
             f'{code}; print(time.perf_counter() - start)')
    return float(subprocess.run([sys.executable, '-W', 'ignore', '-c', timer], check=True,
                                capture_output=True, text=True).stdout)


def cached_transforms(cfg: Any, passes: int) -> dict[str, float]:
    """Measure loading of batches with the caches of stock and in the pure form, in turns."""
    from mmengine.registry import init_default_scope
    from mmengine.runner import Runner

    from mmrepro.config import RandomnessConfig
    from mmrepro.data import adopt_loader
    init_default_scope('mmdet')
    found = {}
    for batch_size in (2, 8, 24):
        dataloader = copy.deepcopy(cfg.train_dataloader)
        dataloader.update(batch_size=batch_size, batch_sampler=None)
        stock = Runner.build_dataloader(copy.deepcopy(dataloader), seed=0)
        ours = Runner.build_dataloader(copy.deepcopy(dataloader), seed=0)
        adopt_loader(ours, RandomnessConfig(seed=0), 'sample', 0)
        times: dict[str, list[float]] = dict(stock=[], ours=[])
        for epoch in range(passes + 1):
            for name, loader in (('stock', stock), ('ours', ours)):
                if name == 'ours':
                    patches.apply()
                else:
                    patches.revert()
                loader.batch_sampler.sampler.set_epoch(epoch)
                start = time.process_time()
                for _ in loader:
                    pass
                times[name].append(time.process_time() - start)
        found[f'batch {batch_size}'] = statistics.median(
            ours / stock for ours, stock in zip(times['ours'][1:], times['stock'][1:]))
    patches.revert()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--pairs', type=int, default=20, help='iterations of each runner')
    parser.add_argument('--passes', type=int, default=5, help='epochs of each loader')
    parser.add_argument('--work-dir', default='work_dirs/overhead')
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    torch.set_num_threads(1)

    import mmdet.models  # noqa: F401

    from mmrepro.demo.dataset import demo_config
    sample = microseconds(lambda: seeds.seed_all(42, 'sample', 3, 12345))
    step = microseconds(lambda: seeds.seed_all(42, 'step', 12345))
    imports = [(import_seconds('import mmengine'), import_seconds('import mmengine, mmrepro'))
               for _ in range(5)]
    iteration = iterations(demo_config('faster-rcnn_r50_fpn', args.data_root), args.work_dir,
                           args.pairs)
    added = added_per_iteration(batch_size=2)
    cached = cached_transforms(demo_config('rtmdet_tiny', args.data_root), args.passes)
    rows = [
        ('seeding one sample', f'{sample:.1f} us', '20 us'),
        ('seeding one step (CPU)', f'{step:.1f} us', '200 us'),
        ('seeding in one Faster R-CNN iteration, counted',
         f'{added:.0f} us of {iteration["stock_ms"]:.0f} ms = '
         f'{added / iteration["stock_ms"] / 10:.3f} %', '1 %'),
        (f'Faster R-CNN iteration, {args.pairs} pairs in turn',
         f'{iteration["ratio"]:.3f} x stock (quartiles of pairs: '
         f'{iteration["quartiles"][0]:.3f} to {iteration["quartiles"][2]:.3f})', '1.01 x'),
        ('import mmrepro after mmengine',
         f'{statistics.median(b - a for a, b in imports):.2f} s', '0.3 s'),
        *((f'loading with CachedMosaic and CachedMixUp, {name}', f'{ratio:.2f} x stock', '1.2 x')
          for name, ratio in cached.items()),
    ]
    print('| what | measured | at most |\n|---|---|---|')
    for row in rows:
        print('| ' + ' | '.join(row) + ' |')
    if args.out:
        with open(args.out, 'w') as file:
            json.dump(dict(sample_us=sample, step_us=step, iteration=iteration, added_us=added,
                           import_s=imports, cached=cached, torch=torch.__version__), file,
                      indent=1)


if __name__ == '__main__':
    main()
