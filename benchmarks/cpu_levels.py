"""Measure the cost of `randomness.numerics.cpu`: steps with and without its variables, alternately.

    python benchmarks/cpu_levels.py DATA_ROOT [--steps N] [--out FILE]

DATA_ROOT is COCO-format data (`mmrepro demo --data-only`). Libraries choose their kernels when
a process starts, so every row has a process of its own, and only one of them works at a time.
Times are of the processor. Prints a Markdown table, writes JSON.
"""
from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import torch

from mmrepro.determinism.cpu_level import cpu_instructions, level_variables
from mmrepro.facts.collect import cpu_name

MODEL = 'faster-rcnn_r50_fpn'
NONE = 'none'
PORTABLE = "cpu='portable'"
# what is measured -> variables
ROWS: dict[str, dict[str, str]] = {
    NONE: {},
    "cpu='avx2'": level_variables('avx2'),
    PORTABLE: level_variables('portable'),
}
WARM_UP = 2  # steps that are not measured


def serve(model: str, data_root: str, folder: str, portable: bool) -> None:
    """Take a step for each line of standard input, and print how long it took."""
    from overhead import batches, paused_runner

    from mmrepro.demo.dataset import demo_config
    cfg = demo_config(model, data_root)
    if portable:
        cfg.randomness.numerics = dict(cpu='portable', num_threads=torch.get_num_threads())
    runner = paused_runner(cfg, folder, True)
    source = batches(runner)
    for index, _ in enumerate(sys.stdin):
        batch = next(source)
        gc.collect()
        start = time.process_time()
        runner.train_loop.run_iter(index, batch)
        print(f'took {time.process_time() - start}', flush=True)


class Server:
    """A process that takes one step per request."""

    def __init__(self, name: str, variables: Mapping[str, str], args: Any, folder: str) -> None:
        env = {name: value for name, value in os.environ.items()
               if name not in level_variables('avx2')}
        env.update(variables, OMP_NUM_THREADS=str(args.threads), PYTHONHASHSEED='0')
        self.process = subprocess.Popen(
            [sys.executable, '-W', 'ignore', __file__, args.data_root, '--model', args.model,
             '--work-dir', folder, '--serve', name],
            env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL)

    def step(self) -> float:
        self.process.stdin.write('\n')
        self.process.stdin.flush()
        for line in self.process.stdout:  # the output holds the log as well
            if line.startswith('took '):
                return float(line.split()[1])
        raise RuntimeError(f'the process ended with exit code {self.process.wait()}')


def measure(servers: dict[str, Server], steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in servers}
    for index in range(steps + WARM_UP):
        for name in list(servers)[::1 if index % 2 else -1]:
            times[name].append(servers[name].step())
    return {name: seconds[WARM_UP:] for name, seconds in times.items()}


def table(found: Mapping[str, Any]) -> str:
    """Return the results as a Markdown table."""
    times = found['seconds']
    lines = ['| variables | a step | ratio | quartiles |', '|---|---|---|---|']
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles(
            [one / base for one, base in zip(seconds, times[NONE])], n=4)
        lines.append(f'| {name} | {statistics.median(seconds):.2f} s | {middle:.2f} '
                     f'| {low:.2f} to {high:.2f} |')
    return '\n'.join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('data_root')
    parser.add_argument('--steps', type=int, default=12, help='of each row')
    parser.add_argument('--threads', type=int, default=1, help='per operator')
    parser.add_argument('--work-dir', default='work_dirs/cpu_levels')
    parser.add_argument('--out', help='write JSON here')
    parser.add_argument('--model', default=MODEL, help='of the demonstration')
    parser.add_argument('--serve', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.model, args.data_root, args.work_dir, args.serve == PORTABLE)
        return
    servers = {name: Server(name, variables, args, f'{args.work_dir}/{index}')
               for index, (name, variables) in enumerate(ROWS.items())}
    try:
        seconds = measure(servers, args.steps)
    finally:
        for server in servers.values():
            server.process.kill()
            server.process.wait()
    found = dict(model=args.model, seconds=seconds, threads=args.threads, cpu=cpu_name(),
                 instructions=cpu_instructions(), torch=torch.__version__)
    print(table(found))
    if args.out:
        with open(args.out, 'w') as file:
            file.write(json.dumps(found, indent=1) + '\n')


if __name__ == '__main__':
    main()
