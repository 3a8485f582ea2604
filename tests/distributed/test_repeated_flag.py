"""Ranks tell each other of a signal in few iterations, and stop in the same one; a skipped step."""
import functools
import re
import socket
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import Child
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from preempted_runs import Signals, run, settings
from ranks import joined, on_ranks

from mmrepro import on_virtual_ranks
from mmrepro.checkpoint import rank_state
from mmrepro.distributed import agreement, control, skipped_steps
from mmrepro.distributed.agreement import RepeatedFlag, agree, gather_objects
from mmrepro.distributed.process_group import ensure_process_group
from mmrepro.errors import AgreementError, ConnectionFailed

pytestmark = pytest.mark.filterwarnings('ignore')


def over_the_store(store):
    if store:  # as with NCCL
        control._controls[dist.group.WORLD] = control.StoreControl(
            torch.distributed.distributed_c10d._get_default_store(), timedelta(seconds=60))


def asked(rank, world, interval, raised, seconds, store):
    """Return the iterations in which the flag was not up, and those in which ranks exchanged."""
    over_the_store(store)
    flag, began = RepeatedFlag(interval), []
    begin = flag._begin
    clock = iter(range(1000))

    def noted(mine):
        began.append(iteration)
        begin(mine)

    with mock.patch.object(agreement.time, 'monotonic', lambda: next(clock) * 0.1), \
            mock.patch.object(flag, '_begin', noted):
        for iteration in range(200):
            for _ in range(round(seconds[rank] / 0.1) - 1 if began else 0):
                next(clock)  # of the iterations between, about
            if flag.up(raised.get(rank, 1000) <= iteration):
                return iteration, began
    return None, began


@pytest.mark.parametrize('store', [False, True], ids=['gloo', 'store'])
@pytest.mark.parametrize('interval', [1, 3, None])
@pytest.mark.parametrize('raised', [{0: 17}, {1: 90, 2: 30}, {2: 0}, {}])
def test_all_ranks_see_a_flag_in_the_same_iteration(pool, interval, raised, store):
    seconds = [0.1, 0.1, 0.4]  # a rank is slower than the others
    first, *others = pool.run(asked, 3, interval, raised, seconds, store)
    assert others == [first] * 2
    iteration, began = first
    longest = interval or 1 << agreement.LONGEST
    if raised:
        assert min(raised.values()) < iteration <= min(raised.values()) + longest + 1
    else:
        assert iteration is None
        steps = {later - earlier for earlier, later in zip(began, began[1:])}
        assert steps == {interval} if interval else max(steps) > 1


def few(rank, world):
    """Return how many exchanges 512 iterations of 0.1 ms have."""
    flag, begun = RepeatedFlag(), []
    begin = flag._begin
    with mock.patch.object(flag, '_begin', lambda mine: (begun.append(1), begin(mine))), \
            mock.patch.object(dist, 'all_gather_object', side_effect=AssertionError('pickles')):
        for _ in range(512):
            time.sleep(0.0001)
            assert not flag.up(False)
    return len(begun)


def test_few_iterations_exchange_and_none_pickles(pool):
    assert pool.run(few, 3) == [6 + 1 + (512 - 64) // 64] * 3


def between(rank, world):
    """Ask in the iterations between two exchanges, where nothing asks torch or the clock."""
    flag, nothing = RepeatedFlag(8), mock.Mock(side_effect=AssertionError('costs time'))
    for _ in range(3):
        assert not flag.up(False) and not flag.up(False)  # an exchange begins, and ends
        with mock.patch.object(agreement, 'get_world_size', nothing), \
                mock.patch.object(agreement, 'control', nothing), \
                mock.patch.object(agreement.time, 'monotonic', nothing), \
                mock.patch.object(dist, 'all_reduce', nothing):
            assert not any(flag.up(False) for _ in range(6))
    assert not nothing.called


def test_iterations_without_an_exchange_ask_nobody(pool):
    assert pool.run(between, 3) == [None] * 3


def large(rank, world, to_all):
    over_the_store(True)
    with mock.patch.object(control, 'CHUNK', 1000):
        found = [gather_objects(dict(rank=rank, value=torch.full((999 * rank, ), rank)), to_all)
                 for _ in range(2)]
    agree('behind', None, len)
    return [values and [(value['rank'], value['value'].sum().item()) for value in values]
            for values in found]


@pytest.mark.parametrize('to_all', [False, True])
def test_large_values_travel_over_the_store(pool, to_all):
    everything = [[(rank, 999 * rank * rank) for rank in range(3)]] * 2
    nothing = everything if to_all else [None, None]
    assert pool.run(large, 3, to_all) == [everything, nothing, nothing]


def trained(rank, world, port, cfg, work_dir, at, store):
    with joined(rank, world, port, cfg):
        control._has_gloo = lambda group: not store  # of this child
        cfg.custom_hooks.append(dict(type='PreemptHook', interval=2))
        hook, preempted = run(cfg, hook=Signals(at if rank == 1 else None))
        return hook.events, preempted and preempted.iteration


@pytest.mark.parametrize('store', [False, True], ids=['gloo', 'store'])
def test_a_signal_to_one_rank_ends_all_ranks_of_a_training(store, tmp_path):
    (events, iteration), *others = on_ranks(
        2, settings(tmp_path, **{'train_cfg.max_epochs': 9}), tmp_path,
        function=lambda *args: trained(*args, 5, store))
    assert others == [(events, iteration)] and 3 <= iteration <= 8


# ------------------------------------------------------------------------------ a skipped step


@MODELS.register_module(force=True)
class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(2, 1)

    def forward(self, x, mode='tensor'):
        loss = self.line(torch.stack(x).float()).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


class SkipHook(Hook):
    """Lets some ranks leave out the second step, as users do where a loss is not finite.

    If ``first``, all ranks leave out the first one.
    """

    def __init__(self, ranks, first):
        self.ranks, self.first = ranks, first

    def before_train(self, runner):
        update = runner.optim_wrapper.update_params

        def update_params(loss):
            if runner.iter == 0 and self.first or (
                    runner.iter == 1 and dist.get_rank() in self.ranks):
                return None
            return update(loss)

        runner.optim_wrapper.update_params = update_params


def skipping(cfg, ranks, first=False):
    cfg.merge_from_dict(dict(randomness=dict(seed=5, deterministic=False)))
    cfg.model = dict(type='Line')
    cfg.custom_hooks = []
    runner = Runner.from_cfg(cfg)
    runner.register_hook(SkipHook(ranks, first))
    runner.train()
    return 'trained'


def skipping_rank(rank, world, port, cfg, work_dir, ranks, first=False):
    with joined(rank, world, port, cfg):
        return skipping(cfg, ranks, first)


# the same words on one process and on two, and only from a rank that has been asked: at once
WITHOUT = ('rank 1 takes no step of the optimizer in iteration 1 (counted from 0; is its loss not '
           'finite?), and rank 0 takes one. A step is taken or left out on all ranks')


def virtual_ranks(number, rank, world, port, cfg, work_dir, ranks, first=False):
    with joined(rank, world, port, cfg):
        return on_virtual_ranks(number, lambda: skipping(cfg.copy(), ranks, first), 'pytorch')


PROCESSES = {'a rank each': skipping_rank,
             'a virtual rank each': functools.partial(virtual_ranks, 2)}


@pytest.mark.parametrize('first', [False, True], ids=['', 'behind one that all skip'])
@pytest.mark.parametrize('function', PROCESSES)
def test_a_rank_that_skips_its_step_alone_ends_the_run(function, first, tmp_path):
    said = on_ranks(2, settings(tmp_path), tmp_path,
                    function=lambda *args: PROCESSES[function](*args, [1], first))
    assert f'AgreementError: {WITHOUT}' in said[1], said
    assert re.search(f'RankEnded: .*rank 1.* has ended with AgreementError: {re.escape(WITHOUT)}',
                     said[0]), said


@pytest.mark.parametrize('first', [False, True])
@pytest.mark.parametrize('skipping_ranks', [[0], [1]])
@pytest.mark.parametrize('counts', [1, 3])
def test_so_does_a_virtual_rank_of_one_process(skipping_ranks, counts, first, tmp_path):
    cfg = settings(tmp_path, **{'optim_wrapper.accumulative_counts': counts})
    rank, = skipping_ranks
    words = WITHOUT.replace('rank 1', f'rank {rank}').replace('and rank 0', f'and rank {1 - rank}')
    with pytest.raises(AgreementError, match=re.escape(words)):
        on_virtual_ranks(2, lambda: skipping(cfg.copy(), skipping_ranks, first))


def test_a_rank_that_gives_no_sign_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(skipped_steps, 'ALONE', 0.2)
    monkeypatch.setattr(skipped_steps, 'get_world_size', lambda: 3)
    process = skipped_steps._Process(set(), dist.HashStore())
    process.close()
    process.without[7] = {0}
    process.store.set('7/without1', '')
    with pytest.raises(AgreementError, match='rank 0 takes no step .* iteration 7 .* For 0.2 s '
                                             'there is no sign of rank 2'):
        process.ask(0, 7)


@pytest.mark.parametrize('function', [*PROCESSES.values(), functools.partial(virtual_ranks, 3)],
                         ids=[*PROCESSES, 'three virtual ranks'])
def test_a_step_that_all_ranks_skip_is_none_of_ours(function, tmp_path):
    assert on_ranks(2, settings(tmp_path), tmp_path, function=lambda *args: function(
        *args, [0, 1, 2])) == ['trained'] * 2


class Counts:
    _inner_count = 6

    def backward(self):
        self._inner_count += 1


def resumed(rank, world):
    wrapper = Counts()
    steps = skipped_steps.StepsTaken([wrapper], 6)
    wrapper._inner_count = 5  # of the checkpoint: all ranks have left out a step
    steps.begin_epoch()
    for iteration in (6, 7):
        wrapper.backward()
        with mock.patch.object(steps, '_ask', side_effect=AssertionError('it took a step')):
            steps.end(iteration)
    steps.close()


def test_counts_of_a_checkpoint_are_no_skipped_step(pool):
    assert pool.run(resumed, 2) == [None] * 2


def test_nor_one_that_all_virtual_ranks_skip(tmp_path):
    assert on_virtual_ranks(2, lambda: skipping(settings(tmp_path), [0, 1])) == 'trained'


# --------------------------------------------------------------------------------- the network


def starting():
    env = dict(RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0',
               GLOO_SOCKET_IFNAME='nothing0')
    with mock.patch.dict('os.environ', env):
        try:
            ensure_process_group('pytorch')
        except ConnectionFailed as error:
            return str(error)


def connecting(rank, world, interface):
    with mock.patch.dict('os.environ', GLOO_SOCKET_IFNAME=interface):
        try:
            agree('start', 0, max)
        except ConnectionFailed as error:
            return str(error)


def test_a_group_that_cannot_connect_names_host_address_and_variable(pool):
    for said in [*pool.run(connecting, 2, 'nothing0'), Child(starting).result()]:
        assert f'this is {socket.gethostname()}, whose address is' in said
        assert 'GLOO_SOCKET_IFNAME=nothing0' in said


def gathering(rank, world):
    """Gather gradients as a checkpoint does; return the groups over which objects travel."""
    groups = []

    def noted(operation):
        def call(*args, group=None, **options):
            groups.append(group)
            return operation(*args, group=group, **options)
        return call

    with mock.patch.object(dist, 'gather_object', noted(dist.gather_object)), \
            mock.patch.object(dist, 'all_gather_object', noted(dist.all_gather_object)):
        found = rank_state.gather(dict(gradients=dict(w=torch.full((3, ), rank)), buffers={}))
    assert (rank > 0) == (not found) and len(groups) == 2
    return [group is None or group is dist.group.WORLD for group in groups]


def test_states_of_ranks_do_not_travel_over_the_group_of_the_tensors(pool):
    """Over NCCL, torch would move them to the memory of the device."""
    assert pool.run(gathering, 2) == [[False, False]] * 2
