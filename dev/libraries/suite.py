"""The suite of a library: train a stock config, repeat it with workers, resume it, same bits.

Started by :mod:`dev.libraries.__main__` with the Python of the environment and the name of a row;
the last line printed is JSON.
"""
from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from typing import Any

from mmengine.config import Config

from ..matrix_suite import ITERATIONS, Failed, bits
from . import data
from .rows import ROWS, LibraryRow

CONFIG, AUDITED, UNPATCHED = 'config.py', 'audited.py', 'unpatched.py'
VERSIONS = ('torch', 'numpy', 'mmengine', 'mmcv', 'mmdet')
# a module for `custom_imports` that takes the rows of worker's caches out of the table
WITHOUT = '''from mmrepro import patches
patches.PATCHES = tuple(patch for patch in patches.PATCHES if patch.cause.id != 'B12')
'''


def smaller(value: Any, sizes: dict[int, int]) -> Any:
    """Return the same structure with other sizes of images."""
    if isinstance(value, dict):
        return {key: smaller(one, sizes) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(smaller(one, sizes) for one in value)
    return sizes.get(value, value) if type(value) is int else value


def without_weights(value: Any) -> Any:
    """Return the same structure without pretrained weights."""
    if isinstance(value, dict):
        return {key: None if key == 'pretrained' or key == 'init_cfg' and isinstance(
            one, dict) and one.get('type') == 'Pretrained' else without_weights(one)
            for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_weights, value))
    return value


def with_ends(schedules: Any, epochs: int | None) -> Any:
    """Return the schedules with the end that they have in the whole training."""
    if isinstance(schedules, (list, tuple)):
        return [with_ends(one, epochs) for one in schedules]
    if schedules and epochs and schedules.get('by_epoch', True):
        return {'end': epochs, **schedules}
    return schedules


def small_config(row: LibraryRow) -> Config:
    """Return the stock config on small data, for a few iterations, without validation."""
    package = importlib.import_module(row.module)
    stock = Config.fromfile(os.path.join(package.__path__[0], '.mim', 'configs', row.config))
    cfg = Config(without_weights(stock.to_dict()))
    loader = smaller(cfg.train_dataloader.to_dict(), row.sizes)
    loader['batch_size'] = row.batch
    loader['num_workers'], loader['persistent_workers'] = 0, False
    dataset = loader['dataset']
    dataset.update(data.write(row.data, os.path.abspath('data')), indices=ITERATIONS * row.batch)
    if dataset.get('split', '') is None:
        del dataset['split']
    if row.module == 'mmaction':
        del dataset['indices']  # its datasets take none
    cfg.train_dataloader = loader
    if cfg.get('custom_hooks'):
        cfg.custom_hooks = smaller([hook.to_dict() for hook in cfg.custom_hooks], row.sizes)
    for owner in (cfg, cfg.model):  # some pad every batch to a size
        if owner.get('data_preprocessor'):
            owner.data_preprocessor = smaller(owner.data_preprocessor.to_dict(), row.sizes)
    for part in ('val', 'test'):
        for key in ('dataloader', 'evaluator', 'cfg'):
            cfg[f'{part}_{key}'] = None
    by_epoch = cfg.train_cfg.get('type') != 'IterBasedTrainLoop'
    cfg.param_scheduler = with_ends(cfg.get('param_scheduler'), cfg.train_cfg.get('max_epochs'))
    cfg.train_cfg = (dict(by_epoch=True, max_epochs=1) if by_epoch else
                     dict(type='IterBasedTrainLoop', max_iters=ITERATIONS))
    hooks = cfg.get('default_hooks') or {}
    hooks['checkpoint'] = dict(type='CheckpointHook', by_epoch=False, interval=2,
                               max_keep_ckpts=-1)
    cfg.default_hooks = {name: hook for name, hook in hooks.items() if 'visual' not in name}
    cfg.load_from = cfg.resume = None
    cfg.merge_from_dict(row.options)
    return cfg


def mmrepro(*arguments: str, **env: str) -> str:
    """Run a command of mmrepro; return its output."""
    done = subprocess.run([sys.executable, '-m', 'mmrepro', *arguments], text=True,
                          env={**os.environ, **env}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    sys.stderr.write(done.stdout)
    if done.returncode:
        raise Failed(f'mmrepro {arguments[0]} ended with exit code {done.returncode}: '
                     + done.stdout[-3000:])
    return done.stdout


def train(folder: str, *arguments: str, config: str = CONFIG, workers: int = 0,
          **env: str) -> str:
    return mmrepro('train', config, '--work-dir', folder, *arguments, '--cfg-options',
                   f'train_dataloader.num_workers={workers}', **env)


def found_without_patch() -> bool:
    """Whether the check of samples stops a training in which the cache is stock's."""
    try:
        train('d', config=UNPATCHED, workers=2)
    except Failed as error:
        return 'SampleDiffersError' in str(error)
    return False


def audit_names_it() -> bool:
    """Whether audit of the stock config names the cache as a cause."""
    done = subprocess.run([sys.executable, '-m', 'mmrepro', 'audit', AUDITED], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    sys.stderr.write(done.stdout)
    return '(B12)' in done.stdout


def suite(row: LibraryRow) -> dict[str, str]:
    """Run all steps; return 'same bits', 'found' or the error for each."""
    steps: dict[str, str] = {}

    def step(name: str, good: str, bad: str, function: Any) -> None:
        try:
            steps[name] = good if function() else bad
        except (Failed, OSError) as error:
            steps[name] = str(error)

    def repeat() -> bool:
        train('b', workers=2, PYTHONHASHSEED='1')
        return bits('a') == bits('b')

    def resume() -> bool:
        train('c', '--resume', 'a/iter_2.pth', workers=2, PYTHONHASHSEED='2')
        return bits('a') == bits('c')

    same: list[str] = ['same bits', 'DIFFERENT']
    step('train', *same, lambda: train('a', PYTHONHASHSEED='0') is not None)
    step('repeat', *same, repeat)
    step('resume', *same, resume)
    if row.cached:
        step('without the patch', 'found', 'NOT FOUND', found_without_patch)
        step('audit', 'named', 'NOT NAMED', audit_names_it)
    return steps


def main(name: str, folder: str) -> int:
    row = ROWS[name]
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    cfg = small_config(row)
    cfg.dump(AUDITED)
    cfg.randomness = dict(seed=42, deterministic=True)
    cfg.dump(CONFIG)
    with open('without_caches.py', 'w', encoding='utf-8') as file:
        file.write(WITHOUT)
    cfg.custom_imports = dict(imports=['mmrepro', 'without_caches'], allow_failed_imports=False)
    cfg.dump(UNPATCHED)
    os.environ['PYTHONPATH'] += os.pathsep + os.getcwd()
    versions = {name: getattr(importlib.import_module(name), '__version__', '-')
                for name in (row.module, *VERSIONS)}
    print(json.dumps(dict(versions=versions, steps=suite(row))))
    return 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
