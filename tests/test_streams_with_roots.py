"""`randomness.streams`: one stream gets a root of its own, all others keep their bits."""
import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner
from small_runs import config, small_run, validating

from mmrepro import seeds
from mmrepro.errors import ResumeError


class Draws(Hook):
    """What each stream gave: bytes by the name of the stream."""
    priority = 100  # after the seeds of the step

    def __init__(self):
        self.found = {}

    def add(self, stream, tensor):
        self.found[stream] = self.found.get(stream, b'') + tensor.detach().numpy().tobytes()

    def before_train(self, runner):
        self.add('init', runner.model.line.weight)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        points = torch.stack(data_batch['x'])
        # the first number of a point is its index and noise below 1
        self.add('sampler', points[:, 0].floor())
        self.add('sample', points[:, 1])

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.add('step', torch.rand(4))  # where the step has left its stream

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        self.add('val', torch.stack(data_batch['x'])[:, 1])


def draws(work_dir, seed, **streams):
    cfg = config(work_dir, randomness=dict(seed=seed, streams=streams))
    runner = Runner.from_cfg(validating(cfg))
    hook = Draws()
    runner.register_hook(hook, priority=hook.priority)
    runner.train()
    return hook.found


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    return {seed: draws(tmp_path_factory.mktemp(f'seed{seed}'), seed) for seed in (3, 9)}


@pytest.mark.parametrize('stream', ['init', 'sampler', 'sample', 'step', 'val'])
def test_only_this_stream_changes_and_it_is_that_of_the_other_seed(whole, tmp_path, stream):
    found = draws(tmp_path, 3, **{stream: 9})
    # noise is that of the position, whichever point lies there
    expected = {name: whole[9 if name == stream else 3][name] for name in whole[3]}
    assert {name: found[name] == expected[name] for name in expected} == dict.fromkeys(found, True)
    assert whole[3][stream] != whole[9][stream]


def test_the_root_of_the_seed_itself_changes_nothing(whole, tmp_path):
    assert draws(tmp_path, 3, init=3, step=3) == whole[3]


def test_hooks_and_what_datasets_choose_have_streams_too(tmp_path):
    runner = Runner.from_cfg(config(tmp_path, randomness=dict(seed=3, streams=dict(dataset=5))))
    assert seeds.derive(seeds.root(), 'dataset', 'x') == seeds.derive(5, 'dataset', 'x')
    assert runner.cfg.randomness.streams == dict(dataset=5)
    assert runner.lifecycle.facts['randomness.streams.dataset'] == 5


def test_a_resume_compares_them(tmp_path):
    small = small_run(tmp_path, randomness=dict(seed=3, streams=dict(sample=5)))
    Runner.from_cfg(small).train()
    again = small_run(tmp_path, randomness=dict(seed=3, streams=dict(sample=5)), resume=True)
    Runner.from_cfg(again)
    for streams in ({}, dict(sample=6), dict(sample=5, step=5)):
        changed = small_run(tmp_path, randomness=dict(seed=3, streams=streams), resume=True)
        with pytest.raises(ResumeError, match=r'randomness\.streams\.\w+ .*in this stream'):
            Runner.from_cfg(changed)
