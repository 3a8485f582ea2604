"""Whole trainings on V virtual ranks: the same bits, and resumes, on any number of processes."""
import multiprocessing

import pytest
import schedules
from demo_runs import changed
from faults import tiny as tiny_run
from harness import digest
from virtual_runs import run

from mmrepro import RandomnessError


@pytest.fixture(scope='module')
def cfg(tmp_path_factory):
    """Eight images on three ranks, with statistics of batch norm that differ between ranks."""
    cfg = tiny_run.validating_and_saving(tmp_path_factory.mktemp('tiny'))
    cfg.custom_hooks.append(dict(type='SyncBuffersHook'))  # after every epoch
    return cfg


@pytest.fixture(scope='module')
def alone(cfg, tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('alone')
    return work_dir, run(cfg, 3, 1, work_dir)


def test_two_processes_give_the_bits_of_one(cfg, alone, tmp_path):
    _, expected = alone
    assert len({line['weights'] for lines in expected for line in lines[:1]}) == 1
    assert len({lines[0]['data'] for lines in expected}) == 3
    assert len({lines[0]['buffers'] for lines in expected}) == 3
    assert any('metrics' in line for line in expected[0])
    # of the images of all ranks
    assert len({lines[-1]['metrics'] for lines in expected}) == 1
    assert run(cfg, 3, 2, tmp_path) == expected


def test_a_run_resumes_on_another_number_of_processes(cfg, alone, tmp_path):
    work_dir, expected = alone
    found = run(cfg, 3, 2, tmp_path, resume=work_dir / 'iter_1.pth')
    assert found == [lines[1:] for lines in expected]


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
    from mmengine.runner import Runner
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
