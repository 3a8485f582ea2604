"""Collective operations of V ranks: the same bits for every number of processes."""
import random

import pytest
import torch
import torch.distributed as dist
from rank_pool import LIMIT
from virtual_processes import alone, on_processes, same_for_every_number, written_out

from mmrepro.distributed.agreement import agree
from mmrepro.objects.digests import state_digest
from mmrepro.virtual import exchange


def own(*shape, kind=torch.float32, scale=3):
    generator = torch.Generator().manual_seed(dist.get_rank())
    return (torch.randn(*shape, generator=generator) * scale).to(kind)


def summed(value, op=dist.ReduceOp.SUM):
    dist.all_reduce(value, op)
    return value


def places(*shape):
    return [torch.zeros(*shape) for _ in range(dist.get_world_size())]


def filled(collective, output, *args):
    collective(output, *args)
    return output


def gathered():
    parts = places(2) if dist.get_rank() == 1 else None
    dist.gather(own(2), parts, 1)
    return parts


def scattered():
    parts = list(own(dist.get_world_size(), 2)) if dist.get_rank() == 1 else None
    return filled(dist.scatter, torch.zeros(2), parts, 1)


def objects_gathered():
    objects = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((dist.get_rank(), ), objects)
    return objects


COLLECTIVES = {
    # others: test_random_reductions_follow_the_tree; large enough to be divided among the processes
    'large': lambda world: summed(own(40001)),
    'avg': lambda world: summed(own(7), dist.ReduceOp.AVG),
    'not contiguous': lambda world: summed(own(3, 4).t()),
    'scalar': lambda world: summed(torch.tensor(float(dist.get_rank()))),
    'sum of nothing': lambda world: summed(torch.empty(0, 3)),
    'all_gather of nothing': lambda world: filled(dist.all_gather, places(0), torch.empty(0)),
    'broadcast of nothing': lambda world: filled(dist.broadcast, torch.empty(0, 2), world - 1),
    'bool': lambda world: summed(
        torch.tensor([dist.get_rank() == 1, dist.get_rank() > 5]), dist.ReduceOp.MAX),
    'all_gather': lambda world: filled(dist.all_gather, places(2, 2), own(2, 2)),
    'all_gather_into_tensor': lambda world: filled(
        dist.all_gather_into_tensor, torch.zeros(world * 2, 2), own(2, 2)),
    'broadcast of the first': lambda world: filled(dist.broadcast, own(4), 0),
    'broadcast of the last': lambda world: filled(dist.broadcast, own(4), world - 1),
    'reduce': lambda world: filled(dist.reduce, own(3), world - 1),
    'gather': lambda world: gathered(),
    'scatter': lambda world: scattered(),
    'reduce_scatter': lambda world: filled(
        dist.reduce_scatter, torch.zeros(2), list(own(world, 2))),
    'reduce_scatter_tensor': lambda world: filled(
        dist.reduce_scatter_tensor, torch.zeros(2), own(world * 2)),
    'all_to_all_single': lambda world: filled(
        dist.all_to_all_single, torch.zeros(world, 2), own(world, 2)),
    'all_to_all': lambda world: filled(dist.all_to_all, places(2), list(own(world, 2))),
    'all_gather_object': lambda world: filled(
        dist.all_gather_object, [None] * world,
        dict(rank=dist.get_rank(), text='x' * dist.get_rank())),
    'broadcast_object_list': lambda world: filled(
        dist.broadcast_object_list, [f'from {dist.get_rank()}', dist.get_rank()], 2),
    'gather_object': lambda world: objects_gathered(),
    'barrier': lambda world: dist.barrier(),
    'agree': lambda world: agree('a test', dist.get_rank(), lambda values: values),
    # objects around the size of the first message between processes, of other sizes on each rank
    **{f'agree on {size}': lambda world, size=size: agree(
        'a test', 'x' * (size * (dist.get_rank() + 1)), lambda values: values)
       for size in (1, 30, *range(40, 80, 3), 10_000)},
}


def digests_and_first():
    found = {name: collective(dist.get_world_size()) for name, collective in COLLECTIVES.items()}
    return {name: state_digest(value) for name, value in found.items()}, (
        None if dist.get_rank() else {name: found[name] for name in (
            'all_gather', 'all_gather_into_tensor', 'all_gather_object', 'gather_object',
            'broadcast_object_list', 'agree', 'scalar', 'bool')})


def test_collectives_do_not_depend_on_the_number_of_processes():
    one, three = (on_processes(processes, digests_and_first, 5) for processes in (1, 3))
    for name in COLLECTIVES:
        found = [[digests[name] for digests, _ in results] for results in (one, three)]
        assert found[0] == found[1], name


def test_collectives_give_what_they_should():
    first = alone(digests_and_first, 5)[0][1]
    assert first['all_gather_object'] == [dict(rank=rank, text='x' * rank) for rank in range(5)]
    assert first['gather_object'] == [(rank, ) for rank in range(5)]
    assert first['broadcast_object_list'] == ['from 2', 2]
    assert first['agree'] == list(range(5)) and first['scalar'] == 10
    assert first['bool'].tolist() == [True, False]
    noise = [torch.randn(2, 2, generator=torch.Generator().manual_seed(rank)) * 3
             for rank in range(5)]
    for expected, *found in zip(noise, first['all_gather'],
                                first['all_gather_into_tensor'].split(2)):
        assert all(torch.equal(expected, one) for one in found)


def sub_groups():
    """Ranks 0 and 3, and 1 and 2: on two processes, each group waits for the other process."""
    rank = dist.get_rank()
    outer, inner = dist.new_group([0, 3]), dist.new_group([1, 2])
    mine = outer if rank in (0, 3) else inner
    value = torch.tensor([float(rank + 1)])
    for _ in range(2):
        dist.all_reduce(value, group=mine)
    names = [None, None]
    dist.all_gather_object(names, f'rank {rank}', group=mine)
    total = torch.ones(1)
    dist.all_reduce(total)
    return value.item(), names, dist.get_rank(mine), total.item()


def test_sub_groups():
    found = same_for_every_number(sub_groups, 4)
    assert found[0] == (10.0, ['rank 0', 'rank 3'], 0, 4.0)
    assert found[1] == (10.0, ['rank 1', 'rank 2'], 0, 4.0)


def timeout_of_a_sub_group():
    transport = dist.new_group([0, 1])._processes._transport
    return transport._group._get_backend(torch.device('cpu')).options._timeout


def test_a_sub_group_waits_as_long_as_all_processes():
    assert on_processes(2, timeout_of_a_sub_group, 2) == [LIMIT] * 2


# types, and reductions of them
KINDS = (((torch.float16, torch.bfloat16, torch.float32, torch.float64),
          ('SUM', 'AVG', 'MIN', 'MAX', 'PRODUCT')),
         ((torch.uint8, torch.int32, torch.int64),
          ('SUM', 'MIN', 'MAX', 'PRODUCT', 'BAND', 'BOR', 'BXOR')))


class Reductions:
    """Random reductions, and on every rank what the description of the tree says."""

    def __init__(self, seed, ranks):
        self.seed, self.ranks = seed, ranks

    def __call__(self):
        draw, rank, found = random.Random(self.seed), dist.get_rank(), []
        before, exchange.DIVIDE_FROM = exchange.DIVIDE_FROM, 400  # both ways
        try:
            for number in range(25):
                shape = [draw.randint(1, 9) for _ in range(draw.randint(0, 3))]
                kind, op = map(draw.choice, draw.choice(KINDS))
                op = getattr(dist.ReduceOp, op)
                leaves = [torch.randn(shape, generator=torch.Generator().manual_seed(
                    self.seed * 1000 + number * 50 + one)).mul(3) for one in range(self.ranks)]
                # an integer that is negative wraps to a byte
                leaves = [(leaf if kind.is_floating_point else leaf.long()).to(kind)
                          for leaf in leaves]
                expected = written_out(leaves, op)
                if draw.random() < 0.5:
                    value = summed(leaves[rank], op)
                else:
                    value, whole = torch.empty_like(expected), [
                        leaves[rank] if one == number % self.ranks
                        else torch.zeros_like(expected) for one in range(self.ranks)]
                    dist.reduce_scatter(value, whole, op)
                    if rank != number % self.ranks:
                        continue
                if state_digest(value) != state_digest(expected):
                    found.append((number, shape, kind, op))
        finally:
            exchange.DIVIDE_FROM = before
        return found


@pytest.mark.parametrize('seed', range(16))
def test_random_reductions_follow_the_tree(seed):
    draw = random.Random(seed)
    ranks = draw.randint(1, 9)
    processes = draw.randint(1, min(4, ranks))
    found = on_processes(processes, Reductions(seed, ranks), ranks)
    assert not any(found), f'{ranks} ranks on {processes} processes: {found}'
