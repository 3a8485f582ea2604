"""A reduction over ranks: its bits depend on the number of ranks, not on who adds up what."""
import pytest
import torch
import torch.distributed as dist

from mmrepro.distributed import reduction_tree
from mmrepro.distributed.reduction_tree import ReductionTree, combine_of, finish_of, shares

GOLDEN = ['0x1.9f4d760000000p+13', '0x1.d0c2e00000000p-4']


def spread(leaves, split, op):
    """Reduce as processes do: each its leaves, then one all nodes."""
    combine, nodes = combine_of(op), []
    for share in split:
        own = ReductionTree(combine)
        for number in share:
            own.add_leaf(number, leaves[number].clone())
        assert [node[:2] for node in own.nodes] == reduction_tree.nodes_of(share)
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
    tree.add(reduction_tree.Node(1, 1, torch.zeros(1)))
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
