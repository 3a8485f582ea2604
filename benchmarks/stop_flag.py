"""Time that ranks take per iteration to tell each other of a signal, beside a step of stock DDP.

    python benchmarks/stop_flag.py --processes 2 4 --step-ms 20 --out stop_flag.json

Three ways take turns in one run, round by round: nothing (stock), pickled objects at every
iteration (mmrepro before 0.3), and :class:`mmrepro.distributed.agreement.RepeatedFlag`. `call` is
the time in the call, waiting for other ranks included; `over` the time of an iteration over
stock's, the median over the rounds.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'support')]
from children import Child, join_ranks  # noqa: E402

from mmrepro.runs.launcher import free_port  # noqa: E402

WAYS = ('stock', 'pickled', 'flag')


def measure(rank: int, world: int, port: int, step: float, rounds: int, iterations: int
            ) -> dict[str, list[tuple[float, float]]]:
    """Return seconds per iteration, and those in the call, of each round of each way."""
    join_ranks(rank, world, port)
    import torch
    import torch.distributed as dist

    from mmrepro.distributed.agreement import RepeatedFlag
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world)
    group, flag = dist.new_group(backend='gloo'), RepeatedFlag()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    values = torch.randn(8, 256)

    def pickled() -> None:
        received: list[Any] = [None] * world
        dist.all_gather_object(received, ('a signal to stop', False), group=group)

    calls = dict(stock=lambda: None, pickled=pickled, flag=lambda: flag.up(False))
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    paused = time.monotonic()
    for number in range(rounds + 1):
        for way in WAYS[number % 3:] + WAYS[:number % 3]:
            inside, begun = 0., time.perf_counter()
            if way == 'flag' and flag._time is not None:
                flag._time += time.monotonic() - paused  # the other ways ran meanwhile
            for _ in range(iterations):
                model(values).sum().backward()
                time.sleep(step)  # of an accelerator
                before = time.perf_counter()
                calls[way]()
                inside += time.perf_counter() - before
            total = time.perf_counter() - begun
            if number:  # the first warms up
                found[way].append((total / iterations, inside / iterations))
            if way == 'flag':
                paused = time.monotonic()
    dist.barrier()
    return found


def table(ranks: list[dict[str, list[tuple[float, float]]]]) -> dict[str, Any]:
    """Return milliseconds of the slowest rank, and ratios to the pickled way."""
    found: dict[str, Any] = {}
    for way in WAYS[1:]:
        found[way] = dict(
            call=max(statistics.mean(inside for _, inside in rank[way]) for rank in ranks) * 1e3,
            over=max(statistics.median(one[0] - stock[0] for one, stock in zip(
                rank[way], rank['stock'])) for rank in ranks) * 1e3)
    found['ratio'] = found['flag']['call'] / found['pickled']['call']
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--processes', type=int, nargs='+', default=[2, 4])
    parser.add_argument('--step-ms', type=float, nargs='+', default=[20., 150.])
    parser.add_argument('--rounds', type=int, default=9)
    parser.add_argument('--iterations', type=int, default=64)
    parser.add_argument('--out')
    args = parser.parse_args()
    rows = []
    for world in args.processes:
        for step in args.step_ms:
            port = free_port()
            children = [Child(measure, rank, world, port, step / 1e3, args.rounds, args.iterations)
                        for rank in range(world)]
            row = dict(processes=world, step_ms=step,
                       **table([child.result() for child in children]))
            rows.append(row)
            print(f'{world} processes, {step:g} ms: call {row["pickled"]["call"]:.3f} -> '
                  f'{row["flag"]["call"]:.4f} ms ({row["ratio"]:.4f}), over stock '
                  f'{row["pickled"]["over"]:+.3f} -> {row["flag"]["over"]:+.4f} ms', flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
