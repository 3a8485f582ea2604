"""Sums over ranks do not depend on buckets, nor on how the ranks are spread over processes."""
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from harness import digest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmrepro.distributed import ordered_sums
from mmrepro.distributed.ordered_sums import (
    ReductionTree,
    combine_of,
    finish_of,
    fix_gradient_order,
    ordered_mean,
    shares,
)

CAPS = [0.05, 1, 25]  # MB: a bucket per layer, a few, one


def model():
    torch.manual_seed(0)
    # sizes that 3 and 4 do not divide
    return nn.Sequential(nn.Linear(37, 401), nn.Tanh(), nn.Linear(401, 311), nn.Tanh(),
                         nn.Linear(311, 149), nn.Tanh(), nn.Linear(149, 5))


def batch(rank):
    return torch.randn(8, 37, generator=torch.Generator().manual_seed(100 + rank))


def own_gradients(rank):
    net = model()
    net(batch(rank)).square().sum().backward()
    return [p.grad for p in net.parameters()]


def ddp_gradients(rank, hook, cap, steps=3):
    """Return per step, all being equal, the digest of the gradients, and sizes of buckets if spied.

    DDP makes new buckets after the first step.
    """
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=cap)
    layouts = []
    if hook == 'fix':
        assert fix_gradient_order(wrapped) == [wrapped]
    elif hook == 'spy':  # the hook, and a look at the layout

        def spy(group, bucket):
            layouts[-1].append(bucket.buffer().numel())
            return ordered_sums.ordered_mean_hook(group, bucket)

        wrapped.register_comm_hook(wrapped.process_group, spy)
    digests = []
    for _ in range(steps):
        layouts.append([])
        wrapped.zero_grad()
        wrapped(batch(rank)).square().sum().backward()
        digests.append(digest([p.grad for p in wrapped.parameters()]))
    return digests, layouts


def expected(world):
    """Compute the definition, element by element, in one process."""
    ranks = [own_gradients(rank) for rank in range(world)]
    total = [grad * (1.0 / world) for grad in ranks[0]]
    for other in ranks[1:]:
        total = [t + grad * (1.0 / world) for t, grad in zip(total, other)]
    return digest(total)


def all_caps(rank, world, hook):
    return {cap: ddp_gradients(rank, hook, cap) for cap in CAPS}


def any_length(rank, world, dtype):
    results = []
    for length in (1, 2, world, 4 * world, 4 * world + 1, 1000):
        pieces = [torch.randn(length, generator=torch.Generator().manual_seed(r)).to(dtype)
                  for r in range(world)]
        total = pieces[0] * (1.0 / world)
        for piece in pieces[1:]:
            total = total + piece * (1.0 / world)
        mean = ordered_mean(pieces[rank].clone())
        results.append(mean.dtype == dtype and mean.shape == (length, ) and torch.equal(
            mean.view(torch.uint8), total.view(torch.uint8)))
    return results


def unused_parameters(rank, world):
    """A parameter without gradient on some ranks counts as zero there."""

    class Net(nn.Module):

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

        def forward(self, x):
            return self.a(x) if rank else self.a(x) + self.b(x)

    wrapped = DistributedDataParallel(Net(), find_unused_parameters=True)
    fix_gradient_order(wrapped)
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.ones(1, 2)).sum().backward()
    return wrapped.module.a.weight.grad.tolist(), wrapped.module.b.weight.grad.tolist()


def registered(rank, world):
    wrapped = DistributedDataParallel(model())
    count = len(fix_gradient_order(wrapped))
    with pytest.raises(RuntimeError) if count else nullcontext():
        fix_gradient_order(wrapped)
    return count


@pytest.mark.parametrize('world', [3, 4])
def test_buckets_do_not_matter(pool, world):
    want = expected(world)
    for result in pool.run(all_caps, world, 'fix'):
        for cap, (digests, _) in result.items():
            assert digests == [want] * 3, f'bucket_cap_mb={cap}'


def test_the_comparison_above_meets_different_buckets(pool):
    """Layouts differ between the caps, and between the first step and the next ones."""
    layouts = {cap: seen for cap, (_, seen) in pool.run(all_caps, 3, 'spy')[0].items()}
    assert len({str(seen[-1]) for seen in layouts.values()}) > 1
    assert layouts[CAPS[0]][0] != layouts[CAPS[0]][1] == layouts[CAPS[0]][2]


@pytest.mark.parametrize('world', [3, 4])
def test_a_plain_all_reduce_depends_on_buckets_and_their_rebuild(pool, world):
    """Without this, the tests above would show nothing."""
    result = pool.run(all_caps, world, 'none')[0].values()
    assert len({d for digests, _ in result for d in digests}) > 1
    assert world == 4 or any(digests[0] != digests[1] == digests[2] for digests, _ in result)


def test_two_ranks_get_the_bits_of_plain_ddp(pool):
    plain, hooked = (pool.run(all_caps, 2, hook)[0] for hook in ('none', 'spy'))
    want = {expected(2)}
    for result in (plain, hooked):
        assert {d for digests, _ in result.values() for d in digests} == want


@pytest.mark.parametrize('dtype', [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('world', [1, 3, 4])
def test_the_mean_is_the_definition_for_any_length(pool, world, dtype):
    assert all(all(result) for result in pool.run(any_length, world, dtype))


def test_a_parameter_that_a_rank_does_not_use_counts_as_zero(pool):
    third = (torch.tensor(1.0) * (1 / 3)).item()
    whole = (torch.tensor(third) + third + third).item()
    for used, unused in pool.run(unused_parameters, 3):
        assert used == [[whole] * 2] * 2 and unused == [[third] * 2] * 2


@pytest.mark.parametrize(('world', 'count'), [(1, 0), (2, 0), (3, 1)])
def test_the_hook_is_registered_where_it_matters_and_a_second_one_is_refused(pool, world, count):
    assert pool.run(registered, world) == [count] * world


GOLDEN = ['0x1.9f4d760000000p+13', '0x1.d0c2e00000000p-4']


def spread(leaves, split, op):
    """Reduce as processes do: each its leaves, then one all nodes."""
    combine, nodes = combine_of(op), []
    for share in split:
        own = ReductionTree(combine)
        for number in share:
            own.add_leaf(number, leaves[number].clone())
        assert [node[:2] for node in own.nodes] == ordered_sums.nodes_of(share)
        nodes += own.nodes
    tree = ReductionTree(combine)
    for node in nodes:
        tree.add(node)
    return finish_of(op, len(leaves))(tree.root())


def test_the_order_is_the_documented_one():
    for ranks, order in ((1, '0'), (2, '(0 1)'), (3, '((0 1) 2)'), (4, '((0 1) (2 3))'),
                         (7, '(((0 1) (2 3)) ((4 5) 6))')):
        tree = ReductionTree(lambda left, right: f'({left} {right})')
        for number in range(ranks):
            tree.add_leaf(number, str(number))
        assert tree.root() == order


def test_golden_values():
    """Scheme 2. If these change, the number of the scheme has to."""
    leaves = [torch.tensor([1e4 / (rank + 3), (-1) ** rank / (rank + 7)]) for rank in range(7)]
    total = spread(leaves, shares(7, 3), dist.ReduceOp.SUM)
    assert [float(one).hex() for one in total] == GOLDEN
    mean = spread(leaves, shares(7, 7), dist.ReduceOp.AVG)
    assert torch.equal(mean, total / 7)


def test_leaves_out_of_order_and_unknown_operations_are_refused():
    tree = ReductionTree(combine_of(dist.ReduceOp.SUM))
    tree.add_leaf(1, torch.zeros(1))
    with pytest.raises(ValueError, match='leaf 0 came after'):
        tree.add_leaf(0, torch.zeros(1))
    tree.add(ordered_sums.Node(1, 1, torch.zeros(1)))
    with pytest.raises(ValueError, match='leaf 3 came after'):
        tree.add_leaf(3, torch.zeros(1))
    with pytest.raises(NotImplementedError, match='PREMUL_SUM.*allowed: .*SUM'):
        combine_of(dist.ReduceOp.PREMUL_SUM)


def test_shares_are_even_and_consecutive():
    for ranks in range(1, 12):
        for processes in range(1, ranks + 1):
            split = shares(ranks, processes)
            assert [rank for share in split for rank in share] == list(range(ranks))
            assert {len(share) for share in split} <= {ranks // processes, -(-ranks // processes)}
