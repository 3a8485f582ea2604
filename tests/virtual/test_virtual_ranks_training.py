"""Whole trainings on V virtual ranks: bits, resumes and errors, on any number of processes."""
import io
import logging
import multiprocessing

import pytest
import schedules
import torch
from children import join_ranks
from demo_runs import changed
from faults import tiny as tiny_run
from harness import Child, digest
from mmengine.hooks import CheckpointHook
from mmengine.runner import FlexibleRunner, Runner
from preempted_runs import Small, SumOfOutputs, settings
from ranks import free_port
from small_runs import Points
from virtual_runs import run

from mmrepro import on_virtual_ranks
from mmrepro.errors import RandomnessError


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    """Eight images on three ranks, with statistics of batch norm that differ between ranks."""
    cfg = tiny_run.validating_and_saving(tmp_path_factory.mktemp('tiny'))
    cfg.custom_hooks.append(dict(type='SyncBuffersHook'))  # after every epoch
    return cfg


def test_two_processes_give_the_bits_of_one(cfg, tmp_path):
    expected = run(cfg, 3, 1, tmp_path / '1')
    assert len({line['weights'] for lines in expected for line in lines[:1]}) == 1
    assert len({lines[0]['data'] for lines in expected}) == 3
    assert len({lines[0]['buffers'] for lines in expected}) == 3
    assert any('metrics' in line for line in expected[0])
    # of the images of all ranks
    assert len({lines[-1]['metrics'] for lines in expected}) == 1
    assert run(cfg, 3, 2, tmp_path / '2') == expected


def test_an_iteration_loop_resumes_within_an_accumulation_cycle(cfg, tmp_path):
    def change(cfg):
        cfg.train_cfg = dict(by_epoch=False, max_iters=3, val_interval=2)
        cfg.train_dataloader.sampler.type = 'InfiniteSampler'
        cfg.optim_wrapper.update(accumulative_counts=2, clip_grad=dict(max_norm=0.1))
        cfg.custom_hooks = [dict(type='EMAHook', momentum=0.1)]

    looped = changed(cfg, change)
    expected = run(looped, 3, 1, tmp_path / '1')
    gradients = [line['gradients'] for line in expected[0] if 'data' in line]
    assert len({lines[0]['gradients'] for lines in expected}) == 3  # not averaged yet
    assert len(gradients) == 3 and any('metrics' in line for line in expected[0])
    found = run(looped, 3, 2, tmp_path / '2', resume=tmp_path / '1' / 'iter_1.pth')
    assert found == [lines[1:] for lines in expected]


def test_a_runner_outside_of_virtual_ranks_is_refused(cfg):
    with pytest.raises(RandomnessError, match='virtual_ranks=4 needs a thread for each rank.*'
                       'mmrepro train.*on_virtual_ranks'):
        Runner.from_cfg(changed(cfg, lambda cfg: cfg.randomness.update(virtual_ranks=4)))


@pytest.mark.parametrize('change, text', [
    (lambda cfg: cfg.update(compile=True), 'compile=True'),
    (lambda cfg: cfg.randomness.update(worker_seed='mmengine'), 'worker_seed'),
    (lambda cfg: cfg.update(model_wrapper_cfg=dict(type='MMSeparateDistributedDataParallel')),
     'MMSeparateDistributedDataParallel .* allowed is MMDistributedDataParallel'),
])
def test_settings_that_virtual_ranks_do_not_allow(cfg, change, text, tmp_path):
    with pytest.raises(RuntimeError, match=f'RandomnessError.*{text}'):
        run(changed(cfg, change), 2, 1, tmp_path)


def spin(stop):
    while not stop.is_set():
        pass


@pytest.mark.nightly
def test_a_hundred_trainings_on_a_busy_machine_end_with_the_same_bits(tmp_path):
    context = multiprocessing.get_context('fork')
    stop = context.Event()
    spinning = [context.Process(target=spin, args=(stop, ), daemon=True) for _ in range(2)]
    for process in spinning:
        process.start()
    try:
        cfg = schedules.config(str(tmp_path))
        digests = {digest(run(cfg, schedules.RANKS, 2, tmp_path / str(number)))
                   for number in range(100)}
    finally:
        stop.set()
        for process in spinning:
            process.join()
    assert len(digests) == 1


def raising(owner, name, rank=2):
    """The method raises in one virtual rank, the second time there. 2: of the second process."""
    original, calls = getattr(owner, name), []

    def method(self, *args, **kwargs):
        if torch.distributed.get_rank() == rank:
            calls.append(1)
            if len(calls) == 2:
                raise schedules.Planted(name)
        return original(self, *args, **kwargs)

    setattr(owner, name, method)


# where the error is -> how to plant it, and changes of the config
PLACES = {
    'the forward pass': (lambda: raising(Small, 'forward'), {}),
    'a dataset': (lambda: raising(Points, '__getitem__'), {}),
    'a worker of a loader': (lambda: raising(Points, '__getitem__'),
                             {'train_dataloader.num_workers': 1}),
    'a hook': (lambda: raising(CheckpointHook, 'after_train_iter'), {}),
    'the writing of a checkpoint': (lambda: raising(Runner, 'save_checkpoint', rank=0), {
        'default_hooks.checkpoint': dict(type='CheckpointHook', by_epoch=False, interval=1)}),
    'a validation': (lambda: raising(SumOfOutputs, 'process'), {}),
}


def train(process, cfg, plant, port):
    join_ranks(process, 2, port)
    plant()
    cfg.launcher = 'pytorch'
    log = io.StringIO()
    logging.getLogger('mmrepro').addHandler(logging.StreamHandler(log))
    try:
        on_virtual_ranks(schedules.RANKS, lambda: Runner.from_cfg(cfg.copy()).train(), 'pytorch',
                         cfg.env_cfg)
    except Exception as error:
        return type(error).__name__, str(error), log.getvalue()


@pytest.mark.parametrize('place', PLACES)
def test_an_error_in_one_rank_ends_all_and_names_it(place, tmp_path):
    plant, changes = PLACES[place]
    cfg = settings(tmp_path, **{'train_dataloader.dataset.size': 64, 'randomness.virtual_ranks':
                                schedules.RANKS, 'val_dataloader.dataset.size': 16, **changes})
    port = free_port()
    children = [Child(train, process, cfg, plant, port) for process in range(2)]
    results = [child.result() for child in children]
    rank = 0 if place == 'the writing of a checkpoint' else 2
    raised = 'SampleError' if 'dataset' in place or 'loader' in place else 'Planted'
    kind, text, log = results.pop(rank // 2)
    assert kind == raised, text
    assert f'virtual rank {rank} of 4 has ended with {raised}' in log
    (kind, text, log), = results
    assert kind == 'RankEnded', text
    # rank 0 keeps the store here, and its reason goes with it
    assert f'virtual rank {rank} of 4 has ended with {raised}' in text if rank else (
        'rank 0 has ended, and with it the store' in text), text


def test_a_flexible_runner_is_refused(tmp_path):
    cfg = settings(tmp_path, **{'randomness.virtual_ranks': 2})
    arguments = {key: cfg[key] for key in ('model', 'work_dir', 'train_dataloader', 'train_cfg',
                                           'optim_wrapper', 'randomness')}
    with pytest.raises(RandomnessError, match='FlexibleRunner'):
        on_virtual_ranks(2, lambda: FlexibleRunner(**arguments))
