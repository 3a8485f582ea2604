"""A function on V virtual ranks, in the processes of the pool or in this one."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch.distributed as dist

from mmrepro import on_virtual_ranks

__all__ = ['alone', 'on_processes', 'results_of', 'same_for_every_number']


def results_of(rank: int, world: int, function: Callable[[], Any], ranks: int) -> dict[int, Any]:
    """{virtual rank: result} of the ranks of this process."""
    found = {}

    def main() -> None:
        found[dist.get_rank()] = function()

    on_virtual_ranks(ranks, main, 'pytorch' if dist.is_initialized() else 'none')
    return found


def on_processes(pool: Any, processes: int, function: Callable[[], Any], ranks: int) -> list[Any]:
    """Results by virtual rank."""
    found: dict[int, Any] = {}
    for part in pool.run(results_of, processes, function, ranks):
        found.update(part)
    return [found[rank] for rank in range(ranks)]


def same_for_every_number(pool: Any, function: Callable[[], Any], ranks: int,
                          numbers: Sequence[int] = (1, 2)) -> list[Any]:
    """Results by virtual rank, once they are equal for all numbers of processes."""
    results = [on_processes(pool, processes, function, ranks) for processes in numbers]
    for processes, other in zip(numbers, results):
        assert other == results[0], f'{processes} processes'
    return results[0]


def alone(function: Callable[[], Any], ranks: int) -> list[Any]:
    """Results by virtual rank, in this process."""
    return list(results_of(0, 1, function, ranks).values())
