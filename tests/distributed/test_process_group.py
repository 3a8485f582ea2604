"""Distributed runs without an accelerator, by each of MMEngine's launchers and as forked ranks."""
import json
import os
import sys
import time
import types
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from demo_runs import changed, workers
from faults import tiny as tiny_run
from harness import python
from mmengine.runner import Runner
from ranks import free_port, on_ranks
from small_runs import trained_runner
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmrepro.distributed import lost_ranks, process_group
from mmrepro.distributed.agreement import agree
from mmrepro.distributed.process_group import ensure_process_group, launch_variables, wrap_model
from mmrepro.errors import ConfigError
from mmrepro.objects.digests import state_digest
from mmrepro.virtual.exchange import Transport

# what each launcher puts into the environment of one rank
LAUNCHED = {
    'pytorch': lambda rank, world, port: {
        'RANK': rank, 'WORLD_SIZE': world, 'LOCAL_RANK': rank, 'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': port},
    'slurm': lambda rank, world, port: {
        'SLURM_PROCID': rank, 'SLURM_NTASKS': world, 'SLURM_LOCALID': rank, 'SLURM_NNODES': 1,
        'SLURM_NODELIST': 'node7', 'MASTER_PORT': port},
    'mpi': lambda rank, world, port: {
        'OMPI_COMM_WORLD_RANK': rank, 'OMPI_COMM_WORLD_SIZE': world,
        'OMPI_COMM_WORLD_LOCAL_RANK': rank, 'OMPI_COMM_WORLD_LOCAL_SIZE': world,
        'MASTER_PORT': port},
}


def launched(launcher, rank, world, port):
    return {name: str(value) for name, value in LAUNCHED[launcher](rank, world, port).items()}


def start(rank, world, launcher, port):
    env = launched(launcher, rank, world, port)
    if launcher == 'slurm':  # the port of the config counts
        env['MASTER_PORT'] = 'none'
    with mock.patch.dict(os.environ, env):
        made = ensure_process_group(launcher, dict(cudnn_benchmark=False, dist_cfg=dict(
            backend='nccl', timeout=25, port=port, init_backend='torch')))
        again = ensure_process_group(launcher)
        total = torch.tensor(float(rank + 1))
        dist.all_reduce(total)
        group = dist.distributed_c10d._get_default_group()
        limit = group._get_backend(torch.device('cpu')).options._timeout
        return (made, again, dist.get_backend(), dist.get_rank(), dist.get_world_size(),
                total.item(), os.environ['LOCAL_RANK'], limit)


def train(work_dir):
    cfg = tiny_run.validating_and_saving(work_dir)
    cfg.train_dataloader.dataset.size = 7
    cfg.launcher, cfg.env_cfg = 'pytorch', dict(dist_cfg=dict(backend='nccl', timeout=25))
    runner = trained_runner(cfg)
    model = runner.model
    return dict(
        wrapper=type(model).__name__, unused=model.find_unused_parameters,
        buffers=model.broadcast_buffers, world=runner.world_size,
        metric=float(runner.message_hub.get_scalar('val/largest').current()).hex(),
        weights=state_digest(dict(model.module.named_parameters())))


def wrapped_by_mmengine(model, config=None, cfg=None, **options):
    runner = types.SimpleNamespace(cfg=cfg or {}, distributed=True)
    return wrap_model(lambda config, model: Runner.wrap_model(runner, config, model),
                      config, model, **options)


def wrap(rank, world, wrapper, expected):
    config = dict(wrapper) if wrapper is not None else None
    with mock.patch.dict(os.environ, {'LOCAL_RANK': str(rank)}):
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        wrapped = wrapped_by_mmengine(model, config, ordered=True)
        assert type(wrapped).__name__ == expected, wrapped
        assert config == wrapper  # the config's dict is not changed
        assert wrapped_by_mmengine(wrapped) is wrapped
        wrapped(torch.ones(1, 3)) if expected != 'MMSeparateDistributedDataParallel' else None
    return [type(m).__name__ for m in wrapped.modules()
            if isinstance(m, DistributedDataParallel) and getattr(m, '_comm_hooks', None)]


def wrap_sync_batch_norm(rank, world, layer, cfg):
    torch.manual_seed(1)
    with mock.patch.dict(os.environ, {'LOCAL_RANK': str(rank)}):
        wrapped = wrapped_by_mmengine(nn.Sequential(nn.Linear(3, 2), layer(2)), cfg=cfg)
    linear, norm = wrapped.module
    out = wrapped(torch.arange(3.) * (rank + 1) + torch.eye(3))
    out.pow(3).sum().backward()
    return norm.running_mean, norm.running_var, linear.weight.grad, out.mean(0).detach()


def threads():
    return len(os.listdir('/proc/self/task'))


def leave(rank, world, port):
    """Return how many threads the process has at each point, and whether it is in a group."""
    counts = [threads()]
    with mock.patch.dict(os.environ, launched('pytorch', rank, world, port)), \
            mock.patch.object(lost_ranks.atexit, 'register') as registered:
        ensure_process_group('pytorch')
        model = wrapped_by_mmengine(nn.Linear(3, 2), ordered=True)
        model(torch.ones(1, 3)).sum().backward()
        agree('a topic', rank, max)
        transport = Transport(dist.group.WORLD)  # of virtual ranks
    counts.append(threads())
    for error, failed in ((RuntimeError(), False), (None, True), (None, False)):
        # as the interpreter sets it behind an error
        with mock.patch.object(sys, 'last_value', error, create=True), \
                mock.patch.object(lost_ranks._Block, 'failed', failed):
            for call in reversed(registered.call_args_list):
                call.args[0](*call.args[1:])
                counts.append(threads())
    return [*counts, dist.is_initialized(), (type(model).__name__, type(transport))]


def under_torchrun(*args):
    python('-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', __file__, *args,
           GLOO_SOCKET_IFNAME='lo')


class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1)


def end_while_gloo_waits_for_the_interpreter():
    """Hold the interpreter's lock from the last operation until the interpreter ends."""
    ensure_process_group('pytorch')
    tensors = [torch.ones(1 << 20) for _ in range(4)]
    model = wrapped_by_mmengine(nn.Linear(3, 2))
    sys.setswitchinterval(1000)
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    for _ in range(10**7):  # all operations end meanwhile, and none lets go of its tensor
        pass
    return model, tensors, Slow()  # which lets threads of gloo run while the interpreter ends


@pytest.mark.nightly
def test_no_process_aborts_behind_its_last_line():
    under_torchrun()  # checks the exit code


def test_threads_of_gloo_end_at_the_end_but_not_behind_an_error(pool):
    """Whoever still refers to the model: a thread that outlives the interpreter aborts it."""
    for before, run, *behind_errors, control, after, stays, kept in pool.run(
            leave, 3, free_port(), group=False):
        # before, ranks of the pool may have threads of errors that other tests have raised
        assert behind_errors == [run] * 4 and run > control > after and after <= before
        assert (stays, kept) == (
            False, ('MMDistributedDataParallel', Transport))


@pytest.mark.parametrize('launcher', list(LAUNCHED))
def test_every_launcher_starts_over_gloo(pool, launcher):
    results = pool.run(start, 2, launcher, free_port(), group=False)
    assert results == [(True, False, 'gloo', rank, 2, 3.0, str(rank), timedelta(seconds=25))
                       for rank in range(2)]


def test_a_run_trains_and_validates_on_the_cpu_under_torchrun(tmp_path):
    under_torchrun(tmp_path)
    first, second = (json.loads((tmp_path / f'result{rank}').read_text()) for rank in range(2))
    assert first == second  # the weights, and the metric of the images of both ranks
    assert (first['wrapper'], first['world']) == ('MMDistributedDataParallel', 2)
    assert first['unused'] is False and first['buffers'] is False  # as MMEngine chooses


@pytest.mark.parametrize(('wrapper', 'expected', 'hooked'), [
    (None, 'MMDistributedDataParallel', ['MMDistributedDataParallel']),
    (dict(find_unused_parameters=True), 'MMDistributedDataParallel',
     ['MMDistributedDataParallel']),
    (dict(type='DistributedDataParallel'), 'DistributedDataParallel',
     ['DistributedDataParallel']),
    (dict(type='MMSeparateDistributedDataParallel'), 'MMSeparateDistributedDataParallel',
     ['MMDistributedDataParallel'] * 2),
])
def test_every_wrapper_of_mmengine_works_on_the_cpu(pool, wrapper, expected, hooked):
    assert pool.run(wrap, 3, wrapper, expected) == [hooked] * 3


@pytest.mark.parametrize('layer, cfg', [
    (nn.SyncBatchNorm, {}), (nn.BatchNorm1d, dict(sync_bn='torch'))])
def test_sync_batch_norm_trains_with_the_statistics_of_all_ranks(pool, layer, cfg):
    """DistributedDataParallel refuses it on the CPU."""
    first, second = pool.run(wrap_sync_batch_norm, 2, layer, cfg)
    for one, other in zip(first[:3], second[:3]):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert first[2].abs().min() > 0
    # each rank's own mean is not zero, that of both is
    assert first[3].abs().min() > 1e-3
    assert torch.allclose(first[3] + second[3], torch.zeros(2), atol=1e-6)


def test_with_an_accelerator_the_group_is_left_to_mmengine(monkeypatch):
    monkeypatch.setattr(process_group, 'has_accelerator', lambda: True)
    before = dict(os.environ)
    assert ensure_process_group('pytorch') is False
    assert dict(os.environ) == before and not dist.is_initialized()
    model, seen = nn.Linear(1, 1), []
    assert wrap_model(lambda *args: seen.append(args) or model, None, model) is model
    assert seen == [(None, model)]


def test_mpi_gets_the_local_rank_that_mmengine_leaves_out(monkeypatch):
    monkeypatch.setattr(process_group, 'has_accelerator', lambda: True)
    monkeypatch.setenv('OMPI_COMM_WORLD_LOCAL_RANK', '3')
    monkeypatch.setenv('LOCAL_RANK', 'x')
    monkeypatch.delenv('LOCAL_RANK')
    assert ensure_process_group('mpi') is False
    assert os.environ['LOCAL_RANK'] == '3'


@pytest.mark.parametrize(('launcher', 'changes', 'text'), [
    ('lsf', {}, "launcher='lsf': expected one of pytorch, slurm, mpi"),
    *((launcher, {name: None}, f'{name} is not set') for launcher, name in dict(
        pytorch='RANK', slurm='SLURM_PROCID', mpi='OMPI_COMM_WORLD_SIZE').items()),
    # ranks on several machines
    ('mpi', {'OMPI_COMM_WORLD_LOCAL_SIZE': '1'}, 'MASTER_ADDR is not set'),
    *(('pytorch', {'MASTER_PORT': port}, f'MASTER_PORT={port}: allowed are 0 to 65535')
      for port in ('http', '-1', '65536', ''))])
def test_what_is_wrong_with_a_launch_is_named(launcher, changes, text):
    env = {**(launched(launcher, 0, 2, 1) if launcher in LAUNCHED else {}), **changes}
    env = {name: value for name, value in env.items() if value is not None}
    with pytest.raises(ConfigError, match=text):
        launch_variables(launcher, env) if launcher in LAUNCHED else ensure_process_group(launcher)
    if 'MASTER_ADDR' in text:
        assert launch_variables('mpi', dict(env, MASTER_ADDR='n1'))['MASTER_ADDR'] == 'n1'


def test_slurm_tells_the_first_host(monkeypatch, tmp_path):
    env = launched('slurm', 5, 8, 1)
    env['SLURM_NNODES'] = '2'
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(ConfigError, match='scontrol show hostnames node7'):
        launch_variables('slurm', env)
    script = tmp_path / 'scontrol'
    script.write_text('#!/bin/sh\necho first-of-$3\necho second\n')
    script.chmod(0o755)
    env['SLURM_JOB_NODELIST'] = env.pop('SLURM_NODELIST')  # of newer versions, beside the other one
    assert launch_variables('slurm', env) == {
        'RANK': '5', 'WORLD_SIZE': '8', 'LOCAL_RANK': '5', 'MASTER_ADDR': 'first-of-node7',
        'MASTER_PORT': '1'}


def test_the_port_of_the_config_counts_with_slurm_only():
    assert launch_variables('slurm', launched('slurm', 0, 1, 1), 7)['MASTER_PORT'] == '7'
    assert launch_variables('pytorch', launched('pytorch', 0, 1, 1), 7)['MASTER_PORT'] == '1'


@pytest.mark.parametrize(('changes', 'named'), [
    ({}, True), ({'WORLD_SIZE': '1'}, False), ({'TORCHELASTIC_RESTART_COUNT': '0'}, False),
    ({'TORCHELASTIC_USE_AGENT_STORE': 'False'}, False)])
def test_a_restart_with_the_store_of_the_start_before_is_named(changes, named):
    env = {'WORLD_SIZE': '3', 'TORCHELASTIC_RESTART_COUNT': '1',
           'TORCHELASTIC_USE_AGENT_STORE': 'True', **changes}
    text = process_group.restart_problem(env) or ''
    assert ('TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1' in text) is named
    assert process_group.restart_problem({}) is None


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    cfg = tiny_run.tiny(tmp_path_factory.mktemp('tiny'))
    cfg.train_dataloader.batch_size = 1
    cfg.train_cfg.max_epochs = 1
    cfg.custom_hooks.append(dict(type='SyncBuffersHook'))  # statistics are those of all ranks
    cfg.env_cfg = dict()
    return cfg


@pytest.fixture(scope='module')
def two(cfg, tmp_path_factory):
    return on_ranks(2, cfg, tmp_path_factory.mktemp('two'))


def test_ranks_share_weights_and_see_different_data(two):
    first, second = two
    assert first['weights'] == second['weights']
    assert first['optimizer'] == second['optimizer']
    assert not set(first['data']) & set(second['data'])
    assert len(first['step']) == 4


def test_workers_and_a_second_start_change_nothing(cfg, two, tmp_path):
    again = on_ranks(2, changed(cfg, workers(2)), tmp_path)
    for before, after in zip(two, again):
        for key in ('data', 'loss', 'weights', 'optimizer', 'seed'):
            assert before[key] == after[key], key


def test_four_ranks_repeat(cfg, tmp_path):
    runs = [on_ranks(4, cfg, tmp_path / str(i)) for i in range(2)]
    assert len({result['weights'] for run in runs for result in run}) == 1
    assert [result['data'] for result in runs[0]] == [result['data'] for result in runs[1]]
    assert len({tuple(result['data']) for result in runs[0]}) == 4


def test_diff_rank_seed_changes_the_model_only(cfg, two, tmp_path):
    other = on_ranks(2, changed(cfg, lambda cfg: cfg.randomness.update(diff_rank_seed=True)),
                     tmp_path)
    assert [result['data'] for result in other] == [result['data'] for result in two]
    assert other[0]['weights'] == other[1]['weights'] != two[0]['weights']


def test_a_drawn_seed_is_the_same_on_all_ranks(cfg, tmp_path):
    unseeded = changed(cfg, lambda cfg: cfg.randomness.update(seed=None))
    first, second = on_ranks(2, unseeded, tmp_path)
    assert first['seed'] == second['seed']


@pytest.mark.parametrize('key, value, said', [
    ('optim_wrapper.optimizer.lr', 0.5, 'lr=0.5'),
    ('randomness.seed', 9, 'rank 1: seed: rank 0 has 3, rank 1 has 9')])
def test_ranks_that_differ_are_refused_by_name(key, value, said, cfg, tmp_path):
    def of_rank(rank, cfg):
        if rank == 1:
            cfg.merge_from_dict({key: value})

    errors = on_ranks(2, cfg, tmp_path, of_rank)
    for error in errors:
        assert isinstance(error, str) and 'AgreementError' in error
        assert 'rank 1' in error and said in error, error


if __name__ == '__main__' and not sys.argv[1:]:
    kept = end_while_gloo_waits_for_the_interpreter()
elif __name__ == '__main__':
    outcome = train(sys.argv[1])
    with open(os.path.join(sys.argv[1], f'result{dist.get_rank()}'), 'w') as file:
        json.dump(outcome, file)
