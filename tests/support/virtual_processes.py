"""A function on V virtual ranks, in the processes of the pool or in this one."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable

import torch.distributed as dist
from rank_pool import shared_pool

from mmrepro import on_virtual_ranks


def results_of(rank: int, world: int, function: Callable[[], Any], ranks: int) -> dict[int, Any]:
    """Return {virtual rank: result} of the ranks of this process."""
    results = {}

    def main() -> None:
        results[dist.get_rank()] = function()

    on_virtual_ranks(ranks, main, 'pytorch' if dist.is_initialized() else 'none')
    return results


def on_processes(processes: int, function: Callable[[], Any], ranks: int) -> list[Any]:
    """Return results by virtual rank."""
    results: dict[int, Any] = {}
    for part in shared_pool().run(results_of, processes, function, ranks):
        results.update(part)
    return [results[rank] for rank in range(ranks)]


def same_for_every_number(function: Callable[[], Any], ranks: int,
                          numbers: Sequence[int] = (1, 2)) -> list[Any]:
    """Return results by virtual rank, once they are equal for all numbers of processes."""
    first, *others = (on_processes(processes, function, ranks) for processes in numbers)
    for processes, results in zip(numbers[1:], others):
        assert results == first, f'{processes} processes'
    return first


def alone(function: Callable[[], Any], ranks: int) -> list[Any]:
    """Return results by virtual rank, in this process."""
    return list(results_of(0, 1, function, ranks).values())
