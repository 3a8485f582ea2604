"""A resumed run is the uninterrupted one: batches, losses, weights, optimizer, EMA, as bytes."""
import copy

import pytest
from demo_runs import log_lines, narrow, small
from harness import Child, run_all, train
from mmengine.runner import Runner
from small_runs import Points, continued, finish, small_run

from mmrepro.errors import RandomnessError


def test_a_resumed_detector_gives_the_uninterrupted_run(data_root, tmp_path):
    """More detectors, resumed at every iteration: tests/dev/test_matrices.py."""
    import mmdet.models  # noqa: F401
    cfg = small('yolox_s', data_root)
    narrow(cfg)
    cfg.default_hooks.checkpoint = dict(
        type='CheckpointHook', interval=1, by_epoch=False, max_keep_ckpts=-1)
    base = tmp_path / 'base'
    expected = run_all({'base': (train, (cfg, str(base)), {})})['base']
    jobs = {}
    for point, workers in {1: 2, 3: 4}.items():
        resumed = copy.deepcopy(cfg)
        resumed.resume, resumed.load_from = True, str(base / f'iter_{point}.pth')
        resumed.default_hooks.checkpoint.interval = 100
        resumed.train_dataloader.merge(dict(num_workers=workers, persistent_workers=workers > 2))
        jobs[point] = (train, (resumed, str(tmp_path / str(point))), {})
    for point, found in run_all(jobs).items():
        assert found['step'] == list(range(point, 6))
        for key in ('data', 'loss'):
            assert found[key] == expected[key][point:], f'resumed at {point}: {key}'
        for key in ('weights', 'optimizer'):
            assert found[key] == expected[key], f'resumed at {point}: {key}'
        logged, before = log_lines(tmp_path / str(point)), log_lines(base)
        assert logged and all(before[step] == values for step, values in logged.items())


LOOPS = {
    'epochs': {'train_cfg': dict(by_epoch=True, max_epochs=3)},
    'iterations, endless sampler': {
        'train_cfg': dict(by_epoch=False, max_iters=12, val_interval=100),
        'train_dataloader.sampler.type': 'InfiniteSampler'},
    'iterations, epochs of data': {
        'train_cfg': dict(by_epoch=False, max_iters=12, val_interval=100)},
}


@pytest.mark.parametrize('loop', LOOPS)
@pytest.mark.parametrize('workers', [0, 2])
def test_every_iteration_of_every_loop(loop, workers, tmp_path):
    changes = {**LOOPS[loop], 'train_dataloader.num_workers': workers}

    def run(cfg):
        # workers of endless loaders end with the process that started them
        return Child(finish, cfg).result() if workers else finish(cfg)

    expected = run(small_run(tmp_path, **changes))
    for point in range(1, 12) if workers == 0 else (1, 4, 6, 11):
        assert run(continued(tmp_path, point, **changes)) == expected, point


@pytest.mark.parametrize('loop', LOOPS)
def test_no_sample_is_loaded_twice(loop, tmp_path, monkeypatch):
    finish(small_run(tmp_path, **LOOPS[loop]))
    loads = []
    stock = Points.__getitem__
    monkeypatch.setattr(Points, '__getitem__', lambda self, i: (loads.append(i), stock(self, i))[1])
    finish(continued(tmp_path, 9, **LOOPS[loop]))
    assert len(loads) == 3 * 2


def test_a_drawn_seed_comes_back_before_anything_is_built(tmp_path):
    unseeded = dict(randomness=dict(seed=None))
    assert finish(small_run(tmp_path, **unseeded)) == finish(continued(tmp_path, 5, **unseeded))


def test_another_seed_is_refused(tmp_path):
    finish(small_run(tmp_path))
    with pytest.raises(RandomnessError, match='randomness.seed=4, but .* a run with seed 3'):
        Runner.from_cfg(small_run(tmp_path, randomness=dict(seed=4), resume=True))
