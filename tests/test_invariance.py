"""What must not change one bit of training.

Small real configs (all of MMDetection's code path: dataset, augmentations, model, losses,
optimizer, hooks, validation) are trained for two epochs; batches, losses and weights are compared
as bytes. Variants are combined for speed; the nightly test runs each on its own as well.
"""
import copy
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from demo_runs import MODELS, changed, small, workers
from harness import ROOT, environment, run_all, train
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


def no_validation(cfg):
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None


def rare_validation(cfg):
    cfg.train_cfg.val_interval = 2


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


COMBINED = {
    'one worker, small prefetch, noisy hooks': together(workers(1, prefetch=1), noisy_hooks),
    'two persistent workers, no validation': together(workers(2, True), no_validation),
    'four workers, rare validation, other logging': together(
        workers(4), rare_validation, other_logging),
}
SINGLE = {
    'one worker': workers(1),
    'two workers': workers(2),
    'three workers': workers(3),
    'four workers': workers(4),
    'persistent workers': workers(2, True),
    'prefetch': workers(2, prefetch=5),
    'no validation': no_validation,
    'rare validation': rare_validation,
    'logging': other_logging,
    'noisy hooks': noisy_hooks,
}


def after_another_run(cfg, work_dir):
    """Train something else first, in the same process."""
    first = copy.deepcopy(cfg)
    first.randomness.seed = 1234
    first.train_cfg.max_epochs = 1
    train(first, f'{work_dir}/first')
    return train(cfg, work_dir)


def assert_same_bits(found, expected, what):
    for key in ('data', 'loss', 'step', 'weights', 'optimizer'):
        if found[key] != expected[key]:
            first = next((i for i, (a, b) in enumerate(zip(found[key], expected[key])) if a != b),
                         'length') if isinstance(found[key], list) else 'end'
            raise AssertionError(f'{what}: {key} differs first at iteration {first}')


def variants(cfg, folder, changes):
    return {name: (train, (changed(cfg, change), str(folder / str(i))), {})
            for i, (name, change) in enumerate(changes.items())}


@pytest.fixture(scope='module', params=MODELS)
def runs(request, data_root, tmp_path_factory):
    """Baseline and variants of one model, two children at a time."""
    import mmdet.datasets  # noqa: F401  warm the parent
    import mmdet.models  # noqa: F401
    cfg = small(request.param, data_root)
    folder = tmp_path_factory.mktemp('runs')
    jobs = variants(cfg, folder, COMBINED)
    jobs['baseline'] = (train, (cfg, str(folder / 'baseline')), {})
    jobs['a second runner in one process'] = (
        after_another_run, (cfg, str(folder / 'second')), {})
    other = changed(cfg, lambda cfg: cfg.randomness.update(seed=43))
    jobs['seed 43'] = (train, (other, str(folder / 'other')), {})
    return request.param, cfg, run_all(jobs)


def test_nothing_of_this_matters(runs):
    model, _, results = runs
    expected = results.pop('baseline')
    other = results.pop('seed 43')
    assert expected['step'] == list(range(6))
    for name, found in results.items():
        assert_same_bits(found, expected, f'{model}, {name}')
    results.update({'baseline': expected, 'seed 43': other})


def test_what_should_differ_differs(runs):
    """Otherwise the test above could not fail."""
    _, _, results = runs
    expected, other = results['baseline'], results['seed 43']
    assert len(set(expected['data'])) == 6, 'an epoch repeats the draws of another'
    assert all(a != b for a, b in zip(expected['data'], other['data']))
    assert expected['weights'] != other['weights']
    assert expected['seed'] == 42 and other['seed'] == 43


def test_validation_metrics_do_not_depend_on_workers(runs):
    _, _, results = runs
    expected = results['baseline']['metrics']
    assert results['one worker, small prefetch, noisy hooks']['metrics'] == expected


@pytest.mark.nightly
def test_each_on_its_own(runs, tmp_path):
    model, cfg, results = runs
    for name, found in run_all(variants(cfg, tmp_path, SINGLE)).items():
        assert_same_bits(found, results['baseline'], f'{model}, {name}')


@pytest.mark.parametrize('runs', [
    MODELS[1], pytest.param(MODELS[2], marks=pytest.mark.nightly)], indirect=True, scope='module')
def test_fresh_processes_spawned_workers_and_hash_seeds(runs, data_root, tmp_path):
    """Another process, another PYTHONHASHSEED, workers that import everything afresh."""
    model, _, results = runs
    script = ROOT / 'tests' / 'support' / 'train_fresh.py'
    processes = []
    for hash_seed, start in (('0', 'fork'), ('7', 'spawn')):
        out = tmp_path / f'{hash_seed}.json'
        process = subprocess.Popen(
            [sys.executable, str(script), model, data_root, start, str(tmp_path / start), str(out)],
            env={**environment(), 'PYTHONHASHSEED': hash_seed}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True)
        processes.append((process, start, out))
    for process, start, out in processes:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert_same_bits(json.loads(out.read_text()), results['baseline'], f'{model}, {start}')


def test_compiled_mmcv_or_not(data_root, tmp_path):
    """Compiled operators give way to ours under ``deterministic``: the same bits."""
    compiled = os.environ.get('MMREPRO_COMPILED_MMCV')
    if not compiled:
        pytest.skip('MMREPRO_COMPILED_MMCV does not name a folder with a compiled mmcv')
    import mmdet.models  # noqa: F401
    model = 'faster-rcnn_r50_fpn'
    results = run_all({'lite': (train, (small(model, data_root), str(tmp_path / 'lite')), {})})
    out = tmp_path / 'compiled.json'
    env = environment()
    env['PYTHONPATH'] = os.pathsep.join([compiled, env['PYTHONPATH']])
    done = subprocess.run(
        [sys.executable, str(ROOT / 'tests' / 'support' / 'train_fresh.py'), model,
         data_root, 'fork',
         str(tmp_path / 'compiled'), str(out)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found['mmcv_is_compiled']
    assert_same_bits(found, results['lite'], 'compiled mmcv')
