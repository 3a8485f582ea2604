"""Synchronised batch norm on ranks without an accelerator: torch's module and mmcv's."""
import copy

import pytest
import torch
from operators import batch_norm, draw, trained

from mmrepro import ops
from mmrepro.ops.aten import sync_bn
from mmrepro.util.scoped import replaced


def on_a_rank(rank, world, layer, x, upstream, sizes, kind):
    """Compute the share of a rank of ``trained``; rank r has ``sizes[r]`` of the samples."""
    start = sum(sizes[:rank])
    part = slice(start, start + sizes[rank])
    if kind == 'torch':
        module = torch.nn.SyncBatchNorm(layer.num_features)
    else:
        ops.use('torch')
        from mmcv.ops import SyncBatchNorm
        module = SyncBatchNorm(layer.num_features, stats_mode=kind)
    module.load_state_dict(layer.state_dict())
    with replaced(torch.nn.SyncBatchNorm, forward=sync_bn.forward):
        return trained(module, x[part], upstream[part])


@pytest.mark.parametrize('kind, sizes', [
    ('torch', (3, 3)), ('torch', (5, 1)), ('torch', (6, 0)), ('torch', (2, 3, 1)),
    ('default', (3, 3)), ('N', (5, 1))])
def test_ranks_together_are_one_big_batch(pool, kind, sizes):
    layer, x, upstream = batch_norm(4), draw(6, 4, 3, 5), draw(6, 4, 3, 5, seed=9)
    expected = trained(copy.deepcopy(layer), x, upstream)
    ranks = pool.run(on_a_rank, len(sizes), layer, x, upstream, sizes, kind)
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), expected[0])
    torch.testing.assert_close(ranks[0][4], expected[4])
    if kind == 'N':  # mmcv counts the samples of a rank for all the rest, also in this mode
        return
    for rank in ranks:
        assert torch.equal(rank[4], ranks[0][4]) and torch.equal(rank[5], ranks[0][5])
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks]), expected[1])
    torch.testing.assert_close(ranks[0][5], expected[5])
    for number in (2, 3):
        # torch leaves the sum of gradients to DDP; mmcv has averaged them already
        total = sum(rank[number] for rank in ranks)
        torch.testing.assert_close(total, expected[number])


def again(rank, world, layer, x, upstream, sizes):
    first, second = (on_a_rank(rank, world, layer, x, upstream, sizes, 'torch') for _ in range(2))
    return all(torch.equal(a, b) for a, b in zip(first, second))


def test_the_bits_repeat(pool):
    layer, x, upstream = batch_norm(3), draw(6, 3, 64, 64), draw(6, 3, 64, 64, seed=9)
    assert all(pool.run(again, 3, layer, x, upstream, (2, 1, 3)))


def test_sums_do_not_depend_on_the_number_of_threads():
    """Forked ranks cannot change it once this process has had several."""
    values = draw(6, 3, 64 * 64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = sync_bn.sum_per_channel(values)
        torch.set_num_threads(2)
        assert torch.equal(sync_bn.sum_per_channel(values), expected)
    finally:
        torch.set_num_threads(before)


def other_kinds(rank, world):
    """Half, no parameters, no statistics, two dimensions, a given average: what torch accepts."""
    results = {}
    with replaced(torch.nn.SyncBatchNorm, forward=sync_bn.forward):
        x = draw(6, 4, seed=rank).requires_grad_()
        plain = torch.nn.SyncBatchNorm(4, affine=False, track_running_stats=False)
        plain(x).square().sum().backward()
        results['plain'] = [plain(x.detach()), x.grad]
        changed = torch.nn.functional.relu_(plain(x.detach().requires_grad_()))
        changed.sum().backward()
        half = torch.nn.SyncBatchNorm(4)(draw(2, 4, 3, seed=rank).bfloat16())
        results['half'] = half.detach()
        average = torch.nn.SyncBatchNorm(4, momentum=None)
        for seed in range(3):
            average(draw(6, 4, seed=seed * world + rank))
        results['average'] = average.running_mean
        results['eval'] = average.eval()(x.detach()).detach()
    return results


def test_every_form_of_the_module(pool):
    first, second = pool.run(other_kinds, 2)
    x = torch.cat([draw(6, 4, seed=0), draw(6, 4, seed=1)]).requires_grad_()
    plain = torch.nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    plain(x).square().sum().backward()
    for number, expected in enumerate((plain(x.detach()), x.grad)):
        both = torch.cat([first['plain'][number], second['plain'][number]])
        torch.testing.assert_close(both, expected, rtol=1e-4, atol=1e-5)
    assert first['half'].dtype == torch.bfloat16
    average = torch.nn.BatchNorm1d(4, momentum=None)
    for seed in range(3):
        average(torch.cat([draw(6, 4, seed=seed * 2 + rank) for rank in range(2)]))
    torch.testing.assert_close(first['average'], average.running_mean)
    torch.testing.assert_close(first['eval'], average.eval()(draw(6, 4, seed=0)))


def refused(rank, world):
    with replaced(torch.nn.SyncBatchNorm, forward=sync_bn.forward):
        try:
            torch.nn.SyncBatchNorm(2)(torch.zeros(1 - rank, 2))
        except ValueError as error:
            return str(error)


def test_one_value_per_channel_is_refused(pool):
    for said, shape in zip(pool.run(refused, 2), ('(1, 2)', '(0, 2)')):
        assert 'more than 1 value per channel' in said and shape in said


def test_without_ranks_it_is_torchs_own():
    with replaced(torch.nn.SyncBatchNorm, forward=sync_bn.forward):
        out = torch.nn.SyncBatchNorm(2)(draw(3, 2))
    assert torch.equal(out, torch.nn.SyncBatchNorm(2)(draw(3, 2)))
