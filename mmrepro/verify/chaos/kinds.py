"""The ways to interrupt a run."""
from __future__ import annotations

import os
import signal
from random import Random
from typing import Callable, Dict, List, NamedTuple, Tuple

from ...exit_codes import PREEMPTED

__all__ = ['KINDS', 'Kind', 'allowed']

Processes = List[Tuple[int, Tuple[int, ...]]]  # per rank: process id, those of its workers


class Kind(NamedTuple):
    """One way to interrupt."""
    why: str  # what does this to a run
    strike: Callable[[Processes, Random], None]  # does it to the processes
    moment: str = ''  # the event after which it happens, '' for any iteration or validation batch
    # whether it is, with so many ranks and workers
    possible: Callable[[int, int], bool] = lambda ranks, workers: True
    # exit codes that the processes may end with; negative: the number of a signal
    codes: Tuple[int, ...] = (-signal.SIGKILL, )


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        pass


def _to_trainers(number: int) -> Callable[[Processes, Random], None]:
    def strike(processes: Processes, random: Random) -> None:
        for pid, _ in random.sample(processes, len(processes)):
            _send(pid, number)
    return strike


def _to_all(processes: Processes, random: Random) -> None:
    everybody = [pid for trainer, workers in processes for pid in (trainer, *workers)]
    for pid in random.sample(everybody, len(everybody)):
        _send(pid, signal.SIGTERM)


def _to_one_worker(processes: Processes, random: Random) -> None:
    workers = [pid for _, several in processes for pid in several]
    if workers:
        _send(random.choice(workers), signal.SIGKILL)


def _to_one_rank(number: int) -> Callable[[Processes, Random], None]:
    def strike(processes: Processes, random: Random) -> None:
        _send(random.choice(processes)[0], number)
    return strike


def _several(ranks: int, workers: int) -> bool:
    return ranks > 1


KINDS: Dict[str, Kind] = {
    'SIGKILL': Kind('the machine is gone, or out of memory', _to_trainers(signal.SIGKILL)),
    'SIGKILL while writing': Kind('the same, in the middle of a checkpoint',
                                  _to_trainers(signal.SIGKILL), moment='save'),
    'SIGTERM': Kind('pre-emption; torchrun passes it on', _to_trainers(signal.SIGTERM),
                    codes=(PREEMPTED, )),
    'SIGUSR1': Kind('Slurm, before the time limit', _to_trainers(signal.SIGUSR1),
                    codes=(PREEMPTED, )),
    'SIGTERM to all': Kind('pre-emption that reaches data loader workers too', _to_all,
                           possible=lambda ranks, workers: workers > 0, codes=(PREEMPTED, )),
    # the trainer raises an error of PyTorch; nothing waits for a worker of a finished pass
    'SIGKILL of a worker': Kind('out of memory, the largest process first', _to_one_worker,
                                possible=lambda ranks, workers: workers > 0, codes=(1, 0)),
    'SIGKILL of a rank': Kind('one machine of several is gone', _to_one_rank(signal.SIGKILL),
                              possible=_several, codes=(-signal.SIGKILL, 1)),
    'SIGTERM to one rank': Kind('pre-emption of one machine of several',
                                _to_one_rank(signal.SIGTERM), possible=_several,
                                codes=(PREEMPTED, )),
}


def allowed(ranks: int, workers: int) -> List[str]:
    """Names of the kinds that are possible."""
    return [name for name, kind in KINDS.items() if kind.possible(ranks, workers)]
