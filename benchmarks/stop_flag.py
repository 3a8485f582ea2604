"""Time that ranks take per iteration to tell each other of a signal, beside a step of stock DDP.

    python benchmarks/stop_flag.py --processes 2 4 8 --step-ms 20 --out stop_flag.json

Ways that take turns in one run, round by round:

- *stock*: nothing
- *pickled*: pickled objects at every iteration, as of commit 5a572c6a
- *flag*: :class:`mmrepro.distributed.agreement.RepeatedFlag`
- *hook*: all of :class:`mmrepro.run.hooks.preempt.PreemptHook`, which also notices steps that a
  rank leaves out

All columns are milliseconds of an iteration over stock's, medians over the rounds, of the rank with
the highest: `call` is the time in the call, waiting for other ranks and for a core included, `work`
the processor time of the calling thread in it, `over` the time of the iteration, and `cpu` the
processor time of all threads. Where processes share a core, `work` says what the call takes.
"""
from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'support')]
from children import Child, join_ranks  # noqa: E402

from mmrepro.runs.launcher import free_port  # noqa: E402

WAYS = ('stock', 'pickled', 'flag', 'hook')
COLUMNS = ('over', 'call', 'cpu', 'work')
Round = tuple[float, float, float, float]  # seconds per iteration, as COLUMNS


def measure(rank: int, world: int, port: int, step: float, rounds: int, iterations: int
            ) -> dict[str, list[Round]]:
    """Return the rounds of each way."""
    join_ranks(rank, world, port)
    import torch
    import torch.distributed as dist
    from mmengine.optim import OptimWrapper

    from mmrepro.distributed.agreement import RepeatedFlag, agree
    from mmrepro.run.hooks.preempt import PreemptHook
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    values = torch.randn(8, 256)
    wrapper = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.))
    runner = SimpleNamespace(iter=0, optim_wrapper=wrapper, logger=logging.getLogger('benchmark'))
    flag, hook = RepeatedFlag(), PreemptHook()
    hook.begin(runner)
    flags = dict(flag=flag, hook=hook._training)

    def nothing() -> None:
        pass

    before: dict[str, Callable[[], Any]] = {way: nothing for way in WAYS}
    after = dict(before, pickled=lambda: agree('a signal to stop', False, any),
                 flag=lambda: flag.up(False), hook=lambda: hook.after_train_iter(runner, 0))
    before['hook'] = lambda: hook.before_train_iter(runner, 0)
    found: dict[str, list[Round]] = {way: [] for way in WAYS}
    paused = dict.fromkeys(flags, time.monotonic())
    for number in range(rounds + 1):
        start = number % len(WAYS)
        for way in WAYS[start:] + WAYS[:start]:
            if way == 'hook':  # its thread looks into the store
                hook.before_train(runner)
            if way in flags and flags[way]._time is not None:
                flags[way]._time += time.monotonic() - paused[way]  # the other ways ran meanwhile
            inside, work, begun, cpu = 0., 0., time.perf_counter(), time.process_time()
            for _ in range(iterations):
                entered, worked = time.perf_counter(), time.thread_time()
                before[way]()
                work += time.thread_time() - worked
                inside += time.perf_counter() - entered
                wrapper.backward(model(values).sum())
                time.sleep(step)  # of an accelerator
                entered, worked = time.perf_counter(), time.thread_time()
                after[way]()
                work += time.thread_time() - worked
                inside += time.perf_counter() - entered
                runner.iter += 1
            total, cpu = time.perf_counter() - begun, time.process_time() - cpu
            if number:  # the first warms up
                found[way].append((total / iterations, inside / iterations, cpu / iterations,
                                   work / iterations))
            if way in flags:
                paused[way] = time.monotonic()
            if way == 'hook' and hook._steps is not None:
                hook._steps.close()
    hook.end()
    dist.barrier()
    return found


def table(ranks: list[dict[str, list[Round]]]) -> dict[str, Any]:
    """Return milliseconds of the rank with the highest, and ratios to the pickled way."""
    found: dict[str, Any] = {}
    for way in WAYS[1:]:
        found[way] = {name: max(
            statistics.median(one[column] - stock[column]
                              for one, stock in zip(rank[way], rank['stock']))
            for rank in ranks) * 1e3 for column, name in enumerate(COLUMNS)}
    for way in WAYS[2:]:
        found[way].update({f'{key}_ratio': found[way][key] / found['pickled'][key]
                           for key in ('call', 'work')})
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
                       **table([child.result(3600) for child in children]))
            rows.append(row)
            print(f'{world} processes, steps of {step:g} ms; ms an iteration:')
            for way in WAYS[1:]:
                print(f'  {way:8}' + ', '.join(f'{key} {value:.4f}'
                                               for key, value in row[way].items()), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(rows, indent=1) + '\n')


if __name__ == '__main__':
    main()
