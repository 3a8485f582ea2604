"""FingerprintHook: what it writes; it survives kills and leaves no trace in the bits."""
import json
import os

import torch
from harness import Child
from mmengine.runner import Runner
from test_runner import NoisyLine, Points, config  # noqa: F401

HOOK = dict(type='FingerprintHook')


def lines(work_dir):
    with open(os.path.join(work_dir, 'mmrepro', 'fingerprints.rank0.jsonl')) as file:
        return [json.loads(line) for line in file]


def run(work_dir, **change):
    """Train the tiny model in a child; returns its weight and the states of the generators."""
    def job():
        cfg = config(work_dir, **change)
        runner = Runner.from_cfg(cfg)
        runner.train()
        return runner.model.line.weight.detach().numpy().tobytes(), torch.rand(4).tolist()

    return Child(job).result()


def test_one_line_an_iteration(tmp_path):
    run(tmp_path, custom_hooks=[HOOK])
    start, *steps, end = lines(tmp_path)
    assert {key: start[key] for key in ('kind', 'format', 'level', 'rank', 'world_size',
                                        'iteration', 'scheme', 'interval')} == dict(
        kind='start', format=1, level='step', rank=0, world_size=1, iteration=0, scheme=1,
        interval=1)
    assert end == dict(kind='end', iteration=8)
    assert [(s['iteration'], s['epoch']) for s in steps] == [(i, i // 4) for i in range(8)]
    for step in steps:
        assert float.fromhex(step['losses']['loss']) > 0
        assert step['lr'] == {'lr': [(0.1).hex()]}
        for key in ('gradients', 'parameters', 'buffers', 'optimizer'):
            assert len(step[key]) == 16
        assert len(step['batch']['data']) == 16
    positions = [place for step in steps[:4] for place in step['batch']['positions']]
    assert positions == list(range(8))
    assert sorted(i for step in steps[:4] for i in step['batch']['indices']) == list(range(8))
    assert len({step['parameters'] for step in steps}) == 8
