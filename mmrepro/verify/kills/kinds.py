"""The kinds of interruptions."""
from __future__ import annotations

import os
import signal
from random import Random
from typing import Callable, NamedTuple

from ...exit_codes import PREEMPTED

Processes = list[tuple[int, tuple[int, ...]]]  # id of each process, ids of its workers


def _trainers(processes: Processes, random: Random) -> list[int]:
    return [pid for pid, _ in random.sample(processes, len(processes))]


def _all_processes(processes: Processes, random: Random) -> list[int]:
    pids = [pid for trainer, workers in processes for pid in (trainer, *workers)]
    return random.sample(pids, len(pids))


def _one_worker(processes: Processes, random: Random) -> list[int]:
    workers = [pid for _, several in processes for pid in several]
    return [random.choice(workers)] if workers else []


def _one_rank(processes: Processes, random: Random) -> list[int]:
    return [random.choice(processes)[0]]


class Kind(NamedTuple):
    """One kind of interruption."""
    why: str  # its cause in practice
    number: int  # of the signal
    victims: Callable[[Processes, Random], list[int]] = _trainers  # process ids that receive it
    moment: str = ''  # the moment after which it comes, '' for any iteration or validation batch
    # whether the kind exists with these numbers of ranks and workers
    possible: Callable[[int, int], bool] = lambda ranks, workers: True
    # exit codes with which the processes may end; negative: the number of a signal
    codes: tuple[int, ...] = (-signal.SIGKILL, )


KINDS: dict[str, Kind] = {
    'SIGKILL': Kind('the machine is gone, or out of memory', signal.SIGKILL),
    'SIGKILL while writing': Kind('the same, in the middle of a checkpoint', signal.SIGKILL,
                                  moment='save'),
    'SIGTERM': Kind('pre-emption; torchrun passes it on', signal.SIGTERM, codes=(PREEMPTED, )),
    'SIGUSR1': Kind('Slurm, before the time limit', signal.SIGUSR1, codes=(PREEMPTED, )),
    'SIGTERM to all': Kind('pre-emption that reaches data loader workers too', signal.SIGTERM,
                           _all_processes, possible=lambda ranks, workers: workers > 0,
                           codes=(PREEMPTED, )),
    # the trainer raises an error of PyTorch; nothing waits for a worker of a finished pass
    'SIGKILL of a worker': Kind('out of memory, the largest process first', signal.SIGKILL,
                                _one_worker, possible=lambda ranks, workers: workers > 0,
                                codes=(1, 0)),
    'SIGKILL of a rank': Kind('one machine of several is gone', signal.SIGKILL, _one_rank,
                              possible=lambda ranks, workers: ranks > 1,
                              codes=(-signal.SIGKILL, 1)),
    'SIGTERM to one rank': Kind('pre-emption of one machine of several', signal.SIGTERM,
                                _one_rank, possible=lambda ranks, workers: ranks > 1,
                                codes=(PREEMPTED, )),
}


def strike(kind: str, processes: Processes, random: Random) -> None:
    """Send the signal of a kind to the processes that it chooses."""
    for pid in KINDS[kind].victims(processes, random):
        try:
            os.kill(pid, KINDS[kind].number)
        except ProcessLookupError:  # it has ended meanwhile
            pass


def allowed(ranks: int, workers: int) -> list[str]:
    """Return the names of the kinds that are possible."""
    return [name for name, kind in KINDS.items() if kind.possible(ranks, workers)]
