"""V ranks on N processes: the same bits for every N."""
import functools
import os
import random
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import python
from rank_pool import shared_pool
from torch import nn
from torch.utils.checkpoint import checkpoint
from virtual_faults import FAULTS
from virtual_processes import (
    alone,
    on_processes,
    results_of,
    same_for_every_number,
    written_out,
)

from mmrepro import on_virtual_ranks
from mmrepro.distributed.scheduler import current
from mmrepro.errors import CollectiveMismatch, Deadlock, RandomnessError, VirtualRanksError
from mmrepro.objects.digests import state_digest
from mmrepro.ops.aten import sync_bn
from mmrepro.util.scoped import replaced
from mmrepro.virtual import entry, gradients, heap
from mmrepro.virtual.gradients import VirtualDataParallel


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.second, self.unused = nn.Linear(8, 1), nn.Linear(2, 2)
        self.sometimes = nn.Parameter(torch.ones(1))

    def forward(self, x):
        hidden = self.norm(self.first(x)).relu()
        loss = self.second(nn.functional.dropout(hidden)).square().mean()
        return dict(loss=loss * self.sometimes if dist.get_rank() % 2 else loss)


def steps():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = VirtualDataParallel(Net(), broadcast_buffers=False)
    start = state_digest(dict(model.module.named_parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = [start]
    for step in range(4):
        with model.no_sync() if step == 1 else nullcontext():
            loss = model(torch.randn(4, 6))['loss']
        loss.backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
        found.append(state_digest(loss.detach()))
    assert model.module.unused.weight.grad is None
    found.append(state_digest(dict(model.named_parameters())))
    return found + [state_digest(dict(model.named_buffers()))]


@pytest.mark.parametrize('ranks, numbers', [(2, (1, 2)), (5, (1, 2, 4))])
def test_a_training_does_not_depend_on_the_number_of_processes(ranks, numbers):
    found = same_for_every_number(steps, ranks, numbers)
    assert len({one[0] for one in found}) == len({one[-2] for one in found}) == 1  # weights
    assert len({one[-1] for one in found}) == ranks  # statistics


def losses_of(model, batch, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(model(batch()))
        losses[-1].backward()
        optimizer.step()
    return losses


class Squared(nn.Sequential):
    def forward(self, x):
        return (super().forward(x).square().mean() - torch.rand(1)).square()


def synchronised():
    """mmcv's SyncBN; torch's communicates in the test of activation checkpointing."""
    from mmcv.ops import SyncBatchNorm
    torch.manual_seed(0)
    net = Squared(nn.Conv2d(3, 4, 3), SyncBatchNorm(4), nn.ReLU(), nn.Conv2d(4, 2, 3),
                  SyncBatchNorm(2))
    model = VirtualDataParallel(net, broadcast_buffers=False)
    torch.manual_seed(dist.get_rank())
    losses_of(model, lambda: torch.randn(2, 3, 8, 8))
    return state_digest(net.state_dict())


def test_synchronised_batch_norm_trains():
    assert len(set(same_for_every_number(synchronised, 3))) == 1


def own_gradients():
    model = VirtualDataParallel(nn.Linear(3, 2), broadcast_buffers=False)
    torch.nn.init.ones_(model.module.weight)
    x = torch.full((1, 3), float(dist.get_rank()))
    model(x).square().sum().backward()
    own = torch.autograd.grad(model.module(x).square().sum(), list(model.parameters()))
    return [one.grad for one in model.parameters()], own


def test_gradients_are_the_mean_in_the_order_of_the_tree():
    found = alone(own_gradients, 4)
    for number in range(2):
        a, b, c, d = (own[number] / 4 for _, own in found)
        for means, _ in found:
            assert torch.equal(means[number], (a + b) + (c + d))


def other_parameters(shapes):
    """Train with another layer frozen on the last rank."""
    net = Squared(*(nn.Linear(*shape) for shape in shapes))
    net[dist.get_rank() == dist.get_world_size() - 1].requires_grad_(False)
    losses_of(VirtualDataParallel(net), lambda: torch.randn(2, 3))


def other_parameters_part(rank, world, shapes):
    with pytest.raises(CollectiveMismatch, match='trains other parameters than another rank'):
        results_of(rank, world, functools.partial(other_parameters, shapes), 4)


@pytest.mark.parametrize('processes, shapes', [
    *((processes, [(3, 3), (3, 3)]) for processes in (1, 2, 4)), (1, [(3, 4), (4, 3)])])
def test_ranks_that_freeze_other_parameters_are_refused(processes, shapes):
    shared_pool().run(other_parameters_part, processes, shapes)


def several_gradients():
    """Those of the second pass, in which they move when they are made: the mean and its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    net.double_bias = nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = VirtualDataParallel(net, broadcast_buffers=False)
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        x = torch.randn(4, 3)
        loss = (model(x) * net.double_bias).square().mean()
        loss.backward()
    own = torch.autograd.grad((net(x) * net.double_bias).square().mean(), list(net.parameters()))
    return [one.grad.clone() for one in net.parameters()], own


@pytest.mark.parametrize('chunk, bucket', [(1, 1), (1, 1 << 20), (40, 90), (1 << 20, 1 << 20)])
def test_parts_of_gradients_that_are_added_up_at_once_change_no_bit(chunk, bucket, monkeypatch):
    monkeypatch.setattr(gradients, 'CHUNK', chunk)
    monkeypatch.setattr(gradients, 'BUCKET', bucket)
    found = alone(several_gradients, 5)
    for number in range(7):
        expected = written_out([own[number] * (1 / 5) for _, own in found], dist.ReduceOp.SUM)
        for means, _ in found:
            assert torch.equal(means[number], expected)


def kept_gradients(view):
    model, kept = VirtualDataParallel(nn.Linear(3, 2)), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: kept.append(parameter.grad.detach() if view else parameter.grad))
    for _ in range(2):  # from the second pass on, gradients move when they are made
        model.zero_grad()
        model(torch.full((1, 3), dist.get_rank() + 1.)).sum().backward()
    return [one.unique().tolist() for one in kept]


@pytest.mark.skipif(not hasattr(torch.Tensor, 'register_post_accumulate_grad_hook'),
                    reason='torch 2.1 has them')
@pytest.mark.parametrize('view', [False, True])
def test_gradients_that_the_program_keeps_stay_those_of_the_rank(view):
    assert alone(functools.partial(kept_gradients, view), 2) == [
        [[1], [rank + 1]] * 2 for rank in range(2)]


def kept_means(view):
    """The mean of each step, as the program has it in the end, and where it was."""
    model, kept = VirtualDataParallel(nn.Linear(3, 2)), []
    model.sharing = SimpleNamespace(views=True)
    for step in range(3):
        model.zero_grad()
        model(torch.full((1, 3), step + 1.)).sum().backward()
        kept.append([view(model.module.weight.grad), model.module.weight.grad.data_ptr()])
    return [(mean.tolist(), place) for mean, place in kept]


@pytest.mark.parametrize('view', [lambda mean: mean, torch.detach])
def test_means_that_the_program_keeps_stay_those_of_the_step(view):
    for found in alone(functools.partial(kept_means, view), 2):
        assert [mean for mean, _ in found] == [[[step] * 3] * 2 for step in (1, 2, 3)]


@pytest.mark.skipif(not hasattr(torch._C, '_storage_Use_Count'), reason='torch 2.1 has none')
def test_sums_keep_their_memory_from_step_to_step():
    for found in alone(functools.partial(kept_means, torch.clone), 4):
        assert [mean for mean, _ in found] == [[[step] * 3] * 2 for step in (1, 2, 3)]
        assert len({place for _, place in found}) == 1


class TwiceUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16))

    def forward(self, x):
        hidden = x @ self.weight
        dist.all_reduce(torch.ones(1))
        return (hidden @ self.weight).float().square().mean()


def scaled(dtype):
    """Autocast and loss scaling; in step 1 the gradients of rank 1 overflow."""
    model = VirtualDataParallel(TwiceUsed(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler('cpu', init_scale=256., growth_interval=2)
    torch.manual_seed(dist.get_rank())
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast('cpu', dtype):
            loss = model(torch.randn(4, 16))
        if step == 1 and dist.get_rank() == 1:
            loss = loss * float('inf')
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), norm.item().hex()))
    return scales, state_digest(model.state_dict())


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast_loss_scaling_and_clipping(dtype):
    found = same_for_every_number(functools.partial(scaled, dtype), 3, (1, 2, 3))
    # all ranks leave out the step in which one of them overflowed
    assert found == found[:1] * 3
    assert [scale for scale, _ in found[0][0]] == [256., 128., 128., 256.]


class Recomputed(nn.Module):
    """Its first part, with a collective operation and dropout, runs again in the backward pass."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.Dropout(0.3))
        self.second, self.reentrant = nn.Conv2d(4, 1, 3), reentrant

    def forward(self, x):
        hidden = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.second(hidden).square().mean()


def recomputed(reentrant):
    torch.manual_seed(0)
    model = VirtualDataParallel(Recomputed(reentrant), broadcast_buffers=False)
    torch.manual_seed(dist.get_rank())
    with replaced(nn.SyncBatchNorm, forward=sync_bn.forward):
        losses = losses_of(model, lambda: torch.randn(2, 3, 8, 8, requires_grad=True))
    return state_digest(losses), state_digest(model.state_dict()), torch.rand(1).item()


@pytest.mark.parametrize('reentrant', [True, False])
def test_activation_checkpointing(reentrant):
    found = same_for_every_number(functools.partial(recomputed, reentrant), 3)
    assert len({weights for _, weights, _ in found}) == 1
    assert len({losses for losses, _, _ in found}) == 3


class Failing(nn.Sequential):
    """Its backward pass may raise when gradients of the last layer are made already."""
    fails = False

    def forward(self, x):
        hidden = self[0](x)
        hidden.register_hook(self.fail)
        return self[1](hidden).square().mean()

    def fail(self, gradient):
        if self.fails:
            raise KeyError('planted')


def steps_that_fail(ranks, caught=False):
    """Train; in the third step the backward pass of some ranks ends with an error."""
    torch.manual_seed(0)
    model = VirtualDataParallel(Failing(nn.Linear(200, 200), nn.Linear(200, 2)))
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        model.module.fails = step == 2 and dist.get_rank() in ranks
        with suppress(KeyError) if caught else nullcontext():
            losses_of(model, lambda: torch.randn(2, 200))
    return state_digest(model.state_dict())


def failing_part(rank, world, ranks):
    with pytest.raises(KeyError, match='planted'):
        results_of(rank, world, functools.partial(steps_that_fail, ranks), 4)


@pytest.mark.parametrize('processes, ranks', [(1, (2, )), (2, range(4)), (4, range(4))])
def test_an_error_in_a_backward_pass_leaves_nothing_behind(processes, ranks):
    train = functools.partial(steps_that_fail, ())
    expected = alone(train, 4)
    shared_pool().run(failing_part, processes, ranks)
    assert on_processes(processes, train, 4) == expected


def test_a_backward_pass_behind_one_that_failed_is_refused():
    with pytest.raises(VirtualRanksError, match='ended with an error that was caught'):
        alone(functools.partial(steps_that_fail, range(4), True), 4)


def added_gradients(views):
    """Two backward passes of a rank before it steps."""
    model = VirtualDataParallel(nn.Linear(3, 2))
    nn.init.ones_(model.module.weight)
    model.sharing = SimpleNamespace(views=views)
    for factor in (1, 2):
        model(torch.full((1, 3), factor + float(dist.get_rank()))).square().sum().backward()
    return model.module.weight.grad.clone()


def test_a_second_backward_pass_leaves_common_sums_alone():
    for common, own in zip(*(alone(functools.partial(added_gradients, views), 3)
                             for views in (True, False))):
        assert torch.equal(common, own)


class Returning(nn.Module):
    """Returns a parameter, as losses that weigh tasks by a learned uncertainty do."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return dict(loss=(self.weight * x).sum(), loss_scale=self.scale)


def gradients_behind_a_mean():
    model = VirtualDataParallel(Returning())
    for context in (nullcontext, model.no_sync):
        model.zero_grad()
        with context():
            sum(model(torch.full((3, ), 1. + dist.get_rank())).values()).backward()
    return model.module.weight.grad.tolist()


def test_a_parameter_that_was_returned_leaves_later_passes_alone():
    assert alone(gradients_behind_a_mean, 2) == [[1.] * 3, [2.] * 3]


class Aliased(nn.Module):
    """Autograd gives the gradients of both parameters the same memory."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(1, 5)), nn.Parameter(torch.ones(5, 1))

    def forward(self, x):
        return (self.first.view(5) + self.second.view(5)).mul(x).sum()


def aliased_gradients():
    model, found = VirtualDataParallel(Aliased()), []
    for _ in range(2):
        model.zero_grad()
        model(torch.arange(5.) + dist.get_rank()).backward()
        found += [one.grad.flatten().tolist() for one in model.parameters()]
    return found


def test_gradients_that_share_memory():
    for found in same_for_every_number(aliased_gradients, 2):
        assert found == [[0.5, 1.5, 2.5, 3.5, 4.5]] * 4


class Tied(nn.Linear):
    """Uses its weight inside and outside of a checkpoint, which begins in some step."""

    def forward(self, x, checkpointed):
        layer = super().forward
        hidden = checkpoint(layer, x, use_reentrant=True) if checkpointed else layer(x)
        return layer(hidden).square().mean()


def tied_steps(begin):
    torch.manual_seed(0)
    model = VirtualDataParallel(Tied(4, 4))
    torch.manual_seed(dist.get_rank())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(model(torch.randn(2, 4, requires_grad=True), step >= begin))
        losses[-1].backward()
        optimizer.step()
    return state_digest(losses)


def test_a_weight_inside_and_outside_of_a_checkpoint():
    same_for_every_number(functools.partial(tied_steps, 0), 3)
    with pytest.raises(VirtualRanksError, match='inside and outside .*use_reentrant=False'):
        alone(functools.partial(tied_steps, 1), 3)


def test_the_state_of_the_process_comes_back():
    from mmengine.logging import MessageHub
    MessageHub.get_instance('outside')
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    before = torch.rand(1).item()

    def main():
        MessageHub.get_instance(f'inside {dist.get_rank()}')
        torch.manual_seed(1)
        dist.barrier()
        return MessageHub.check_instance_created('outside'), [
            MessageHub.check_instance_created(f'inside {rank}') for rank in range(2)]

    assert alone(main, 2) == [(True, [True, False]), (True, [False, True])]
    assert [before, torch.rand(1).item()] == expected
    assert not dist.is_initialized() and current() is None
    assert not MessageHub.check_instance_created('inside 0')


LATE = """
import torch.distributed as dist, sys
from mmrepro import determinism, on_virtual_ranks
found = []

def main():
    determinism.enable(True)
    dist.barrier()
    if dist.get_rank() == 0:
        import torch._dynamo
    dist.barrier()
    found.append(determinism.drifted())

assert 'torch._dynamo' not in sys.modules
on_virtual_ranks(2, main)
print(found)
"""


def test_flags_of_a_module_that_one_rank_imports_are_those_of_all():
    """torch keeps them for each thread."""
    assert python('-c', LATE) == '[(), ()]\n'


def test_standard_output_is_that_of_rank_0(capsys):
    alone(lambda: print('rank', dist.get_rank()), 3)
    assert capsys.readouterr().out == 'rank 0\n'


def test_a_deadlock_says_who_waits_where():
    def main():
        if dist.get_rank() == 1:
            return
        dist.all_reduce(torch.zeros(2, 3))

    with pytest.raises(Deadlock) as caught:
        on_virtual_ranks(3, main)
    lines = str(caught.value).splitlines()[1:]
    assert 'rank 0 waits in all_reduce SUM((2, 3) torch.float32)' in lines[0]
    assert lines[1] == '  virtual rank 1 has ended' and 'rank 2 waits in' in lines[2]


def test_different_operations_are_named():
    def main():
        if dist.get_rank():
            dist.barrier()
        else:
            dist.all_reduce(torch.zeros(1))

    with pytest.raises(CollectiveMismatch, match='rank 1 has come to barrier .*virtual rank 0 '
                       'waits in all_reduce'):
        on_virtual_ranks(2, main)


@pytest.mark.parametrize('call, error, text', [
    (lambda: torch.compile(nn.Linear(1, 1)), RuntimeError, 'torch.compile cannot'),
    (lambda: torch.cuda.graph(None), RuntimeError, 'torch.cuda.graph cannot'),
    (lambda: torch.cuda.make_graphed_callables(nn.Linear(1, 1), (torch.ones(1), )), RuntimeError,
     'torch.cuda.make_graphed_callables cannot'),
    (lambda: dist.send(torch.zeros(1), 1 - dist.get_rank()), NotImplementedError, 'send')])
def test_calls_that_virtual_ranks_do_not_support_are_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        on_virtual_ranks(2, call)


def test_more_processes_than_ranks_are_refused(pool):
    for fine, result in pool.outcomes(results_of, 3, steps, 2):
        assert not fine and isinstance(result[0], RandomnessError)
        assert 'virtual_ranks=2, and the launcher has started 3 processes' in str(result[0])


@pytest.mark.parametrize('variables, launcher, text', [
    (dict(WORLD_SIZE='2', RANK='0'), 'none', 'WORLD_SIZE=2.* 4 ranks .*--launcher pytorch'),
    (dict(SLURM_PROCID='0', SLURM_NTASKS='8', SLURM_STEP_ID='0'), 'none', 'SLURM_NTASKS=8'),
    (dict(SLURM_PROCID='0', SLURM_NTASKS='8'), 'slurm', 'SLURM_STEP_ID, which srun sets, is not'),
    ({}, 'pytorch', "launcher='pytorch', .* RANK is not set")])
def test_processes_and_a_launcher_that_do_not_fit_are_refused(variables, launcher, text,
                                                              monkeypatch):
    for name in ('WORLD_SIZE', 'RANK'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RandomnessError, match=text):
        on_virtual_ranks(4, steps, launcher)


@pytest.mark.parametrize('step', [None, str(0xfffffffa)], ids=['batch script', 'shell of salloc'])
def test_one_process_in_a_job_of_slurm_trains(step, monkeypatch):
    monkeypatch.setenv('SLURM_PROCID', '0')
    monkeypatch.setenv('SLURM_NTASKS', '8')
    if step is not None:
        monkeypatch.setenv('SLURM_STEP_ID', step)
    assert on_virtual_ranks(4, dist.get_world_size) == 4


@pytest.mark.parametrize('error, expected, text', [
    (RuntimeError("can't start new thread"), VirtualRanksError, 'rank 2 is a thread.*ulimit'),
    (KeyboardInterrupt('pressed'), KeyboardInterrupt, 'pressed')])
def test_a_thread_that_cannot_start_ends_all_ranks(error, expected, text, monkeypatch):
    start, before = threading.Thread.start, threading.active_count()

    def limited(self):
        if self.name == 'virtual rank 2':
            raise error
        start(self)

    monkeypatch.setattr(threading.Thread, 'start', limited)
    with pytest.raises(expected, match=text):
        on_virtual_ranks(4, dist.barrier)
    assert threading.active_count() == before and current() is None


def test_cuda_is_not_started_before_the_runner_has_set_its_variables(monkeypatch):
    def start():
        raise AssertionError('CUDA was started')

    monkeypatch.setattr(heap, 'has_accelerator', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'current_device', start)
    assert alone(dist.get_rank, 2) == [0, 1]


def test_a_process_group_finds_the_variable_of_cublas(monkeypatch):
    seen = []
    monkeypatch.setenv('CUBLAS_WORKSPACE_CONFIG', '')  # put back at the end, whatever it was
    monkeypatch.delenv('CUBLAS_WORKSPACE_CONFIG')
    monkeypatch.setattr(entry, 'ensure_process_group', lambda *args, **kwargs: seen.append(
        os.environ['CUBLAS_WORKSPACE_CONFIG']) or True)
    entry._ensure_group('pytorch', {})
    assert seen == [':4096:8']


def test_without_virtual_ranks_main_is_called_as_it_is():
    assert on_virtual_ranks(None, dist.is_initialized) is False
    with pytest.raises(RandomnessError, match='virtual_ranks=0 is out of range'):
        on_virtual_ranks(0, steps)


RANKS = 4


class Drawing(nn.Module):
    """Ranks meet in its forward pass; afterwards it draws numbers and uses its weight again."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.weight = nn.Parameter(torch.eye(32))

    @torch.autocast('cpu', torch.bfloat16)
    def forward(self, x):
        hidden = self.norm(x) @ self.weight
        dist.all_reduce(torch.ones(1))
        hidden = hidden * (1 + random.random() + np.random.rand() + torch.rand(1))
        return (hidden @ self.weight).float().square().mean()


def drawn_steps():
    rank = dist.get_rank()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    model = VirtualDataParallel(Drawing(), broadcast_buffers=False)
    losses = losses_of(model, lambda: torch.randn(8, 32), lr=0.01)
    return {name: state_digest(value) for name, value in dict(
        losses=losses, weights=dict(model.named_parameters()),
        buffers=dict(model.named_buffers())).items()}


def part(rank, world, fault):
    with FAULTS[fault]() if fault else nullcontext():
        return results_of(rank, world, drawn_steps, RANKS)


def differing(fault):
    one, two = ({rank: digests for results in shared_pool().run(part, processes, fault)
                 for rank, digests in results.items()} for processes in (1, 2))
    return {name for rank in range(RANKS) for name in one[rank]
            if one[rank][name] != two[rank][name]}


@pytest.mark.parametrize('fault', [None, *FAULTS])
def test_a_fault_is_seen_and_without_one_nothing_differs(fault):
    found = differing(fault)
    expected = 'buffers' if fault == 'shared buffers' else 'weights'
    assert expected in found if fault else found == set()
