"""Time that ranks take per iteration to stop together, beside stock DDP.

    python benchmarks/stop_flag.py --processes 2 4 8 --step-ms 20 --out stop_flag.json

Each rank is a process that trains with MMEngine's Runner, loop and DDP over gloo; a pause in the
forward pass stands for an accelerator. Ways that take turns in one run, by blocks of iterations:

- *stock*: nothing
- *pickled*: pickled objects at every iteration, as of commit 5a572c6a
- *flag*: :class:`mmrepro.distributed.agreement.RepeatedFlag`
- *hook*: all of :class:`mmrepro.run.hooks.preempt.PreemptHook`, which also notices steps that a
  rank leaves out

All figures are milliseconds over stock's, of the rank with the highest:

- `work`: processor time of the thread that trains, in the call; means of an iteration, medians over
  the blocks. `idle` is the median of iterations without an exchange, `exchange` the mean of all the
  others by the number of exchanges.
- `watch`: processor time an iteration of the thread of the hook that looks into the store
- `behind`: processor time an iteration of all other threads of the process. Threads of gloo wait
  for other processes in all ways, so this differs by chance more than the others.
- `call`: time in the call, waiting for other ranks and for a core included
- `over`: time of the iteration

Where processes share a core, `work` and `watch` say what it takes.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'tests' / 'support')]
from children import Child, join_ranks, silence_output  # noqa: E402

from mmrepro.runs.launcher import free_port  # noqa: E402

WAYS = ('stock', 'pickled', 'flag', 'hook')
COLUMNS = ('work', 'idle', 'exchange', 'watch', 'behind', 'call', 'over')
WATCH = 'mmrepro: steps of other ranks'  # the name of the thread


class Block(NamedTuple):
    """Seconds of the iterations of one way, in a row."""
    work: list[float]
    exchanges: list[bool]  # in which iterations the way told other ranks
    call: float  # mean of an iteration
    watch: float
    behind: float
    over: float


class Ways:
    """The four ways, between which one training changes."""

    def __init__(self, runner: Any) -> None:
        from mmrepro.distributed.agreement import RepeatedFlag, agree
        from mmrepro.run.hooks.preempt import PreemptHook
        self.runner = runner
        self.hook, self.flag = PreemptHook(), RepeatedFlag()
        self.hook.begin(runner)
        self.flags = dict(flag=self.flag, hook=self.hook._training)
        self.paused = dict.fromkeys(self.flags, time.monotonic())
        self.after: dict[str, Callable[[], Any]] = dict(
            stock=lambda: None, pickled=lambda: agree('a signal to stop', False, any),
            flag=lambda: self.flag.up(False), hook=lambda: self.hook.after_train_iter(runner, 0))

    def begin(self, way: str) -> None:
        if way in self.flags and self.flags[way]._time is not None:
            self.flags[way]._time += time.monotonic() - self.paused[way]  # of the other ways
        if way == 'hook':  # a thread looks into the store
            self.hook.before_train(self.runner)
            self.hook.before_train_epoch(self.runner)

    def end(self, way: str) -> float:
        """Return the processor time of the thread of this way."""
        if way in self.flags:
            self.paused[way] = time.monotonic()
        if way != 'hook':
            return 0.
        watch, = (one for one in threading.enumerate() if one.name == WATCH)
        assert watch.ident is not None
        used = time.clock_gettime(time.pthread_getcpuclockid(watch.ident))
        self.hook._steps.close()
        watch.join()
        return used

    def exchanges(self, way: str) -> bool:
        """Whether the next call begins or ends an exchange."""
        return way == 'pickled' or way in self.flags and not self.flags[way]._rest


def measure(rank: int, world: int, port: int, step: float, rounds: int, iterations: int
            ) -> dict[str, list[Block]]:
    """Return the blocks of each way."""
    silence_output()
    join_ranks(rank, world, port)
    import torch
    import torch.distributed as dist
    from mmengine.hooks import Hook
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    from mmrepro.distributed import process_group
    torch.set_num_threads(1)
    process_group.ensure_process_group('pytorch')

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(256, 256)

        def forward(self, values: Any, mode: str = 'loss') -> Any:
            time.sleep(step)  # of an accelerator
            return dict(loss=self.linear(values).mean())

    found: dict[str, list[Block]] = {way: [] for way in WAYS}

    class Measure(Hook):
        priority = 100

        def before_train(self, runner: Any) -> None:
            self.ways = Ways(runner)

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            block, number = divmod(runner.iter, iterations)
            if number == 0:
                turn, place = divmod(block, len(WAYS))
                self.way = WAYS[(turn + place) % len(WAYS)]
                self.ways.begin(self.way)
                self.work: list[float] = []
                self.exchanges: list[bool] = []
                self.inside = 0.
                self.start = time.perf_counter(), time.process_time() - time.thread_time()

        def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None,
                             outputs: Any = None) -> None:
            self.exchanges.append(self.ways.exchanges(self.way))
            entered, worked = time.perf_counter(), time.thread_time()
            self.ways.after[self.way]()
            self.work.append(time.thread_time() - worked)
            self.inside += time.perf_counter() - entered
            if len(self.work) == iterations:
                ended = time.perf_counter(), time.process_time() - time.thread_time()
                total, behind = ((end - start) / iterations
                                 for start, end in zip(self.start, ended))
                watch = self.ways.end(self.way) / iterations
                if runner.iter >= iterations * len(WAYS):  # the first round warms up
                    found[self.way].append(Block(self.work, self.exchanges,
                                                 self.inside / iterations, watch, behind, total))

        def after_train(self, runner: Any) -> None:
            self.ways.hook.end()

    class Stock(Runner):
        def wrap_model(self, model_wrapper_cfg: Any, model: Any) -> Any:
            return process_group.wrap_model(super().wrap_model, model_wrapper_cfg, model)

    with tempfile.TemporaryDirectory() as folder:
        runner = Stock(
            Model(), folder, launcher='pytorch', log_level='ERROR',
            train_dataloader=dict(batch_size=8, dataset=list(zip(torch.randn(512, 256))),
                                  sampler=dict(type='InfiniteSampler'),
                                  collate_fn=dict(type='default_collate')),
            train_cfg=dict(by_epoch=False, max_iters=(rounds + 1) * len(WAYS) * iterations),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.)),
            default_hooks=dict(checkpoint=None), custom_hooks=[Measure()])
        runner.train()
        dist.barrier()
    return found


def figures(way: str, blocks: Sequence[Block], stock: Sequence[Block]) -> dict[str, float]:
    """Return seconds over stock's of one rank."""
    still = statistics.median(value for block in stock for value in block.work)
    pairs = [(work - still, exchanges) for block in blocks
             for work, exchanges in zip(block.work, block.exchanges)]
    idle = [work for work, exchanges in pairs if not exchanges]
    count = sum(exchanges for _, exchanges in pairs) / (1 if way == 'pickled' else 2)
    return dict(
        work=statistics.median(statistics.mean(one.work) - statistics.mean(other.work)
                               for one, other in zip(blocks, stock)),
        idle=statistics.median(idle or [0.]),
        exchange=sum(work for work, exchanges in pairs if exchanges) / max(count, 1),
        watch=statistics.median(one.watch for one in blocks),
        behind=statistics.median(one.behind - other.behind for one, other in zip(blocks, stock)),
        call=statistics.median(one.call - other.call for one, other in zip(blocks, stock)),
        over=statistics.median(one.over - other.over for one, other in zip(blocks, stock)))


def table(ranks: list[dict[str, list[Block]]]) -> dict[str, Any]:
    """Return milliseconds of the rank with the highest, and ratios to the pickled way."""
    found: dict[str, Any] = {}
    for way in WAYS[1:]:
        each = [figures(way, rank[way], rank['stock']) for rank in ranks]
        found[way] = {name: max(one[name] for one in each) * 1e3 for name in COLUMNS}
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
