"""tools/test.py: the metric of a checkpoint does not depend on the number of ranks or processes."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import ROOT, environment
from preempted_runs import settings
from ranks import free_port

# ranks of the training, which have BatchNorm statistics of their own: processes, and what to add
TRAININGS = {'two processes': (2, ()), 'two virtual ranks': (1, ('--virtual-ranks', '2'))}
TESTS = {'one process': (1, ()), 'two processes': (2, ()),
         'virtual ranks, one process': (1, ('--virtual-ranks', '2')),
         'virtual ranks, two processes': (2, ('--virtual-ranks', '2')),
         'three virtual ranks, two processes': (2, ('--virtual-ranks', '3'))}


def tool(name, processes, *arguments):
    start = [sys.executable]
    if processes > 1:
        start += ['-m', 'torch.distributed.run', f'--nproc_per_node={processes}',
                  f'--master_port={free_port()}']
        arguments += ('--launcher', 'pytorch')
    env = environment()
    env['PYTHONPATH'] = os.pathsep.join([str(ROOT / 'tests' / 'support'), env['PYTHONPATH']])
    done = subprocess.run([*start, str(ROOT / 'tools' / name), *map(str, arguments)], env=env,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def metric_of(folder):
    lines = [json.loads(line) for path in folder.glob('*/vis_data/scalars.json')
             for line in path.read_text().splitlines()]
    lines += [json.loads(path.read_text()) for path in folder.glob('*/*.json')]
    return [float(line['total']).hex() for line in lines if 'total' in line][-1]


@pytest.mark.nightly
@pytest.mark.parametrize('training', TRAININGS)
def test_the_metric_of_a_checkpoint(training, tmp_path):
    cfg = settings(tmp_path, **{
        'train_cfg.max_epochs': 2, 'train_cfg.val_interval': 2, 'randomness.deterministic': True,
        'val_dataloader.batch_size': 1, 'val_dataloader.dataset.size': 13,
        'val_dataloader.dataset.noise': 0., 'custom_hooks': [],
        'default_hooks.checkpoint': dict(type='CheckpointHook', interval=2)})
    cfg.test_dataloader, cfg.test_cfg, cfg.test_evaluator = (
        cfg.val_dataloader, dict(), cfg.val_evaluator)
    cfg.custom_imports = dict(imports=['mmrepro', 'preempted_runs'], allow_failed_imports=False)
    cfg.dump(tmp_path / 'config.py')
    processes, more = TRAININGS[training]
    tool('train.py', processes, tmp_path / 'config.py', '--work-dir', tmp_path / 'train', *more)
    path = tmp_path / 'train' / 'epoch_2.pth'
    own = torch.load(path, weights_only=False)['mmrepro']['ranks']
    statistics = [own[rank]['buffers']['model.layers.1.running_mean'] for rank in (0, 1)]
    assert not torch.equal(*statistics), 'the ranks share their statistics'
    found = {}
    for name, (processes, more) in TESTS.items():
        folder = tmp_path / name.replace(' ', '_')
        tool('test.py', processes, tmp_path / 'config.py', path, '--work-dir', folder, *more)
        found[name] = metric_of(folder)
    assert set(found.values()) == {metric_of(tmp_path / 'train')}, found
