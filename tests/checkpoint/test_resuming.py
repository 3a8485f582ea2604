"""A checkpoint is saved by one object, and checked once by a resume; what a run says at its end."""
import re
import shutil

import mmengine.config.config
import pytest
import torch
from counted import Counted
from faults import tiny
from harness import Child
from mmengine.config import Config
from mmengine.runner import Runner
from small_runs import finish, small_run

from mmrepro.checkpoint import outcome
from mmrepro.digests import state_digest


def counted_checks(cfg, check=False):
    counted = Counted()
    runner = Runner.from_cfg(cfg)
    if check:
        runner.lifecycle.resume.read(runner.lifecycle.resume.point.path, 'cpu')
    runner.train()
    return counted.calls['check'], counted.calls['load']


def resumed(work_dir, path=None):
    return small_run(work_dir, resume=True, load_from=path and str(path),
                     **{'default_hooks.checkpoint': None})


@pytest.mark.parametrize('again', [False, True])
def test_a_resume_checks_the_checkpoint_once(again, base, tmp_path):
    """Its content is loaded twice: mapped, for the choice, and with its tensors."""
    cfg = resumed(tmp_path, base / 'iter_3.pth')
    assert Child(counted_checks, cfg, again).result() == (1 + again, 2 + again)


def test_an_automatic_resume_checks_each_candidate_once(tmp_path):
    finish(small_run(tmp_path))
    (tmp_path / '.last_good.pth').unlink()  # a hard link to the newest file
    (tmp_path / 'iter_8.pth').write_bytes((tmp_path / 'iter_8.pth').read_bytes()[:-9])
    # the damaged file, and the one before it
    assert Child(counted_checks, resumed(tmp_path)).result() == (2, 2)


def test_a_copied_run_leaves_the_best_checkpoint_of_the_original_alone(tmp_path):
    """CheckpointHook removes what it takes for the previous best one."""
    original, copied = tmp_path / 'original', tmp_path / 'copied'
    finish(small_run(original))
    checkpoint = torch.load(original / 'iter_3.pth', weights_only=False)
    checkpoint['message_hub']['runtime_info']['best_ckpt'] = str(original / 'best_iter_2.pth')
    torch.save(checkpoint, original / 'iter_3.pth')
    (original / 'best_iter_2.pth').write_bytes(b'best')
    (original / 'last_checkpoint').write_text(str(original / 'iter_3.pth'))
    shutil.copytree(original, copied)
    runner = Runner.from_cfg(resumed(copied))
    runner.train()
    assert runner.message_hub.get_info('best_ckpt') == str(copied / 'best_iter_2.pth')
    assert runner.lifecycle.resume.point.path == str(copied / 'iter_3.pth')
    assert 'copy of' in runner.lifecycle.resume.passed_over[0]


def test_a_run_publishes_its_last_checkpoint(tmp_path):
    cfg = small_run(tmp_path)
    cfg.default_hooks.checkpoint.update(published_keys=['meta', 'state_dict'], save_last=True)
    expected = finish(cfg)
    (published, ) = tmp_path.glob('iter_8-*.pth')
    content = torch.load(published, weights_only=False)
    assert set(content) == {'meta', 'state_dict'}
    assert content['state_dict']['line.weight'].numpy().tobytes() == expected['line.weight']


def test_weights_can_be_saved_before_the_optimizer_is_built(tmp_path):
    runner = Runner.from_cfg(small_run(tmp_path))
    runner.save_checkpoint(str(tmp_path), 'early.pth', save_optimizer=False,
                           save_param_scheduler=False)
    content = torch.load(tmp_path / 'early.pth', weights_only=False)
    assert torch.equal(content['state_dict']['line.weight'], runner.model.line.weight)
    with pytest.raises(TypeError, match='OptimWrapper'):
        runner.save_checkpoint(str(tmp_path), 'early.pth')


def test_the_text_of_the_config_is_formatted_once_for_all_checkpoints(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(mmengine.config.config, 'FormatCode',
                        lambda text, **style: (calls.append(text), (text, True))[1])
    finish(small_run(tmp_path))
    assert len(list(tmp_path.glob('iter_*.pth'))) == 8
    assert len(calls) == len(set(calls)) <= 2


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
