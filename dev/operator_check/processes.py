"""Virtual ranks on two processes, whose collective operations have to give the bits of one process.

    python -m torch.distributed.run --nproc_per_node 2 dev/operator_check/processes.py cuda

prints a digest of the results of all ranks. On CUDA the processes exchange bytes over NCCL, and
each has a GPU to itself.
"""
from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
SIZES = (1, 1000, 1 << 20)
REPETITIONS = 5  # of each operation, whose results must be equal
LIMIT = 120  # seconds

__all__ = ['row']


def row(device: str) -> dict[str, Any]:
    """Compare one process and two, these twice."""
    if device == 'cuda' and torch.cuda.device_count() < 2:
        return dict(left_out=f'{torch.cuda.device_count()} GPU; NCCL wants one for each process')
    first, *digests = (_started(device, processes) for processes in (1, 2, 2))
    differs = [f'two processes, start {number}' for number, digest in enumerate(digests, 1)
               if digest != first]
    return dict(equal=not differs, differs=differs, digest=first, times=REPETITIONS)


def _started(device: str, processes: int) -> str:
    launcher = ['-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', str(processes)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get('PYTHONPATH'))))
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', *launcher, __file__, device], text=True,
        capture_output=True, timeout=LIMIT, env={**os.environ, 'PYTHONPATH': path})
    if done.returncode:
        # torchrun ends with a report of its own
        errors = re.findall(r'^(?:\[rank\d+\]: *)?([\w.]*Error\b.*)', done.stderr, re.M)
        raise RuntimeError((errors or done.stderr.strip().splitlines() or ['no output'])[0])
    return next(line.split()[1] for line in done.stdout.splitlines() if line.startswith('digest '))


def _operations(device: str) -> str:
    """Return the digest of what collective operations gave all ranks."""
    rank = dist.get_rank()
    total = hashlib.sha256()
    for size in SIZES:
        mine = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(device)
        for _ in range(REPETITIONS):
            summed, sent = mine.clone(), mine.clone()
            gathered = [torch.empty_like(mine) for _ in range(RANKS)]
            dist.all_reduce(summed)
            dist.broadcast(sent, RANKS - 1)
            dist.all_gather(gathered, mine)
            total.update(torch.stack((summed, sent, *gathered)).cpu().numpy().tobytes())
    ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(ranks, total.hexdigest())
    return hashlib.sha256(' '.join(ranks).encode()).hexdigest()[:32]


def main(device: str) -> None:
    from mmrepro import on_virtual_ranks
    backend = 'nccl' if device == 'cuda' else 'gloo'
    digest = on_virtual_ranks(RANKS, lambda: _operations(device), 'pytorch',
                              dict(dist_cfg=dict(backend=backend)))
    if os.environ.get('RANK', '0') == '0':
        print('digest', digest, flush=True)


if __name__ == '__main__':
    main(sys.argv[1])
