"""The kinds of interruptions."""
from __future__ import annotations

import signal
from random import Random
from typing import Callable, NamedTuple

from mmrepro.errors import PREEMPTED

Processes = list[tuple[int, tuple[int, ...]]]  # id of each process, ids of its workers


def _trainers(processes: Processes, random: Random) -> list[int]:
    return [pid for pid, _ in random.sample(processes, len(processes))]


def _all_processes(processes: Processes, random: Random) -> list[int]:
    pids = [pid for trainer, workers in processes for pid in (trainer, *workers)]
    return random.sample(pids, len(pids))


def _one_worker(processes: Processes, random: Random) -> list[int]:
    workers = [pid for _, pids in processes for pid in pids]
    return [random.choice(workers)] if workers else []


def _one_rank(processes: Processes, random: Random) -> list[int]:
    return [random.choice(processes)[0]]


class Kind(NamedTuple):
    """One kind of interruption."""
    why: str  # its cause in practice
    number: int  # of the signal
    victims: Callable[[Processes, Random], list[int]] = _trainers  # process ids that receive it
    moment: str = ''  # the moment after which it comes, '' for any iteration or validation batch
    ranks: int = 1  # least number of ranks with which the kind exists
    workers: int = 0  # least number of data loader workers
    # exit codes with which the processes may end; negative: the number of a signal
    codes: tuple[int, ...] = (-signal.SIGKILL, )
    waits: bool = False  # whether other ranks may wait for the one that was hit


KINDS: dict[str, Kind] = {
    'SIGKILL': Kind('the machine is gone, or out of memory', signal.SIGKILL),
    'SIGKILL while writing': Kind('the same, in the middle of a checkpoint', signal.SIGKILL,
                                  moment='save'),
    'SIGTERM': Kind('pre-emption; torchrun passes it on', signal.SIGTERM, codes=(PREEMPTED, )),
    'SIGUSR1': Kind('Slurm, before the time limit', signal.SIGUSR1, codes=(PREEMPTED, )),
    'SIGTERM to all': Kind('pre-emption that reaches data loader workers too', signal.SIGTERM,
                           _all_processes, workers=1, codes=(PREEMPTED, )),
    # the trainer raises an error of PyTorch; nothing waits for a worker of a finished pass
    'SIGKILL of a worker': Kind('out of memory, the largest process first', signal.SIGKILL,
                                _one_worker, workers=1, codes=(1, 0), waits=True),
    'SIGKILL of a rank': Kind('one machine of several is gone', signal.SIGKILL, _one_rank,
                              ranks=2, codes=(-signal.SIGKILL, 1), waits=True),
    'SIGTERM to one rank': Kind('pre-emption of one machine of several', signal.SIGTERM,
                                _one_rank, ranks=2, codes=(PREEMPTED, ), waits=True),
}


def allowed(ranks: int, workers: int) -> list[str]:
    """Return the names of the kinds that are possible."""
    return [name for name, kind in KINDS.items() if kind.ranks <= ranks and kind.workers <= workers]
