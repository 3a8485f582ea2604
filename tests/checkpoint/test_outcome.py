"""The last line of a training."""
import re

import pytest
import torch
from faults import tiny
from mmengine.config import Config
from mmengine.runner import Runner

from mmrepro.checkpoint import outcome
from mmrepro.digests import state_digest


@pytest.fixture
def trained(tmp_path):
    cfg = tiny.validating_and_saving(str(tmp_path / 'run'))
    cfg.log_level = 'INFO'
    runner = Runner.from_cfg(cfg)
    runner.train()
    log, = (tmp_path / 'run').glob('*/*.log')
    return runner, log.read_text().rstrip().splitlines()[-1]


def test_it_has_the_weights_and_a_command_with_the_seed_in_effect(trained, tmp_path):
    runner, line = trained
    digest, path = re.search(r'weights ([0-9a-f]{16}) after \d+ iterations, (\S+);', line).groups()
    saved = torch.load(path, weights_only=False)['state_dict']
    assert digest == state_digest(saved)[:16]
    assert f' after {runner.iter} iterations' in line
    words = line.partition('; to repeat: ')[2].split()
    assert words[:2] == ['mmrepro', 'train'] and words[3:] == [
        '--work-dir', str(tmp_path / 'run-again')]
    assert Config.fromfile(words[2]).randomness.seed == runner.seed


def test_the_command_has_the_processes_of_a_launcher_and_needs_a_config(trained, monkeypatch):
    runner, _ = trained
    monkeypatch.setattr(runner, 'cfg', Config(dict(model=dict(), launcher='pytorch')))
    monkeypatch.setenv('WORLD_SIZE', '2')
    command = outcome.command_to_repeat(runner)
    assert command.startswith('torchrun --nproc_per_node=2 -m mmrepro train ')
    assert command.endswith(' --launcher pytorch')
    monkeypatch.setattr(runner, 'cfg', Config(dict(randomness=dict(seed=1))))
    assert outcome.command_to_repeat(runner) is None
    assert 'to repeat' not in outcome.outcome(runner)
