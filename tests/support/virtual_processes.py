"""A function on V virtual ranks, in the processes of the pool or in this one."""
import torch.distributed as dist
from rank_pool import shared_pool

from mmrepro import on_virtual_ranks


def results_of(rank, world, function, ranks):
    """Return {virtual rank: result} of the ranks of this process."""
    results = {}

    def main():
        results[dist.get_rank()] = function()

    on_virtual_ranks(ranks, main, 'pytorch' if dist.is_initialized() else 'none')
    return results


def on_processes(processes, function, ranks):
    results = {}
    for part in shared_pool().run(results_of, processes, function, ranks):
        results.update(part)
    return [results[rank] for rank in range(ranks)]


def same_for_every_number(function, ranks, numbers=(1, 2)):
    """Return results by virtual rank, once they are equal for all numbers of processes."""
    first, *others = (on_processes(processes, function, ranks) for processes in numbers)
    for processes, results in zip(numbers[1:], others):
        assert results == first, f'{processes} processes'
    return first


def alone(function, ranks):
    return list(results_of(0, 1, function, ranks).values())
