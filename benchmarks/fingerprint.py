"""Measure the cost of fingerprints: Faster R-CNN R50-FPN with and without, alternately.

    python benchmarks/fingerprint.py DATA_ROOT [--rounds 10] [--size 256 192] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). One process, one model, the same
batches: in every round each level trains one iteration, in an order that rotates. Ratios are of CPU
time, because other programs on the machine stretch wall-clock time. `--out` adds to the file.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

import mmrepro  # noqa: F401  activates
from mmrepro.run.hooks import FingerprintHook

MODES = ('none', 'idle', 'step', 'parameter', 'module')
IDLE = 10**9  # an interval longer than any run


def paused_runner(data_root: str, size: list[int], work_dir: str) -> Any:
    """Return a runner that is ready to run its first iteration."""
    from mmengine.registry import LOOPS
    from mmengine.runner import EpochBasedTrainLoop, Runner

    from mmrepro.demo.dataset import demo_config

    @LOOPS.register_module(force=True)
    class PausedLoop(EpochBasedTrainLoop):
        def run(self) -> None:
            self.runner.call_hook('before_train')
            self.runner.call_hook('before_train_epoch')
            self.runner.model.train()

    cfg = demo_config('faster-rcnn_r50_fpn', data_root)
    for transform in cfg.train_dataloader.dataset.pipeline:
        if transform['type'] == 'RandomResize':
            transform.update(type='Resize', scale=tuple(size), keep_ratio=True)
            del transform['ratio_range']
    cfg.work_dir, cfg.log_level = work_dir, 'ERROR'
    cfg.train_cfg = dict(type='PausedLoop', max_epochs=1000)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.default_hooks.checkpoint = None
    runner = Runner.from_cfg(cfg)
    runner.train()
    return runner


def measure(runner: Any, rounds: int, modes: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    """Return CPU and wall-clock seconds of every iteration, by mode."""
    batches = list(runner.train_loop.dataloader)[:3]
    times: dict[str, dict[str, list[float]]] = {mode: dict(cpu=[], wall=[]) for mode in modes}
    for index in range(rounds + 1):
        shift = index % len(modes)
        for mode in (*modes[shift:], *modes[:shift]):
            hook = attach(runner, mode)
            runner.train_loop._iter = index
            cpu, wall = time.process_time(), time.perf_counter()
            runner.train_loop.run_iter(index, batches[index % len(batches)])
            times[mode]['cpu'].append(time.process_time() - cpu)
            times[mode]['wall'].append(time.perf_counter() - wall)
            if hook is not None:
                hook.after_train(runner)
                runner._hooks.remove(hook)
            print('.', end='', flush=True)
    print()
    return {mode: {kind: values[1:] for kind, values in found.items()}
            for mode, found in times.items()}


def attach(runner: Any, mode: str) -> Any:
    if mode == 'none':
        return None
    hook = FingerprintHook(interval=IDLE) if mode == 'idle' else FingerprintHook(level=mode)
    runner.register_hook(hook, priority=hook.priority)
    # once a run, not once an iteration
    with mock.patch('mmrepro.run.hooks.fingerprint.write_manifest', lambda *args: None):
        hook.before_train(runner)
    return hook


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--rounds', type=int, default=10)
    parser.add_argument('--size', type=int, nargs=2, default=[256, 192], metavar=('W', 'H'))
    parser.add_argument('--modes', nargs='+', choices=MODES, default=MODES)
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    torch.set_num_threads(1)
    import mmdet.models  # noqa: F401
    with tempfile.TemporaryDirectory() as folder:
        runner = paused_runner(args.data_root, args.size, folder)
        times = measure(runner, args.rounds, args.modes)
    middle = {mode: {kind: statistics.median(values) for kind, values in found.items()}
              for mode, found in times.items()}
    # adjacent in time, so that a change of the machine's load affects both
    ratios = {mode: statistics.median(
        a / b for a, b in zip(found['cpu'], times['none']['cpu'])) for mode, found in times.items()}
    print('| level | CPU time | ratio |\n|---|---|---|')
    for mode in args.modes:
        print(f'| {mode} | {middle[mode]["cpu"] * 1e3:.0f} ms | {ratios[mode]:.3f} |')
    if args.out:
        content = {}
        if os.path.exists(args.out):
            with open(args.out) as file:
                content = json.load(file)
        content['x'.join(map(str, args.size))] = dict(
            ratios={mode: round(ratio, 3) for mode, ratio in ratios.items()},
            cpu_seconds={mode: round(found['cpu'], 3) for mode, found in middle.items()},
            rounds=args.rounds, threads=1, batch_size=2, torch=torch.__version__,
            cpu=torch.backends.cpu.get_cpu_capability())
        with open(args.out, 'w') as file:
            json.dump(content, file, indent=1)
            file.write('\n')


if __name__ == '__main__':
    main()
