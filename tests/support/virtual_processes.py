"""A function on V virtual ranks, in the processes of the pool or in this one; the tree of a sum."""
import torch.distributed as dist
from rank_pool import shared_pool

from mmrepro import on_virtual_ranks
from mmrepro.distributed.ordered_sums import combine_of, finish_of


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


def written_out(leaves, op):
    """Build the tree from its description: halves of a power of two, the rest from the right."""
    combine, leaves = combine_of(op), list(leaves)

    def whole(part):
        if len(part) == 1:
            return part[0].clone()
        half = len(part) // 2
        return combine(whole(part[:half]), whole(part[half:]))

    parts, rest = [], leaves
    while rest:
        size = 1 << (len(rest).bit_length() - 1)
        parts.append(whole(rest[:size]))
        rest = rest[size:]
    total = parts.pop()
    while parts:
        total = combine(parts.pop(), total)
    return finish_of(op, len(leaves))(total)
