"""Count what processes send for a sum of gradients, and simulate how long it takes.

    python benchmarks/virtual_ranks_traffic.py

*Counted*: the real exchange (`mmrepro/virtual/exchange.py`) runs on a transport that
only counts. A process whose ranks are k nodes of the tree sends, for a bucket of S bytes on N
processes,

    (k + 1) * S * (N - 1) / N    bytes;    a ring all-reduce sends 2 * S * (N - 1) / N

and k is 1 wherever N is a power of two that divides V.

*Simulated*: events of N processes on a network without contention in its switches. A message takes
an overhead of the sender, its bytes through the card of the sender and that of the receiver, and a
latency; each is longer by a random factor, with a mean of 1.2, of a generator with a fixed seed.
The tree is an all-to-all, one sum of k * N parts and a ring all-gather; the ring is the usual
all-reduce. No figure of this kind is a measurement.

Writes docs/results/virtual_ranks_traffic.json.
"""
from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import mmrepro  # noqa: E402, F401
from mmrepro.distributed.ordered_sums import combine_of, nodes_of, shares  # noqa: E402
from mmrepro.util.scoped import replaced  # noqa: E402
from mmrepro.virtual import exchange  # noqa: E402

RESULTS = ROOT / 'docs' / 'results' / 'virtual_ranks_traffic.json'
BUCKET = 25 << 20  # bytes, as in mmrepro/virtual/gradients.py
COUNTED = [(8, 2), (8, 4), (8, 8), (8, 3), (32, 32), (64, 64), (64, 12)]  # (V, N)
SIMULATED = (2, 8, 64)  # processes, with a rank each
# bytes per second of a card, seconds of latency and of overhead per message, and bytes per second
# that a process adds up
NETWORKS = {'10 Gbit/s, 50 us; CPUs': (1.25e9, 50e-6, 5e-6, 10e9),
            '200 Gbit/s, 5 us; GPUs': (25e9, 5e-6, 2e-6, 500e9)}
RUNS = 20  # of the simulation, with other factors


class Counter:
    """A transport that sends nothing and counts the bytes that would leave this process."""
    device = torch.device('cpu')

    def __init__(self, mine: int, count: int) -> None:
        self._mine, self._count, self.sent = mine, count, 0
        self.aside = self

    def all_gather(self, received: Tensor, sent: Tensor) -> Counter:
        self.sent += sent.numel() * (self._count - 1)
        return self

    def all_to_all(self, received: Tensor, sent: Tensor, received_sizes: Any,
                   sent_sizes: Any) -> Counter:
        self.sent += sum(size for to, size in enumerate(sent_sizes) if to != self._mine)
        return self


def counted(ranks: int, processes: int) -> dict[str, Any]:
    """Return bytes that the processes send for one bucket, per byte of it."""
    members, sent = shares(ranks, processes), []
    for mine, part in enumerate(members):
        transport = Counter(mine, processes)
        nodes = [torch.zeros(BUCKET // 4) for _ in nodes_of(part)]
        with replaced(exchange, wait_for_processes=lambda work: None):  # outside of a rank
            exchange.Processes(members, mine, transport).begin(nodes)(combine_of(ReduceOp.SUM))
        sent.append((len(nodes), transport.sent / BUCKET))
    return dict(ranks=ranks, processes=processes, nodes=max(sent)[0], sent=max(sent)[1],
                formula=(max(sent)[0] + 1) * (processes - 1) / processes,
                ring=2 * (processes - 1) / processes)


class Simulation:
    """Clocks of N processes, and of the two directions of their network cards."""

    def __init__(self, processes: int, network: tuple[float, ...], seed: int) -> None:
        self.count = processes
        self._rate, self._latency, self._overhead, self._added = network
        self._random = random.Random(seed)
        self.clock = [0.] * processes
        self._out, self._in = [0.] * processes, [0.] * processes

    def _longer(self, seconds: float) -> float:
        return seconds * (1 + self._random.expovariate(5))

    def send(self, source: int, target: int, size: float) -> float:
        """Return when the message has arrived, sent when the source has come so far."""
        start = max(self.clock[source], self._out[source]) + self._longer(self._overhead)
        self._out[source] = start + self._longer(size / self._rate)
        arrived = max(start + self._longer(self._latency), self._in[target])
        self._in[target] = arrived + self._longer(size / self._rate)
        return self._in[target]

    def ring(self, size: float, steps: int, adds: bool) -> None:
        """Let every process pass a part on, so many times; each step needs the one before."""
        for _ in range(steps):
            arrived = [self.send(process, (process + 1) % self.count, size)
                       for process in range(self.count)]
            added = size / self._added if adds else 0
            self.clock = [max(self.clock[process], arrived[process - 1]) + self._longer(added)
                          for process in range(self.count)]

    def tree(self, size: float) -> None:
        """Send a part to every process, add up, and gather."""
        part, last = size / self.count, list(self.clock)
        for step in range(1, self.count):
            for process in range(self.count):
                target = (process + step) % self.count
                last[target] = max(last[target], self.send(process, target, part))
        self.clock = [one + self._longer(size / self._added) for one in last]
        self.ring(part, self.count - 1, False)


def simulated(processes: int, network: str, size: int) -> dict[str, Any]:
    """Return the median of the seconds of both, over the runs."""
    def median(kind: str) -> float:
        ends = []
        for seed in range(RUNS):
            simulation = Simulation(processes, NETWORKS[network], seed)
            if kind == 'tree':
                simulation.tree(size)
            else:
                simulation.ring(size / processes, processes - 1, True)
                simulation.ring(size / processes, processes - 1, False)
            ends.append(max(simulation.clock))
        return sorted(ends)[RUNS // 2]
    return dict(processes=processes, network=network, bytes=size, tree=median('tree'),
                ring=median('ring'))


def table(results: dict[str, Any]) -> str:
    lines = ['| V | processes N | nodes k of a process | counted | (k + 1)(N - 1)/N | a ring |',
             '|---|---|---|---|---|---|']
    lines += [f'| {row["ranks"]} | {row["processes"]} | {row["nodes"]} | {row["sent"]:.3f} S | '
              f'{row["formula"]:.3f} S | {row["ring"]:.3f} S |' for row in results['counted']]
    lines += ['', '| network, simulated | processes | bucket | tree | ring | tree / ring |',
              '|---|---|---|---|---|---|']
    lines += [f'| {row["network"]} | {row["processes"]} | {row["bytes"] / (1 << 20):g} MiB | '
              f'{row["tree"] * 1000:.2f} ms | {row["ring"] * 1000:.2f} ms | '
              f'{row["tree"] / row["ring"]:.2f} |' for row in results['simulated']]
    return '\n'.join(lines)


def main() -> None:
    results = dict(
        counted=[counted(*case) for case in COUNTED],
        simulated=[simulated(processes, network, size) for network in NETWORKS
                   for processes in SIMULATED for size in (BUCKET, 1 << 20)])
    RESULTS.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))


if __name__ == '__main__':
    main()
