"""Measure the cost of loading some samples twice: with and without the check, alternately.

    python benchmarks/sample_check.py DATA_ROOT [--passes N] [--every N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Two loaders of one config take
turns, a batch each, in one process; one of them repeats a sample of every N. CPU time counts.
"""
from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from mmrepro import patches
from mmrepro.config import RandomnessConfig
from mmrepro.data import adopt_loader
from mmrepro.data.sample_check import checked

DEFAULT = RandomnessConfig().self_checks.samples
LONG = 90_000 * 2  # samples that a worker loads in a training of MMDetection's 1x schedule
CASES = (('faster-rcnn_r50_fpn', 2), ('yolox_s', 8), ('rtmdet_tiny', 8), ('deformable-detr_r50', 2))


def build(model: str, data_root: str, batch_size: int, every: int) -> Any:
    from mmengine.runner import Runner

    from mmrepro.demo.dataset import demo_config
    settings = demo_config(model, data_root).train_dataloader
    settings.update(batch_size=batch_size, num_workers=0, persistent_workers=False)
    loader = Runner.build_dataloader(settings, seed=0)
    config = RandomnessConfig(seed=0, deterministic=True, self_checks=dict(samples=every))
    return adopt_loader(loader, config, 'sample', 0)


def measure(model: str, data_root: str, batch_size: int, every: int, passes: int
            ) -> dict[str, float]:
    """Return the seconds of both loaders, and the cost of a repetition in samples."""
    loaders = [build(model, data_root, batch_size, number) for number in (0, every)]
    seconds, samples, repeated = [0., 0.], 0, 0
    for epoch in range(passes + 1):
        iterators = []
        for loader in loaders:
            loader.batch_sampler.sampler.set_epoch(epoch)
            iterators.append(iter(loader))
        before = checked(loaders[1])
        for number in range(len(loaders[0])):
            order = (0, 1)
            if number % 2:  # taking turns in both orders
                order = (1, 0)
            for which in order:
                start = time.process_time()
                batch = next(iterators[which])
                seconds[which] += time.process_time() - start
            samples += len(batch['inputs'])
        if not epoch:  # files come from the disk, and 1, 2, 4, 8, ... are repeated
            seconds, samples = [0., 0.], 0
        else:
            repeated += checked(loaders[1]) - before
    cost = (seconds[1] - seconds[0]) / repeated / (seconds[0] / samples)
    often = LONG // DEFAULT + LONG.bit_length()
    return dict(samples=samples, repeated=repeated, without_s=seconds[0], with_s=seconds[1],
                ratio=seconds[1] / seconds[0], samples_per_repetition=cost,
                default=1 + cost * often / LONG)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--passes', type=int, default=10, help='over the data')
    parser.add_argument('--every', type=int, default=20,
                        help='repeat one of so many samples, often enough to be measured')
    parser.add_argument('--out', help='write JSON here')
    args = parser.parse_args()
    torch.set_num_threads(1)

    import mmdet.models  # noqa: F401
    from mmengine.registry import init_default_scope
    init_default_scope('mmdet')
    patches.apply()
    found: list[dict[str, Any]] = [
        dict(model=model, batch=batch, **measure(model, args.data_root, batch, args.every,
                                                 args.passes)) for model, batch in CASES]
    print(f'| loading | one of {args.every} | a repetition costs | one of {DEFAULT} |')
    print('|---|---|---|---|')
    for row in found:
        print(f'| {row["model"]}, batch {row["batch"]} | {row["ratio"]:.3f} x | '
              f'{row["samples_per_repetition"]:.1f} samples | {row["default"]:.4f} x |')
    if args.out:
        with open(args.out, 'w') as file:
            json.dump(dict(every=args.every, rows=found, torch=torch.__version__), file, indent=1)


if __name__ == '__main__':
    main()
