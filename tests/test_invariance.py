"""What must not change one bit of training.

Small real configs (dataset, augmentations, model, losses, optimizer, hooks, validation) are trained
for two epochs; batches, losses and weights are compared as bytes. Variants are combined for speed.
"""
import json
import os
import random

import numpy as np
import pytest
import torch
from demo_runs import MODELS, changed, narrow, small, workers
from harness import ROOT, environment, python, run_all, train
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


def no_validation(cfg):
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None


def other_logging(cfg):
    cfg.default_hooks.logger.interval = 7
    cfg.default_hooks.visualization = dict(type='DetVisualizationHook', draw=True, interval=1)
    cfg.log_processor = dict(type='LogProcessor', window_size=3, by_epoch=True)


def noisy_hooks(cfg):
    cfg.setdefault('custom_hooks', []).append(dict(type='NoisyHook'))


@HOOKS.register_module(force=True)
class NoisyHook(Hook):
    """Draws from every generator wherever it can, as careless visualisers do."""
    priority = 50

    def draw(self, *args, **kwargs):
        random.random(), np.random.rand(3), torch.rand(3)

    before_run = before_train = before_train_epoch = before_train_iter = draw
    after_train_iter = before_val_iter = after_val_epoch = after_train_epoch = draw


def together(*changes):
    def change(cfg):
        for one in changes:
            one(cfg)
    return change


ONE_WORKER = together(workers(1, prefetch=1), noisy_hooks, other_logging)
FOUR_WORKERS = together(workers(4, True), no_validation)
def another_seed_first(cfg, work_dir):
    """Train with seed 43, then with the config's, in the same process; returns both results."""
    def change(cfg):
        cfg.randomness.seed, cfg.train_cfg.max_epochs = 43, 1

    another = changed(cfg, change)
    return train(another, f'{work_dir}/first'), train(cfg, work_dir)


def assert_same_bits(found, expected, what):
    for key in ('data', 'loss', 'step', 'weights', 'optimizer'):
        if found[key] != expected[key]:
            first = next((i for i, (a, b) in enumerate(zip(found[key], expected[key])) if a != b),
                         'length') if isinstance(found[key], list) else 'end'
            raise AssertionError(f'{what}: {key} differs first at iteration {first}')


# RTMDet's cached mixing is compared for any number of workers in tests/data/test_fetch.py, workers
# and resumes of Faster R-CNN by the command of tests/demo/test_demo.py
@pytest.fixture(scope='module', params=[
    name if name == 'yolox_s' else pytest.param(name, marks=pytest.mark.nightly)
    for name in MODELS])
def runs(request, data_root, tmp_path_factory):
    """Baseline and variants of one model, two children at a time."""
    import mmdet.datasets  # noqa: F401  warm the parent
    import mmdet.models  # noqa: F401
    cfg = small(request.param, data_root)
    narrow(cfg)
    folder = tmp_path_factory.mktemp('runs')
    results = run_all({
        'baseline': (train, (cfg, str(folder / 'baseline')), {}),
        'one worker': (train, (changed(cfg, ONE_WORKER), str(folder / 'one')), {}),
        'second': (another_seed_first, (changed(cfg, FOUR_WORKERS), str(folder / 'second')), {})})
    results['seed 43'], results['four workers, in a second runner'] = results.pop('second')
    return request.param, cfg, results


def test_workers_hooks_validation_and_earlier_runs_do_not_change_bits(runs):
    model, _, results = runs
    expected = results['baseline']
    assert expected['step'] == list(range(6))
    for name in results.keys() - {'seed 43'}:
        assert_same_bits(results[name], expected, f'{model}, {name}')
    assert results['one worker']['metrics'] == expected['metrics']


def test_seeds_and_epochs_differ(runs):
    """Otherwise the test above could not fail."""
    _, _, results = runs
    baseline, another = results['baseline'], results['seed 43']
    assert len(set(baseline['data'])) == 6, 'an epoch repeats the draws of another'
    assert all(a != b for a, b in zip(baseline['data'], another['data']))
    assert baseline['weights'] != another['weights']
    assert baseline['seed'] == 42 and another['seed'] == 43


@pytest.mark.nightly
@pytest.mark.parametrize('runs', MODELS[1:3], indirect=True, scope='module')
def test_spawned_workers_and_hash_seeds_do_not_change_bits(runs, data_root, tmp_path):
    """In a fresh process, whose workers import everything again."""
    model, _, results = runs
    found = trained_in_a_fresh_process(model, data_root, 'spawn', tmp_path, PYTHONHASHSEED='7')
    assert_same_bits(found, results['baseline'], f'{model}, spawned')


def trained_in_a_fresh_process(model, data_root, start, folder, **variables):
    """Train a small demo config; ``start``: how its workers start."""
    said = python(ROOT / 'tests' / 'support' / 'train_fresh.py', model, data_root, start,
                  folder / start, **variables)
    return json.loads(said.splitlines()[-1])


def test_compiled_mmcv_or_not(data_root, tmp_path):
    """Compiled operators give way to ours under ``deterministic``: the same bits."""
    compiled = os.environ.get('MMREPRO_COMPILED_MMCV')
    if not compiled:
        pytest.skip('MMREPRO_COMPILED_MMCV does not name a folder with a compiled mmcv')
    import mmdet.models  # noqa: F401
    model = 'faster-rcnn_r50_fpn'
    cfg = small(model, data_root)
    narrow(cfg)
    lite = run_all({'lite': (train, (cfg, str(tmp_path / 'lite')), {})})['lite']
    path = os.pathsep.join([compiled, environment()['PYTHONPATH']])
    result = trained_in_a_fresh_process(model, data_root, 'fork', tmp_path, PYTHONPATH=path)
    assert result['mmcv_is_compiled']
    assert_same_bits(result, lite, 'compiled mmcv')
